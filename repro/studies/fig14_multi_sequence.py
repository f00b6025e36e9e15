"""Fig. 14: parallel sampling and beam search with 2, 4 and 6 sequences a request, OPT-13B on Alpaca.

vLLM shares what the sequences of a request have in common; the Orcas give each its own chunk, and a beam that continues
another one copies that one's whole chunk, as the authors' do. Everything runs in virtual time as for Fig. 12. With
several sequences it matters how the host's cost divides between a request and its sequences, and what a step of beam
search costs besides; each is calibrated on one crossing (repro/simulate/a100-2023.toml: per_request_ms, beam_step_ms).
Which beams survive is replayed from a recording of a real model (repro.simulate.beams)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from pydantic import model_validator

from repro.engine.memory import CacheOp, ContiguousKVCacheManager, KVCacheManager
from repro.engine.sequence import SequenceGroup
from repro.engine.systems import System, system
from repro.studies import sweep
from repro.studies.base import Figure, Judgement, Point, Rows, house, paper
from repro.studies.common import Positive, Seeds, Systems, trace_of
from repro.studies.fig15_sharing import Methods, Widths, check_samples

TABLES = {"latency": ("panel", "system", "rate", "seed"), "crossing": ("panel", "system", "seed", "copies")}
CALIBRATED = {("parallel/6", "vllm"), ("beam/6", "vllm")}
BASIC = "basic/1"  # one sequence a request: Fig. 12d, which the gain is compared with


class Params(sweep.SweepParameters):
    methods: Methods
    widths: Widths
    systems: Systems
    beam_seconds: Positive
    beam_seeds: Seeds
    beams: str | None
    free: ClassVar = ("seeds", "beam_seeds", "methods")

    @model_validator(mode="after")
    def _recorded(self) -> Params:
        check_samples(self.methods, ("alpaca",), self.widths, self.beams)
        return self

    @property
    def panels(self) -> dict[str, str]:
        """Panel -> its title."""
        titles = {"parallel": "Parallel sampling, {} samples", "beam": "Beam search, width {}"}
        return {f"{method}/{width}": titles[method].format(width) for method in self.methods for width in self.widths}


class ChunkCopyingKVCacheManager(ContiguousKVCacheManager):
    """Copies all of a beam's chunk when another beam takes it over, not only the blocks that hold tokens."""

    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        return super().fork(group, parents, len(self.block_table(group.seqs[0])) * self.block_size)


@dataclass(frozen=True)
class ChunkCopyingSystem(System):
    def manager(self, num_blocks: int, block_size: int, max_model_len: int, *unused: object) -> KVCacheManager:
        policy = {"reservation": self.reservation, "max_model_len": max_model_len}
        return ChunkCopyingKVCacheManager(num_blocks, block_size, **policy)


def setup_of(panel: str, name: str, duration_s: float, seed: int, beams: str | None = None) -> sweep.Setup:
    """One system in one panel; `beams` is a recording's file."""
    method, _, width = panel.partition("/")
    known = system(name)
    return sweep.Setup(
        {"panel": panel, "copies": True},
        ChunkCopyingSystem(**vars(known)) if known.reservation and method == "beam" else known,
        trace=partial(trace_of, "alpaca", lengths=None),
        duration_s=duration_s,
        seed=seed,
        **sweep.of_samples("alpaca", method, int(width), beams),
    )


def without_copies(setup: sweep.Setup) -> sweep.Setup:
    """The same where copying blocks takes no time."""
    return replace(setup, labels={**setup.labels, "copies": False}, costs=replace(setup.costs, copy_per_block_s=0.0))


