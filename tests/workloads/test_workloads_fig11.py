"""The embedded length distributions: they are what they say, and they look like the paper's real pairs."""

from pathlib import Path

import numpy as np
import pytest

from repro.errors import UserError
from repro.workloads import fig11_lengths, lengths_from_csv
from repro.workloads.fig11 import Marginal, fig11_data, fit_marginal
from repro.workloads.trace import rank_correlation

BOTH = pytest.mark.parametrize("workload", ["sharegpt", "alpaca"])
SAMPLE = 400_000


@pytest.fixture(scope="module")
def samples() -> dict[str, np.ndarray]:
    return {workload: fig11_lengths(workload).draw(SAMPLE, seed=0) for workload in ("sharegpt", "alpaca")}


def lengths_of(marginal: Marginal) -> np.ndarray:
    return np.arange(marginal.first, marginal.first + len(marginal.cdf) - 1)


@BOTH
@pytest.mark.parametrize("side", ["prompt", "output"])
def test_marginals_keep_every_bin_and_the_printed_mean(workload: str, side: str) -> None:
    histogram = fig11_data()[workload][side]
    assert len(histogram["density"]) == 128
    marginal = fit_marginal(histogram)
    lengths, shares = lengths_of(marginal), np.diff(marginal.cdf)
    assert (lengths[0], lengths[-1]) == (histogram["min_tokens"], histogram["max_tokens"])
    assert (shares >= 0).all() and shares.sum() == pytest.approx(1)
    binned, edges = np.histogram(lengths, 128, weights=shares)
    drawn = np.array(histogram["density"]) * np.diff(edges)
    assert np.abs(binned - drawn / drawn.sum()).max() < 1e-9
    # ShareGPT's prompts: the densities' own rounding leaves 0.08 tokens; the slope cannot be negative
    assert (lengths * shares).sum() == pytest.approx(histogram["mean_tokens"], rel=6e-4)
    assert marginal.cell_mass.min() > 0 and marginal.cell_mass.sum() == pytest.approx(1)
    assert marginal.cell_mean @ marginal.cell_mass == pytest.approx((lengths * shares).sum())
    membership = marginal.quintile_membership()
    assert np.allclose(membership.sum(axis=1), 1) and np.allclose(marginal.cell_mass @ membership, 0.2)


def test_a_flat_histogram_stays_flat_beyond_its_first_bin() -> None:
    flat = {"min_tokens": 1, "max_tokens": 1280, "mean_tokens": 640.5, "density": [1 / 1279] * 128}
    shares = np.diff(fit_marginal(flat).cdf)
    assert shares[40:-40] == pytest.approx(1 / 1280, rel=0.06)


@BOTH
def test_joint_has_both_marginals_the_conditional_means_and_nothing_over_the_limit(workload: str) -> None:
    joint, spec = fig11_lengths(workload), fig11_data()[workload]
    assert joint.mass.min() >= 0 and joint.mass.sum() == pytest.approx(1)
    assert np.abs(joint.mass.sum(axis=1) - joint.prompt.cell_mass).max() < 1e-5
    assert np.abs(joint.mass.sum(axis=0) - joint.output.cell_mass).max() < 1e-12
    longest = joint.prompt.ends[1:, None] + joint.output.ends[None, 1:]
    assert (joint.mass[longest > 2048] == 0).all()
    assert joint.facts.mean_prompt_tokens == pytest.approx(spec["prompt"]["mean_tokens"], rel=6e-4)
    assert joint.facts.mean_output_tokens == pytest.approx(spec["output"]["mean_tokens"], rel=1e-6)
    low = 0
    for high, wanted in spec["mean_output_by_prompt"]:
        rows = (joint.prompt.ends[1:] > low) & (joint.prompt.ends[1:] <= high)
        weight = joint.mass[rows].sum(axis=0)
        assert weight @ joint.output.cell_mean / weight.sum() == pytest.approx(wanted, abs=0.5)
        low = high


@BOTH
def test_joint_keeps_the_measured_dependence(workload: str, samples: dict[str, np.ndarray]) -> None:
    spec, joint = fig11_data()[workload], fig11_lengths(workload)
    table = joint.prompt.quintile_membership().T @ joint.mass @ joint.output.quintile_membership() * 500
    assert np.abs(table - spec["quintile_shares_percent"]).max() < 1.3  # percentage points
    # not fitted: it follows from the table and the means
    assert rank_correlation(*samples[workload].T) == pytest.approx(spec["spearman"], abs=0.015)


@BOTH
def test_draws_follow_the_joint(workload: str, samples: dict[str, np.ndarray]) -> None:
    joint, pairs = fig11_lengths(workload), samples[workload]
    assert pairs.dtype == np.int64 and pairs.sum(axis=1).max() <= 2048 and pairs.min() >= 1
    for side, marginal in enumerate((joint.prompt, joint.output)):
        shares = np.diff(marginal.cdf)
        expected = shares * SAMPLE
        counts = np.bincount(pairs[:, side], minlength=marginal.first + len(shares))[marginal.first :]
        assert counts.sum() == SAMPLE and (counts[shares == 0] == 0).all()
        big = expected >= 20
        chi2 = ((counts - expected)[big] ** 2 / expected[big]).sum()
        # wide enough for the marginals' last 1e-5, far too narrow for a shift by one token
        assert abs(chi2 - big.sum()) < 6 * np.sqrt(2 * big.sum())


