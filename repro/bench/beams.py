"""Records which beams survive: beam search of the embedded small model on the prompts of beam_prompts.json.

Whether beams share blocks depends on which of them a model keeps, and that cannot be made up. The model runs through
the project's own engine; what is kept are the parent choices that its scheduler logged, no text. Stop tokens are
ignored, as in the paper's traces. The prompts were written for this purpose; their lengths are spread like those of the
traces: 18 tokens on average for instructions, 112 and up to 611 for chat. Plain text is paragraphs of this project's
own documents, to be continued. When all is recorded (a few hours on a CPU), parents.json beside the rows is what
`repro.simulate.beams` reads: copied over its own, simulations replay it."""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import resources
from itertools import product
from typing import Any

import torch

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.engine.events import Event
from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.hashing import canonical_json, pretty_json, sha256_file, sha256_text, write_atomically
from repro.llm import LLM, models
from repro.llm.pool import PoolSize
from repro.setup.machine import machine
from repro.simulate.beams import FILE, FORMAT, WIDTHS

#: output tokens to record for each kind of prompt; longer outputs repeat the later half (`Recording.parents` there)
STEPS = {"instruction": 1024, "chat": 1024, "text": 1024}
MAX_NUM_SEQS = 256  # in a batch


def prompts() -> dict[str, list[str]]:
    """kind -> prompts, written for this purpose."""
    return json.loads(resources.files(__package__).joinpath("beam_prompts.json").read_text(encoding="utf-8"))


def prompts_hash(texts: dict[str, list[str]]) -> str:
    """What the manifest of a recording says of its prompts; more prompts may follow them in the file."""
    return sha256_text(canonical_json(texts))


def batches(
    prompt_tokens: list[int], output_tokens: int, width: int, num_blocks: int, block_size: int
) -> Iterator[slice]:
    """Prompts in order, as many at once as fit without sharing a block, so none is preempted. UserError if one does not
    fit."""
    start, held, room = 0, 0, num_blocks * 0.98  # the pool keeps one block in a hundred free when it admits
    for index, tokens in enumerate(prompt_tokens):
        blocks = width * -(-(tokens + output_tokens) // block_size)
        if blocks > room:
            raise UserError(
                f"{width} beams of {tokens} + {output_tokens} tokens take {blocks} of the pool's {num_blocks} blocks; "
                "give it more memory with --kv-gib"
            )
        if held + blocks > room or (index - start + 1) * width > MAX_NUM_SEQS:
            yield slice(start, index)
            start, held = index, 0
        held += blocks
    yield slice(start, len(prompt_tokens))


def parents_of(events: Iterable[Event], num_requests: int, width: int, num_steps: int) -> list[str]:
    """For each request its parent choices, one digit for each beam and step.

    A group admitted in iteration k has its first tokens after it and decodes from k + 1 on; the scheduler logs the fork
    that follows iteration i under i + 1, and logs none where every beam continues itself."""
    unmoved = tuple(range(width))
    steps = [[unmoved] * num_steps for _ in range(num_requests)]
    admitted: dict[int, int] = {}
    for event in events:
        if event.kind == "admit":
            admitted[event.request_id] = event.iteration
        elif event.kind == "fork":
            steps[event.request_id][event.iteration - admitted[event.request_id] - 2] = event.detail["parents"]
    return ["".join(map(str, (parent for step in request for parent in step))) for request in steps]


class Beams(Benchmark):
    """Its rows are of one prompt and width."""

    measures = (parents_of, LLM)
    method = "Beam search at temperature 0, stop tokens ignored; parents as the scheduler logged them."
    shown = ("kind", "width", "prompt")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.pool = PoolSize(kv_gib=options.kv_gib)
        self.setting = {"model": options.model, "dtype": options.dtype, "device": options.device}

    def start(self, recording: Recording) -> dict[str, Any]:
        num_steps = {kind: self.options.steps or steps for kind, steps in STEPS.items()}
        self.prepare(LLM(**self.setting, pool=self.pool, swap_gib=0.0, max_num_seqs=MAX_NUM_SEQS), num_steps)
        return self.manifest()

    def prepare(self, llm: LLM, num_steps: dict[str, int]) -> None:
        """Have `num_steps` of each kind searched by this model."""
        self.llm, self.num_steps = llm, num_steps
        self.texts = {kind: prompts()[kind][: self.options.prompts] for kind in num_steps}
        self.ids = {kind: [llm.tokenizer(text)["input_ids"] for text in texts] for kind, texts in self.texts.items()}
        self.lengths = {kind: [len(ids) for ids in several] for kind, several in self.ids.items()}

    def steps(self, recording: Recording) -> Iterator[Step]:
        """One a batch."""
        for (kind, count), width in product(self.num_steps.items(), WIDTHS):
            for batch in batches(self.lengths[kind], count + 2, width, self.llm.num_blocks, self.llm.block_size):
                key = f"{kind}/{width} beams/{count} steps/prompts {batch.start} to {batch.stop - 1}"
                expected_s = 0.01 * width * count * (batch.stop - batch.start)  # on a CPU
                yield Step(key, expected_s, partial(self._rows, kind, width, batch))

    def _rows(self, kind: str, width: int, batch: slice) -> list[Row]:
        # Two tokens beyond the steps: the first one is chosen without a parent, and after the last one nothing forks.
        count = self.num_steps[kind]
        search = {"n": width, "use_beam_search": True, "temperature": 0.0, "ignore_eos": True}
        made = self.llm.generate(self.ids[kind][batch], SamplingParams(**search, max_tokens=count + 2), progress=False)
        if made.statistics.num_preemptions:
            raise RuntimeError("a preempted group decodes in other iterations than its log says; use a larger pool")
        found = enumerate(parents_of(made.events, len(made), width, count), batch.start)
        return [{"kind": kind, "width": width, "prompt": prompt, "parents": parents} for prompt, parents in found]

    def finish(self, recording: Recording) -> dict[str, Any]:
        """Write the file that simulations read, if all is there."""
        if all(recording.find(step.key) is not None for step in self.steps(recording)):
            write_atomically(recording.folder / FILE, pretty_json(self.content(recording)))
            print(f"{recording.folder / FILE}: copy it over repro/simulate/{FILE} to have it replayed")
        return {}

    def content(self, recording: Recording) -> dict[str, Any]:
        """What `repro.simulate.beams.recording` reads. KeyError if a prompt is missing."""
        found = {(row["kind"], int(row["width"]), int(row["prompt"])): row["parents"] for row in recording.rows}
        parents = {
            kind: {str(width): [found[kind, width, prompt] for prompt in range(len(texts))] for width in WIDTHS}
            for kind, texts in self.texts.items()
        }
        return {"format": FORMAT, "manifest": self.manifest(), "parents": parents}

    def manifest(self) -> dict[str, Any]:
        loaded, about = self.llm.loaded, machine()
        is_embedded, is_cuda = loaded.config.name == models.EMBEDDED, loaded.device.type == "cuda"
        return {
            "what": "parent of each beam at each step: one digit a beam, width digits a step",
            "model": loaded.config.name,
            "weights_sha256": sha256_file(models.embedded_file()) if is_embedded else None,
            "dtype": str(loaded.dtype),
            "evidence": "recorded",
            "temperature": 0.0,
            "stop_tokens": "ignored",
            "prompts_sha256": prompts_hash(self.texts),
            "prompt_tokens": self.lengths,
            "num_steps": self.num_steps,
            "device": torch.cuda.get_device_name(loaded.device) if is_cuda else f"cpu, {about['cpu']}",
            "versions": about["libraries"],
        }