def points(params: Params) -> list[Point]:
    result = []
    for panel in params.panels:
        method, _, width = panel.partition("/")
        beam = method == "beam"
        seconds = min(params.max_seconds, params.beam_seconds) if beam else params.max_seconds
        nearest = min((2, 4, 6), key=lambda known: abs(known - int(width)))
        for name in params.systems:
            rates = sweep.rates("fig14", panel, name, f"{method}/{nearest}")
            seeds = params.beam_seeds if beam else params.seeds
            setups = [setup_of(panel, name, seconds, seed, params.beams) for seed in seeds]
            result += sweep.points(setups, rates)
            if params.crossings:
                copying = [*setups, *map(without_copies, setups)] if beam and name != "vllm" else setups
                # What is found does not depend on where the search begins by more than its precision.
                start = paper.crossings("fig14", sweep.LEVEL).get(panel, {}).get(name) or max(rates)
                result += sweep.crossings(copying, start, params.precision)
    for name in ("orca-oracle", "vllm"):
        if params.crossings and name in params.systems:
            start = paper.crossings("fig12", sweep.LEVEL)["opt-13b/alpaca"][name]
            basic = setup_of(BASIC, name, params.max_seconds, params.seeds[0])
            result += sweep.crossings([basic], start, params.precision)
    return result


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    note = (
        "Calibrated while 256 sequences ran at most: the host's cost of a request, on vLLM's crossing with 6 parallel "
        "samples; that of a beam step, on vLLM's with 6 beams"
    )
    with_paper, found = not params.another_run, rows["crossing"]
    curves = sweep.draw_panels(rows["latency"], "fig14", params.panels, len(params.widths), note, with_paper)
    figures = {"fig14_multi_sequence": curves}
    if params.crossings and with_paper and not paper.figure("fig14").keys().isdisjoint(params.panels):
        crosses = "if copying beams took no time" if "beam" in params.methods else ""
        look = {"crosses": crosses, "calibrated": CALIBRATED}
        figures["fig14_crossings"] = sweep.draw(found, "fig14", params.panels, 20, 0.17, note, **look)
    return figures


def judge(rows: Rows, params: Params) -> list[Judgement]:
    found = rows["crossing"]
    mean, ends = sweep.spread(found[found["copies"]], "panel", "system")
    free, _ = sweep.spread(found[~found["copies"]], "panel", "system")

    def table(values: dict[Any, Any]) -> dict[str, Any]:
        return {panel: {name: values[panel, name] for name in params.systems} for panel in params.panels}

    def gain(panel: str, rates: dict[Any, float] = mean) -> float:
        return mean[panel, "vllm"] / rates[panel, "orca-oracle"]

    note = (
        "vLLM's crossings with 6 parallel samples and with 6 beams are the calibrations of per_request_ms and "
        "beam_step_ms, and so no tests of the model."
    )
    gains = {"basic": gain(BASIC)}
    if "beam" in params.methods:
        orcas, beams = (
            [name for name in params.systems if name != "vllm"],
            [panel for panel in params.panels if panel.startswith("beam")],
        )
        read = "; ".join(f"{panel} {', '.join(f'{name} {free[panel, name]:.3g}' for name in orcas)}" for panel in beams)
        drawn = {panel: rates["orca-oracle"] for panel, rates in paper.crossings("fig14", sweep.LEVEL).items()}
        lost = [100 * (1 - drawn[f"beam/{width}"] / drawn[f"parallel/{width}"]) for width in params.widths]
        note += (
            f" Beams: traces of {params.beam_seconds:g} s. In the paper Orca (Oracle) serves {min(lost):.0f} to "
            f"{max(lost):.0f} % fewer requests with beams than with samples, though both take the same memory, so a "
            "beam step itself cost time there; one constant a step fits vLLM, Oracle and Pow2, none a request or a "
            f"sequence does. If the Orcas' copies took no time: {read}."
        )
        rising = [gain(BASIC), *(gain(f"beam/{width}") for width in params.widths)]
        steps = ("one", *(f"beam-{width}" for width in params.widths))
        gains |= {"beam-6": gain("beam/6"), "rising": dict(zip(steps, rising))}
        text = ", ".join(f"{value:.2f}" for value in rising)
        uncharged = gain("beam/6", free)
        gain_note = f"Basic and beam 2, 4, 6: {text}; beam 6 if Oracle's copies took no time: {uncharged:.2f}."
    else:
        gain_note = "Parallel 2, 4, 6: " + ", ".join(f"{gain(panel):.2f}" for panel in params.panels) + "."
    widest = {panel: gain(panel) for panel in params.panels if panel.endswith(f"/{max(params.widths)}")}
    complex_gains = {"more-complex-decoding": 100 * (min(widest.values()) / gain(BASIC) - 1)}
    facts = {"basic": gain(BASIC), "widest": ", ".join(f"{panel} {value:.2f}" for panel, value in widest.items())}
    return [
        Judgement("fig14-curves", table(mean), "modelled", table(ends), note),
        Judgement("gain-grows-with-sharing", gains, "modelled", note=gain_note),
        Judgement("larger-gains-elsewhere", complex_gains, "modelled", facts=facts),
    ]
