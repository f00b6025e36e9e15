"""The table of measured step times: equal to what was measured where it was measured, sensible elsewhere, clear about
what is missing."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.engine.scheduler import Prefill, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.simulate.step_times import StepTimes

SEQS, CONTEXTS = (2, 4, 8), (10, 100)
MIXED_SEQS, MIXED_PROMPT = (0, 4, 16), (16, 64, 256)


def alone_s(seqs, context):
    return 0.010 + 0.001 * seqs + 2e-6 * context


def mixed_s(seqs, prompt, context=0):
    return 0.012 + 0.0005 * seqs + 2e-5 * prompt + 2e-6 * context


def rows(seqs=SEQS, mixed_context=0):
    decode = [
        {"seqs": n, "prompt_tokens": 0, "context_tokens": n * c, "seconds": alone_s(n, n * c)}
        for n in seqs
        for c in CONTEXTS
    ]
    return decode + [
        {"seqs": n, "prompt_tokens": p, "context_tokens": mixed_context, "seconds": mixed_s(n, p, mixed_context)}
        for n in MIXED_SEQS
        for p in MIXED_PROMPT
    ]


def first_s(steps, **output):
    return next(steps.step_times(SchedulerOutput(0, **output)))


@pytest.mark.parametrize("padded", [False, True])
def test_every_measured_cell_comes_out_as_measured(padded):
    steps = StepTimes.of("here", rows(), padded)
    for row in rows():
        found = first_s(
            steps,
            num_decode_seqs=row["seqs"],
            context_tokens=row["context_tokens"],
            num_prefill_tokens=row["prompt_tokens"],
        )
        assert found == pytest.approx(row["seconds"], rel=1e-9)


def test_text_from_a_file_will_do():
    text = [{name: str(value) if name != "prompt_tokens" else value for name, value in row.items()} for row in rows()]
    assert StepTimes.of("here", text, True) == StepTimes.of("here", rows(), True)


def test_between_the_cells_lie_lines_or_with_graphs_the_next_larger_batch():
    lines, padded = (StepTimes.of("here", rows(), choice) for choice in (False, True))
    assert lines.alone(6) == pytest.approx(0.016) and lines.per_context_s == pytest.approx(2e-6)
    assert padded.alone(5) == padded.alone(8) == lines.alone(8)
    assert padded.alone(1) == padded.alone(2) == lines.alone(1)
    assert first_s(lines, num_decode_seqs=10, num_prefill_tokens=160) == pytest.approx(mixed_s(10, 160))
    assert first_s(padded, num_decode_seqs=5, num_prefill_tokens=65) == pytest.approx(mixed_s(16, 256))
    assert first_s(padded, num_decode_seqs=4, num_prefill_tokens=17) == pytest.approx(mixed_s(4, 64))


def test_where_sequences_and_prompts_are_padded_as_one_their_sum_counts():
    """A step of 32 tokens cannot have 40 decoding sequences: the smallest that can stands in for the line."""
    sizes = {4: (16, 64, 256), 40: (64, 256)}
    mixed = [
        {"seqs": n, "prompt_tokens": size - n, "step_tokens": size, "context_tokens": 0, "seconds": mixed_s(n, size)}
        for n, own in sizes.items()
        for size in own
    ]
    steps = StepTimes.of("here", [*rows()[:6], *mixed], True)
    for row in mixed:
        assert steps.with_prompts(row["seqs"], row["prompt_tokens"]) == pytest.approx(row["seconds"])
    assert steps.with_prompts(22, 40) == pytest.approx(mixed_s(22, 64))
    assert steps.with_prompts(22, 43) == pytest.approx(mixed_s(22, 256))
    assert steps.with_prompts(4, 3) == pytest.approx(mixed_s(4, 16)) and steps.with_prompts(40, 1) == pytest.approx(
        mixed_s(40, 64)
    )
    assert mixed_s(4, 16) < steps.with_prompts(10, 5) < mixed_s(40, 64)


def test_beyond_the_grid_the_last_line_goes_on_and_before_it_the_first_cell_counts():
    for steps in (StepTimes.of("here", rows(), padded) for padded in (False, True)):
        assert steps.alone(12) == pytest.approx(0.022)
        assert first_s(steps, num_decode_seqs=4, num_prefill_tokens=2000) == pytest.approx(mixed_s(4, 2000))
        assert first_s(steps, num_decode_seqs=40, num_prefill_tokens=64) == pytest.approx(mixed_s(40, 64))
        assert first_s(steps, num_prefill_tokens=3) == pytest.approx(mixed_s(0, 16))


def test_each_iteration_has_a_token_more_of_context_in_every_sequence():
    steps = StepTimes.of("here", rows(), False)
    times = list(itertools.islice(steps.step_times(SchedulerOutput(0, num_decode_seqs=8, context_tokens=80)), 5))
    assert times == pytest.approx([alone_s(8, 80 + 8 * index) for index in range(5)])


def test_context_during_mixed_steps_is_taken_out_of_them_and_put_back():
    """The grid's mixed cells were measured with some context; a step with another one costs what it should."""
    steps = StepTimes.of("here", rows(mixed_context=500), False)
    for seqs, context in ((4, 0), (4, 3000)):
        found = first_s(steps, num_decode_seqs=seqs, context_tokens=context, num_prefill_tokens=64)
        assert found == pytest.approx(mixed_s(seqs, 64, context))