def test_a_seed_gives_one_sequence_and_seeds_differ() -> None:
    joint = fig11_lengths("sharegpt")
    assert np.array_equal(joint.draw(5000, 1)[:100], joint.draw(100, 1))
    assert not np.array_equal(joint.draw(100, 1), joint.draw(100, 2))
    assert joint.draw(0, 1).shape == (0, 2)


@BOTH
def test_limits_below_the_papers_drop_requests_and_say_so(workload: str) -> None:
    full, cut = fig11_lengths(workload), fig11_lengths(workload, 300)
    pairs, kept = full.draw(SAMPLE, 0), cut.draw(50_000, 0)
    assert kept.sum(axis=1).max() <= 300
    within = pairs[pairs.sum(axis=1) <= 300]
    assert cut.facts.dropped_share == pytest.approx(1 - len(within) / SAMPLE, abs=0.03)
    assert np.allclose(kept.mean(axis=0), within.mean(axis=0), rtol=0.05)
    assert cut.facts.mean_output_tokens == pytest.approx(kept[:, 1].mean(), rel=0.02)
    assert "<= 300" in cut.facts.filter
    longer = fig11_lengths(workload, 4096)
    assert np.array_equal(longer.draw(100, 0), full.draw(100, 0)) and "<= 2048" in longer.facts.filter
    shortest = int(full.prompt.first + full.output.first)
    assert fig11_lengths(workload, shortest).draw(10, 0).sum(axis=1).tolist() == [shortest] * 10
    with pytest.raises(UserError, match="leaves no"):
        fig11_lengths(workload, shortest - 1)


def test_unknown_embedded_workload() -> None:
    with pytest.raises(UserError, match="sharegpt, alpaca"):
        fig11_lengths("wmt16")


# ---- against the real pairs of the authors' artifact; of what is compared below, only the conditional means
# ---- went into the distribution, besides Fig. 11 and the quintile table


@pytest.fixture(scope="module")
def real(reference_dir: Path) -> np.ndarray:
    return lengths_from_csv(reference_dir / "data" / "sharegpt_lengths.csv").pairs


def test_figure_is_the_histogram_of_the_real_pairs(real: np.ndarray) -> None:
    for side, name in enumerate(("prompt", "output")):
        histogram = fig11_data()["sharegpt"][name]
        density, _ = np.histogram(real[:, side], 128, density=True)
        assert np.abs(density - histogram["density"]).max() < 2e-6


def test_means_deciles_and_correlation_agree(real: np.ndarray, samples: dict[str, np.ndarray]) -> None:
    ours = samples["sharegpt"]
    assert np.allclose(ours.mean(axis=0), real.mean(axis=0), rtol=0.01)
    deciles = np.arange(0.1, 0.95, 0.1)
    for side in (0, 1):
        a, b = np.quantile(ours[:, side], deciles), np.quantile(real[:, side], deciles)
        assert (np.abs(a - b) <= np.maximum(1, 0.015 * b)).all(), (a, b)
    assert rank_correlation(*ours.T) == pytest.approx(rank_correlation(*real.T), abs=0.01)
    assert np.corrcoef(ours.T)[0, 1] == pytest.approx(np.corrcoef(real.T)[0, 1], abs=0.01)
    # what a cache holds over a request's life goes with the product of the two
    assert ours.prod(axis=1).mean() == pytest.approx(real.prod(axis=1).mean(), rel=0.02)


def test_conditional_means_agree(real: np.ndarray, samples: dict[str, np.ndarray]) -> None:
    ours = samples["sharegpt"]
    for low, high in ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 2048)):
        a, b = (pairs[(pairs[:, 0] >= low) & (pairs[:, 0] <= high), 1].mean() for pairs in (ours, real))
        assert a == pytest.approx(b, rel=0.02), (low, high)


def test_short_lengths_agree_as_far_as_a_histogram_can_tell(real: np.ndarray, samples: dict[str, np.ndarray]) -> None:
    ours = samples["sharegpt"]
    assert (1 / ours[:, 1]).mean() == pytest.approx((1 / real[:, 1]).mean(), rel=0.03)
    assert (1 / ours[:, 0]).mean() == pytest.approx((1 / real[:, 0]).mean(), rel=0.05)
    for side, most in ((0, 0.02), (1, 0.007)):  # largest distance of the distributions, at 7 and at 10 tokens
        below = [np.cumsum(np.bincount(pairs[:, side], minlength=2048)) / len(pairs) for pairs in (ours, real)]
        assert np.abs(below[0] - below[1]).max() < most
