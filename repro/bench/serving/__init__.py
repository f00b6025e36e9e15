"""Measurements of the real engine: the paper's comparison on this machine, and what it takes to predict it.

    python -m repro.bench.serving --out DIR          # most informative points first, resumable, within a budget

`load` defines a run and what is counted in it, in real and in virtual time alike; `bench` runs it on the real engine;
`calibrate` measures how long steps take; `plan` says in which order. Notebooks read the rows (see `kept`) and never
measure on a GPU themselves.
"""
