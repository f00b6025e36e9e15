"""The explorer: runs of the scheduler that a reader steers, as one page without a network. Nothing but the standard
library is imported by what runs in a browser: settings, queue, rules, sentences, recording, run.

    settings     what a reader can set, and the runs that the page begins with
    queue        the requests: lengths that travel with the page, or those of Python's own generator
    rules        a reservation or a preemption rule that a reader writes
    sentences    what a scheduler decided, in words
    recording    a run's blocks, decisions in sentences, and counters
    run          settings -> frames, log and counters as one dictionary: in a browser, on the page, in a notebook
    page         figures/explorer.html: interpreter, sources and first runs in one file
    widget       the same controls and maps in a notebook, over runs of its kernel

The memory of any run over time:

    memory_map   an observer that keeps who holds which block, from iteration to iteration
    tables       block tables as changes and keyframes
    happenings   who starts, is driven out, returns, ends and waits
    rent         who pays for the pool: slots x time
    again        the map of a run that nobody watched
    map_page     a map as a page"""
