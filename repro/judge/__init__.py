"""Claims about a server that is known by its address only: OpenAI's interface over HTTP, whatever is behind it.

claims    what is claimed, the thresholds, and what a verdict follows from
client    requests, and when each of their tokens comes
ground    how fast the server is and how long prompts may be: found out first
prompts, queues, pool   the probes
suite     all of them within a budget of time
ledger    verdicts as rows, one column a server
options, run   from what the command line says to a ledger that is written"""
