"""Measurements of the real engine: the paper's comparison on this machine, and what it takes to predict it.

`plan` says what is measured in which order, `warm_engine` runs it on the real engine, `calibrate` measures how long
steps take, `generate` what transformers does alone. `repro.simulate.load` defines a run and what is counted in it, in
real and in virtual time alike. Notebooks read the rows (see `repro.bench.kept`) and never measure on a GPU themselves.
"""
