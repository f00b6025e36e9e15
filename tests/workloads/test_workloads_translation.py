"""Translation requests: their lengths, the prefix in front, other sources, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from repro.errors import UserError
from repro.workloads.translation import MEAN_TOKENS, SentenceLengths, translation_trace


def test_the_default_sentences_have_the_stated_means_and_spread() -> None:
    lengths = SentenceLengths().draw(100_000, 1)
    assert lengths.mean(axis=0) == pytest.approx(MEAN_TOKENS, rel=0.01)
    spread = lengths.std(axis=0) / lengths.mean(axis=0)
    assert spread[0] == pytest.approx(0.5, rel=0.03)
    assert spread[1] == pytest.approx(np.sqrt(1.25 * 1.0225 - 1), rel=0.03)
    assert lengths.min() >= 2
    assert np.corrcoef(lengths.T)[0, 1] > 0.9  # a long sentence has a long translation


@pytest.mark.parametrize("scale", [0.75, 2.0])
def test_scale_stretches_both_lengths(scale: float) -> None:
    plain, stretched = SentenceLengths().draw(1000, 2), SentenceLengths(scale).draw(1000, 2)
    assert np.abs(stretched - scale * plain).max() <= 0.5 + 0.5 * scale
    assert SentenceLengths(scale).facts.mean_output_tokens == pytest.approx(scale * 37)


def test_the_prefix_comes_before_every_sentence() -> None:
    traces = {prefix: translation_trace(prefix, 5.0, 60.0, seed=3) for prefix in (0, 80, 341)}
    for prefix, trace in traces.items():
        assert (trace.prompt_tokens == traces[0].prompt_tokens + prefix).all()
        assert (trace.output_tokens == traces[0].output_tokens).all()
        assert trace.card.source.mean_prompt_tokens == pytest.approx(prefix + 28)
    assert "341 tokens of a shared prefix" in traces[341].card.source.recipe


def test_a_seeds_sentences_begin_alike() -> None:
    assert (SentenceLengths().draw(900, 4)[:400] == SentenceLengths().draw(400, 4)).all()


def test_lengths_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt_tokens,output_tokens\n30,40\n10,1000\n2000,20\n")
    trace = translation_trace(80, 10.0, 60.0, 0, str(path))
    assert set(trace.prompt_tokens) == {90, 110}  # the third pair leaves no room for the prefix
    assert set(trace.output_tokens) == {40, 1000}
    with pytest.raises(UserError, match="default lengths only"):
        translation_trace(80, 10.0, 60.0, 0, str(path), scale=2.0)


@pytest.mark.parametrize("prefix, scale", [(-1, 1.0), (2048, 1.0), (80, 0.0), (80, float("nan"))])
def test_what_cannot_be_is_refused(prefix: int, scale: float) -> None:
    with pytest.raises(UserError, match="prefix_tokens|scale"):
        translation_trace(prefix, 1.0, 10.0, 0, scale=scale)