def test_a_chunk_pays_for_what_it_reads_that_is_stored_already():
    """Rows of chunks say how much; without them, as in older recordings, it costs nothing."""
    chunks = [
        {"seqs": 4, "prompt_tokens": p, "context_tokens": 0, "stored": s, "seconds": mixed_s(4, p) + 3e-9 * p * s}
        for p in (64, 256)
        for s in (0, 512, 1024)
    ]
    before, steps = (StepTimes.of("here", found, False) for found in (rows(), [*rows(), *chunks]))
    assert before.per_read_s == 0.0 and steps.per_read_s == pytest.approx(3e-9)
    assert replace(steps, per_read_s=0.0) == before
    group = SequenceGroup(Request(0, 0.0, 1500, 1, SamplingParams()))
    parts = {"prefills": [Prefill(group, 1000, 900)], "chunks": [Prefill(group, 500, 350), Prefill(group, 6, 0)]}
    output = {"num_decode_seqs": 4, "num_prefill_tokens": 256}
    more = first_s(steps, **output, **parts) - first_s(steps, **output)
    assert more == pytest.approx(3e-9 * (100 * 900 + 150 * 350))


def test_noise_never_makes_context_save_time():
    noisy = rows()
    for row in noisy[:6]:  # every batch is faster with the longer contexts
        row["seconds"] -= 5e-6 * row["context_tokens"]
    steps = StepTimes.of("here", noisy, True)
    assert steps.per_context_s == 0.0 and steps.alone(2) == pytest.approx(0.012 - 3e-6 * 110)


def test_contexts_that_lie_far_apart_decide_what_context_costs():
    """Sixty-four sequences have contexts of nearly one length: an error of a tenth there is no slope."""
    close = [
        {"seqs": 64, "prompt_tokens": 0, "context_tokens": c, "seconds": s} for c, s in ((640, 0.074), (700, 0.082))
    ]
    steps = StepTimes.of("here", [*rows(), *close], True)
    assert steps.per_context_s == pytest.approx(2e-6, rel=0.5) and steps.alone(64) == pytest.approx(0.077, rel=0.02)


@pytest.mark.parametrize(
    "drop, named",
    [
        (lambda row: row["seqs"] == 4 and row["prompt_tokens"] == 64, r"\(4, 64\) is missing"),
        (
            lambda row: row["seqs"] == 4 and row["context_tokens"] == 400,
            "decoding with 4 sequences is there at one context only",
        ),
        (lambda row: row["prompt_tokens"] == 0, "no decoding step"),
        (lambda row: row["prompt_tokens"] > 0, "no step with a prompt"),
    ],
)
def test_what_is_missing_is_named(drop, named):
    with pytest.raises(UserError, match=f"step times of here: .*{named}.*measure again"):
        StepTimes.of("here", [row for row in rows() if not drop(row)], True)


def test_one_context_measured_twice_is_one_context():
    twice = [row | {"context_tokens": 10} if row["seqs"] == 4 else row for row in rows()]
    with pytest.raises(UserError, match="at one context only"):
        StepTimes.of("here", twice, True)


def test_a_step_must_take_some_time():
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="must take some time"):
            replace(StepTimes.of("here", rows(), True), shortest_s=seconds)


noise = st.floats(-0.03, 0.03)


@given(
    padded=st.booleans(),
    errors=st.lists(noise, min_size=9, max_size=9),
    decode=st.lists(st.floats(1e-4, 0.05), min_size=6, max_size=6),
    seqs=st.integers(0, 300),
    prompt=st.integers(0, 5000),
    context=st.integers(0, 10**6),
)
def test_no_step_is_shorter_than_the_shortest_that_was_measured(padded, errors, decode, seqs, prompt, context):
    """A prompt's cell is a difference of two measurements and may even be negative; lines beyond the grid may fall."""
    noisy = rows()
    for row, seconds in zip(noisy[:6], decode):
        row["seconds"] = seconds
    for row, error in zip(noisy[6:], errors):
        row["seconds"] += error
    times = StepTimes.of("here", noisy, padded).step_times(
        SchedulerOutput(0, num_decode_seqs=seqs, context_tokens=context, num_prefill_tokens=prompt)
    )
    assert all(seconds >= min(decode) for seconds in itertools.islice(times, 3))
