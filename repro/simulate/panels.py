"""The systems as the paper set them up for one panel of Fig. 12: only FasterTransformer's batch depends on it."""

from __future__ import annotations

from dataclasses import replace

from repro.checks import lookup
from repro.engine.config import DEPLOYMENTS, Deployment
from repro.engine.memory import reserve_oracle
from repro.engine.systems import System, system

#: The most requests of a static batch, set by hand in the authors' scripts. Another model or pool has OPT-13B's or the
#: model's own limit in proportion to its K/V slots.
FASTER_TRANSFORMER_BATCH = {
    "opt-13b": {"sharegpt": 5, "alpaca": 14},
    "opt-66b": {"sharegpt": 2, "alpaca": 8},
    "opt-175b": {"sharegpt": 24, "alpaca": 80},
}


def system_for(name: str, deployment: Deployment, workload: str) -> System:
    """A system by its name, for a model on its GPUs and a workload. UserError for a name that is not known."""
    chosen = system(name)
    if name != "faster-transformer":
        return chosen
    known = deployment.model.name if deployment.model.name in FASTER_TRANSFORMER_BATCH else "opt-13b"
    batch = lookup("workload", FASTER_TRANSFORMER_BATCH[known], workload)
    limit = max(1, round(batch * deployment.kv_slots / DEPLOYMENTS[known].kv_slots))
    # The batch limit stands for its memory, so the reservation must not bind before it does.
    return replace(chosen, reservation=reserve_oracle).with_scheduler(max_num_seqs=limit)
