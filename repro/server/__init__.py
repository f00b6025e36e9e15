"""OpenAI's interface over an engine: a real model's, or a simulated one whose queue, memory and cache are real.

    options     those of the command line
    run         from what the command line says to a server that listens
    app         the endpoints
    protocol    requests as OpenAI's clients send them, checked
    answers     answers in OpenAI's JSON, whole or as a stream of events
    backend     what the endpoints ask of an engine
    simulated   an engine without a model: iterations are slept through
    words       what stands for a tokenizer there
    metrics     what a monitoring system reads
    log         a line a request, for the simulator
    replay      a log in the simulator: does it decide the same?

It needs the extra `server`. A simulated server imports no torch."""
