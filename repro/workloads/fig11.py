"""The embedded length distributions: ShareGPT-like and Alpaca-like requests, rebuilt from Fig. 11 of the paper.

What: a joint distribution of (prompt, output) lengths for each of the two workloads, drawn without any data set or
network. Why rebuilt: the paper prints only the two marginal histograms and their means, while memory waste and latency
also depend on how prompt and output go together, so the measured dependence is put back in.

Recipe, with nothing fitted to any result of the paper:
1. each marginal is a monotone cubic spline through the histogram's cumulative shares; its one free number, the slope at
   the shortest length, is the non-negative one that comes closest to the mean printed in the figure;
2. the joint starts from the measured 5 x 5 table of quintile shares, with no mass on prompt + output > 2048;
3. iterative proportional fitting brings back both marginals (plain rejection would lose 5 % of ShareGPT's mean prompt)
   and the measured mean output of each prompt range.

Not known are the real pairs, spikes at single lengths (such as the stock greeting of 10 tokens), and any dependence
finer than the quintile table and the conditional means."""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from repro.errors import UserError
from repro.workloads.lengths import LENGTHS_STREAM, SourceFacts

EMBEDDED = ("sharegpt", "alpaca")
_FINE_TOKENS = 64  # up to here a cell of the joint is one length; beyond, one bin of the histogram
_SWEEPS = 50  # of proportional fitting; it stands still after about 30


