"""The engine: what the paper describes, and nothing else. Standard library only, with two leaves from beside this
folder: checks, and sampling_params (how a user asks for outputs).

Read it in this order; it takes a quarter of an hour.

    sequence     a request and the sequences that it becomes (§4.4)
    running      the groups that run, and what follows from their lengths
    scheduler    who runs in the next iteration: admit, preempt, resume (§4.5)
    loop         the main loop: requests arrive, the scheduler decides, the executor runs, the clock moves
    executor     what the loop asks of whatever runs an iteration
    clock        virtual or real time
    memory/      K/V memory: block tables, sharing, copy-on-write (§4.2 to 4.4); the Orcas' contiguous chunks
                 (§6.1); prefix_cache: blocks found by what they hold (vLLM V1)
    events       what the scheduler decided, as records
    systems      vLLM, the Orcas and FasterTransformer as data
    policies     what a scheduler decides by a function: the order of the queue, who is driven out, how
    chunked      the scheduler with a token budget an iteration (vLLM V1)
    config       models, GPUs and the paper's deployments (Table 1)"""
