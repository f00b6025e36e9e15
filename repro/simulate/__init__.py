"""Virtual time: the scheduler and the memory decide as always, and a model says how long an iteration takes.

    serve        one serving run as one call
    panels       the systems as one panel of Fig. 12 has them
    executor     runs nothing; durations come from a cost model, lengths from the trace
    cost_model   an iteration's time as a linear model
    profiles     its coefficients: the A100 of 2023 (a100-2023.toml), or a datasheet's rates
    step_times   a cost model that is a table measured on one machine
    beams        which beams survive, recorded from a real model
    metrics      numbers from a run (docs/metrics.md)
    load         one run with a window, the same for the real engine and for its prediction

Nothing here imports torch."""
