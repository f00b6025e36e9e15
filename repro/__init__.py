"""A reproduction of PagedAttention (Kwon et al., SOSP 2023) that can be trusted, run and changed.

Importing the package imports nothing else. Each of these names is imported when it is first used:

    open                an experiment of experiments/: its rows, figures and verdicts
    experiments         what there is to open, with titles
    serve               one serving run in virtual time: a system, a deployment, a trace
    Receipts            watches a run, and says of each request where its time went
    MemoryMap           watches a run, and shows who holds which block of its memory in each iteration
    memory_map          the same for a run that is over
    what_if             the same run with a setting or one decision changed: where the two part, and what it costs
    explorer            the explorer as a widget of a notebook, with a policy of your own
    make_trace          requests with the paper's lengths, or with lengths of your own
    read_trace          requests from a file of yours, in a public format or as plain CSV
    to_frame            rows for pandas, of whatever has some: receipts, events, requests, a trace, a run
    cost_model          what an iteration is charged in virtual time
    SYSTEMS             vLLM of the paper and V1, the Orcas and FasterTransformer by name
    System              one of them, as data
    register            makes a system of your own known by its name
    contiguous_system   an Orca-style system with a reservation policy of your own
    paged_system        the paper's vLLM with scheduling policies of your own
    DEPLOYMENTS         the paper's models on their GPUs (Table 1) by name
    PreemptionMode      how a request is preempted (Section 4.5): recomputing or swapping
    LLM                 a real model over paged memory, on a CPU or a GPU
    SamplingParams      how a request's tokens are chosen, how many samples, how long
    PoolSize            how large the K/V pool of an LLM is
    model_from_config   a model with random weights from a transformers configuration
    UserError           what is raised for input that cannot work"""

from importlib import import_module

__version__ = "0.1.0"

#: name -> the module that has it, and its name there
_NAMES = {
    "open": ("repro.harness.experiment", "open"),
    "experiments": ("repro.harness.experiment", "experiments"),
    "serve": ("repro.simulate.serve", "serve"),
    "Receipts": ("repro.feed.receipts", "Receipts"),
    "MemoryMap": ("repro.history.memory_map", "MemoryMap"),
    "memory_map": ("repro.explore.runs", "memory_map"),
    "what_if": ("repro.explore.what_if", "what_if"),
    "explorer": ("repro.studies.explorer", "explorer"),
    "make_trace": ("repro.workloads", "make_trace"),
    "read_trace": ("repro.workloads.public", "read_trace"),
    "to_frame": ("repro.harness.tables", "to_frame"),
    "cost_model": ("repro.simulate.profiles", "cost_model"),
    "SYSTEMS": ("repro.engine.systems", "SYSTEMS"),
    "System": ("repro.engine.systems", "System"),
    "register": ("repro.engine.systems", "register"),
    "contiguous_system": ("repro.engine.systems", "contiguous_system"),
    "paged_system": ("repro.engine.systems", "paged_system"),
    "DEPLOYMENTS": ("repro.engine.config", "DEPLOYMENTS"),
    "PreemptionMode": ("repro.engine.scheduler", "PreemptionMode"),
    "LLM": ("repro.llm", "LLM"),
    "SamplingParams": ("repro.sampling_params", "SamplingParams"),
    "PoolSize": ("repro.llm.pool", "PoolSize"),
    "model_from_config": ("repro.llm.models", "from_config"),
    "UserError": ("repro.errors", "UserError"),
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> object:
    """The object behind one of `__all__`; AttributeError for any other name."""
    if name not in _NAMES:
        raise AttributeError(f"module 'repro' has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list:
    """What completion offers: the names above, and what is imported already."""
    return sorted({*globals(), *__all__})