@functools.cache
def fig11_data() -> dict[str, Any]:
    """The numbers behind this module: histograms, printed means, measured dependence, and their sources."""
    file = resources.files("repro.workloads").joinpath("data/fig11.json")
    return json.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class Marginal:
    """One length's distribution: cdf[k] = P(length <= first - 1 + k), and the cells that the joint is made of.

    `ends` holds first - 1 and then the last length of each cell; every cell has mass."""

    first: int
    cdf: np.ndarray
    ends: np.ndarray

    @property
    def cell_cdf(self) -> np.ndarray:
        return self.cdf[self.ends - self.ends[0]]

    @property
    def cell_mass(self) -> np.ndarray:
        return np.diff(self.cell_cdf)

    @property
    def cell_mean(self) -> np.ndarray:
        """Mean length within each cell, in tokens."""
        tokens = np.diff(self.cdf) * np.arange(self.first, self.first + len(self.cdf) - 1)
        return np.add.reduceat(tokens, self.ends[:-1] - self.ends[0]) / self.cell_mass

    def quintile_membership(self) -> np.ndarray:
        """[cells, 5]: the share of each cell that lies in each fifth of the distribution."""
        low, high, cuts = self.cell_cdf[:-1, None], self.cell_cdf[1:, None], np.linspace(0, 1, 6)
        overlap = np.minimum(high, cuts[1:]) - np.maximum(low, cuts[:-1])
        return np.clip(overlap, 0, None) / (high - low)

    def pick(self, cell: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Lengths by inversion of the CDF within the given cells."""
        low, high = self.cell_cdf[cell], self.cell_cdf[cell + 1]
        length = self.first - 1 + np.searchsorted(self.cdf, low + uniform * (high - low), side="right")
        return np.minimum(length, self.ends[cell + 1])  # rounding may reach the cell's upper edge


def _spline_basis(knots: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, ...]:
    """Interval and the four cubic Hermite weights (value, slope at its left; value, slope at its right)."""
    index = np.clip(np.searchsorted(knots, position, side="right") - 1, 0, len(knots) - 2)
    width = np.diff(knots)[index]
    s = (position - knots[index]) / width
    return (index, (1 + 2 * s) * (1 - s) ** 2, s * (1 - s) ** 2 * width, s**2 * (3 - 2 * s), -(s**2) * (1 - s) * width)


def _monotone_slopes(knots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Slopes of the monotone cubic of Fritsch and Butland (SIAM J. Sci. Stat. Comput. 5, 1984), 0 at ends."""
    width, rise = np.diff(knots), np.diff(values) / np.diff(knots)
    before, after = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    slopes = np.zeros(len(knots))
    inner = (rise[:-1] > 0) & (rise[1:] > 0)
    weighted = before[inner] / rise[:-1][inner] + after[inner] / rise[1:][inner]
    slopes[1:-1][inner] = (before + after)[inner] / weighted
    return slopes


def fit_marginal(histogram: dict[str, Any]) -> Marginal:
    """The marginal of one 128-bin histogram {min_tokens, max_tokens, mean_tokens, density}."""
    first, last = histogram["min_tokens"], histogram["max_tokens"]
    edges = np.linspace(first, last, len(histogram["density"]) + 1)
    # A bin is closed on its left and open on its right, but for the last one, which has both ends.
    bin_last = np.ceil(edges[1:] - 1e-9).astype(np.int64) - 1
    bin_last[-1] = last
    knots = np.concatenate([[first - 1], bin_last])
    values = np.concatenate([[0.0], np.cumsum(histogram["density"])])
    values /= values[-1]
    slopes = _monotone_slopes(knots, values)

    lengths = np.arange(first - 1, last + 1)
    index, left, left_slope, right, right_slope = _spline_basis(knots, lengths)
    after = index + 1
    cdf = left * values[index] + left_slope * slopes[index] + right * values[after] + right_slope * slopes[after]
    # The mean is last - sum(cdf[:-1]), linear in the start slope: one division fits the printed mean.
    per_slope = np.where(index == 0, left_slope, 0.0)
    excess = (last - cdf[:-1].sum()) - histogram["mean_tokens"]
    steepest = 3 * values[1] / (knots[1] - knots[0])  # beyond it the cubic would not be monotone
    cdf = cdf + per_slope * np.clip(excess / per_slope.sum(), 0.0, steepest)
    cdf = np.clip(np.maximum.accumulate(cdf), 0.0, 1.0)

    fine = np.arange(first - 1, _FINE_TOKENS + 1)
    ends = np.concatenate([fine, bin_last[bin_last > _FINE_TOKENS]])
    has_mass = np.diff(cdf[ends - ends[0]]) > 1e-12  # an empty bin joins the next one
    return Marginal(first, cdf, ends[np.concatenate([[True], has_mass])])


@dataclass(frozen=True, eq=False)
class JointLengths:
    """A joint distribution of prompt and output lengths; `mass` is [prompt cells, output cells], in all 1."""

    prompt: Marginal
    output: Marginal
    mass: np.ndarray
    facts: SourceFacts

    def draw(self, num_pairs: int, seed: int) -> np.ndarray:
        """[num_pairs, 2] independent (prompt, output) pairs; a seed's draws of any length begin alike."""
        uniform = np.random.default_rng([seed, LENGTHS_STREAM]).random((num_pairs, 3))
        cumulative = np.cumsum(self.mass)
        cell = np.searchsorted(cumulative / cumulative[-1], uniform[:, 0], side="right")
        prompt_cell, output_cell = np.divmod(cell, self.mass.shape[1])
        prompt = self.prompt.pick(prompt_cell, uniform[:, 1])
        return np.stack([prompt, self.output.pick(output_cell, uniform[:, 2])], axis=1)


def _over_limit(prompt: Marginal, output: Marginal, limit: int) -> np.ndarray:
    """Cells that hold some pair longer than the limit. Leaving them out whole keeps every draw within it."""
    return prompt.ends[1:, None] + output.ends[None, 1:] > limit


@functools.cache
def _fitted(workload: str) -> tuple[Marginal, Marginal, np.ndarray]:
    data = fig11_data()
    spec = data[workload]
    prompt, output = fit_marginal(spec["prompt"]), fit_marginal(spec["output"])
    density = np.array(spec["quintile_shares_percent"]) / 20.0  # 20 % in each cell would be independence
    joint = prompt.quintile_membership() @ density @ output.quintile_membership().T
    joint *= np.outer(prompt.cell_mass, output.cell_mass)
    joint[_over_limit(prompt, output, data["max_model_len"])] = 0.0

    range_ends = [largest for largest, _ in spec["mean_output_by_prompt"]]
    prompt_range = np.searchsorted(range_ends, prompt.ends[1:])
    tokens = output.cell_mean
    for _ in range(_SWEEPS):
        for number, (_, wanted) in enumerate(spec["mean_output_by_prompt"]):
            rows = prompt_range == number
            weight = joint[rows].sum(axis=0) / joint[rows].sum()
            mean = weight @ tokens
            variance = weight @ (tokens - mean) ** 2
            joint[rows] *= np.exp((wanted - mean) / variance * (tokens - mean))  # one Newton step of the tilt
        joint *= (prompt.cell_mass / joint.sum(axis=1))[:, None]
        joint *= output.cell_mass / joint.sum(axis=0)
    joint.setflags(write=False)
    return prompt, output, joint


@functools.cache
def fig11_lengths(workload: str, max_model_len: int = 2048) -> JointLengths:
    """The embedded distribution of `workload`, without pairs over `max_model_len` tokens (Fig. 11).

    A limit under 2048 drops the joint's cells (one length each up to 64 tokens, 4 to 16 lengths beyond) that hold a
    longer pair; one over 2048 changes nothing, as the figure holds no longer pairs. Raises UserError for an unknown
    workload, or a limit that leaves nothing."""
    if workload not in EMBEDDED:
        raise UserError(f"unknown workload {workload!r}: the embedded ones are {', '.join(EMBEDDED)}")
    prompt, output, mass = _fitted(workload)
    paper_limit = fig11_data()["max_model_len"]
    dropped = 0.0
    if max_model_len < paper_limit:
        beyond = _over_limit(prompt, output, max_model_len)
        kept, dropped = np.where(beyond, 0.0, mass), float(mass[beyond].sum())
        if not kept.any():
            raise UserError(f"max_model_len {max_model_len} leaves no {workload} request: raise it (the paper's: 2048)")
        mass = kept / kept.sum()
    facts = SourceFacts(
        source=f"embedded, rebuilt from Fig. 11 of arXiv:2309.06180 ({workload})",
        recipe="independent draws from the joint distribution of prompt and output; a short trace is a small "
        "long one (the authors took the first N pairs of a file and shuffled them, so theirs was not)",
        filter=f"prompt + output <= {min(max_model_len, paper_limit)}",
        dropped_share=dropped,
        mean_prompt_tokens=float(mass.sum(axis=1) @ prompt.cell_mean),
        mean_output_tokens=float(mass.sum(axis=0) @ output.cell_mean),
    )
    return JointLengths(prompt, output, mass, facts)
