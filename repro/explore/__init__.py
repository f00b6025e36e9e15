"""The explorer: runs of the scheduler that a reader steers, as one page without a network. Nothing but the standard
library is imported by what runs in a browser: settings, queue, rules, recording, run.

    settings     what a reader can set, and the runs that the page begins with
    queue        the requests: lengths that travel with the page, or those of Python's own generator
    rules        a reservation or a preemption rule that a reader writes
    recording    a run's blocks, decisions in sentences, and counters
    run          settings -> frames, log and counters as one dictionary: in a browser, on the page, in a notebook
    page         figures/explorer.html: interpreter, sources and first runs in one file
    widget       the same controls and maps in a notebook, over runs of its kernel

Runs with something changed:

    runs         what a user calls a run, as a recipe; its memory map
    decision     one decision of one iteration, taken otherwise
    what_if      the same arrivals with one setting or one decision changed
    difference   where two runs part, what differs from there on, and what it costs"""
