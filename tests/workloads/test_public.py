"""Traces from files: each format with known values, each refusal with its line, and what a card says was left out."""

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.errors import UserError
from repro.workloads import make_trace
from repro.workloads.public import FileCard, read_trace, with_arrivals, write_trace
from repro.workloads.samples import SAMPLE, make_sample

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,2000,49
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00+00:00,1452,3
2024-05-12 00:00:00.041683+00:00,584,3
2024-05-12 01:00:01+01:00,7,1
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1.5,ChatGPT,472,18,490,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2366]}
{"timestamp": 30535.5, "input_length": 1, "output_length": 1, "hash_ids": []}
"""
PLAIN = "arrival_s,prompt_tokens,output_tokens\n0.5,10,20\n0.25,11,21\n0.75,12,22\n"


def written(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


@pytest.mark.parametrize(
    ("text", "name", "arrival_s", "prompts", "outputs"),
    [
        (AZURE, "azure", [0, 4.314579], [374, 396], [44, 109]),
        (AZURE_2024, "azure", [0, 0.041683, 1], [1452, 584, 7], [3, 3, 1]),
        (BURSTGPT, "burstgpt", [0, 113.5], [472, 417], [18, 276]),
        (BURSTGPT_3, "burstgpt", [0], [472], [18]),
        (MOONCAKE, "mooncake", [0, 3.0535], [955, 1], [52, 1]),
        (PLAIN, "plain", [0, 0.25, 0.5], [11, 10, 12], [21, 20, 22]),
        (PLAIN.replace("arrival_s,p", "ARRIVAL_S , p"), "plain", [0, 0.25, 0.5], [11, 10, 12], [21, 20, 22]),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".GZ", ""])
def test_each_format_gives_what_stands_in_it(
    tmp_path: Path, text: str, name: str, arrival_s: list[float], prompts: list[int], outputs: list[int], suffix: str
) -> None:
    content = gzip.compress(text.encode()) if suffix == ".GZ" else text.replace("\n", "\r\n").encode("utf-8-sig")
    trace = read_trace(written(tmp_path, content, f"trace{suffix}"))
    assert trace.name == trace.card.workload == name
    assert np.allclose(trace.arrival_s, arrival_s, atol=1e-9, rtol=0)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (prompts, outputs)
    assert trace.card.hash == trace.hash and json.dumps(trace.card.to_dict())


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    rows = ["0,ChatGPT,5,1", "30,ChatGPT,5,0", "20,GPT-4,0,5", "40,GPT-4,2000,49", "50,GPT-4,0,0", "90,GPT-4,7,2"]
    path = written(tmp_path, "Timestamp,Model,Request tokens,Response tokens\n" + "\n".join(rows))
    card = read_trace(path, duration_s=60.0).card
    assert isinstance(card, FileCard) and [count for _, count in card.left_out] == [1, 2, 1, 1]
    assert (card.num_rows, card.num_requests, card.num_out_of_order) == (6, 1, 1)
    said = (
        "1 outside 0-60 s, 2 failed (no output tokens), 1 without a prompt, 1 longer than 2,048 tokens; 1 stood after"
    )
    assert f"left out of 6 rows: {said} a later one and were sorted" in str(card)
    assert read_trace(path, max_model_len=2049, duration_s=60.0).card.num_requests == 2
    with pytest.raises(UserError, match=r"none of 6 rows is left \(6 outside 91-100 s\)"):
        read_trace(path, start_s=91.0, duration_s=9.0)


def test_a_window_is_taken_and_its_time_runs_faster(tmp_path: Path) -> None:
    rows = "".join(f"{second},10,20\n" for second in range(10_000))
    path = written(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n{rows}junk")
    trace = read_trace(path, start_s=100.0, duration_s=60.0, speed=2.0)
    assert np.array_equal(trace.arrival_s, np.arange(60) / 2)
    assert (trace.card.duration_s, trace.card.rate_per_s, trace.card.rate_over_time) == (30.0, 2.0, (2.0,) * 12)
    assert trace.card.gap_variation == 0 and "2 times as fast" in trace.card.arrivals
    assert "(read to line 3763)" in str(trace.card)  # an hour behind the window; the junk is further on


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the file is empty"),
        ("\n \n", 1, "the file is empty"),
        (HEAD, 1, "no request in the file"),
        ("a,b\n1,2\n", 1, "the columns 'a,b' are none of these: Azure LLM inference trace: TIMESTAMP, Con"),
        ("TIMESTAMP,ContextTokens\n", 1, "none of these"),
        ("prompt_tokens,output_tokens\n1,2\n", 1, "lengths without arrivals; give a rate"),
        ('[{"conversations": []}]', 1, "lengths without arrivals; give a rate"),
        (HEAD + "-1,2,3\n", 2, "arrival_s is '-1', not a time from 0 on"),
        (HEAD + "1,2,3\nnan,2,3\n", 3, "arrival_s is 'nan', not a time from 0 on"),
        (HEAD + "inf,2,3\n", 2, "not a time"),
        (HEAD + "1_0,2,3\n", 2, "not a time"),
        (AZURE + "16.11.2023,1,2\n", 5, "TIMESTAMP is '16.11.2023', not a time"),
        (HEAD + "1,2.5,3\n", 2, "prompt_tokens is '2.5', not a whole number of tokens"),
        (HEAD + "1,2,-3\n", 2, "output_tokens is '-3'"),
        (HEAD + "1,2,\n", 2, "output_tokens is ''"),
        (HEAD + "1,2,3\n\n1,2\n", 4, "2 values where the header has 3"),
        (HEAD + '1,2,"3\n', 2, "not CSV"),
        (HEAD + "4000,2,3\n399,2,3\n", 3, "is 3,601 s before an earlier line's, too far to sort; if the clock starts"),
        (HEAD.encode() + b"1,2,3\n\xff,2,3\n", 3, "not UTF-8 text"),
        (gzip.compress((HEAD + "1,2,3\n").encode(), mtime=0)[:-9], 2, "damaged or cut off"),
        ('\n{"timestamp": 1, "input_length": 2}\n', 2, "no output_length; a request has timestamp, input_length"),
        (MOONCAKE + "[1]\n", 5, "no timestamp, input_length, output_length"),
        (MOONCAKE + '{"timestamp": 1,\n', 5, "not JSON, one request a line"),
        (MOONCAKE.replace("30535,", "NaN,"), 3, "timestamp is nan"),
        (MOONCAKE.replace("30535,", '"30535",'), 3, "timestamp is '30535', not a time"),
        (MOONCAKE.replace("6472", "true"), 3, "input_length is True, not a whole number"),
        (MOONCAKE.replace("6472", "64.0"), 3, "input_length is 64.0, not a whole number"),
    ],
)
def test_nonsense_is_refused_by_its_line(tmp_path: Path, text: str | bytes, line: int, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ") and said in message and "\n" not in message


@pytest.mark.parametrize("path", ["", "missing.csv", "a\0b"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        read_trace(path)


@pytest.mark.parametrize("wrong", [{"start_s": -1}, {"duration_s": 0}, {"speed": 0}, {"max_model_len": 1}, {"rate": 1}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        read_trace(SAMPLE, **wrong)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 2000), st.integers(1, 48)), min_size=1, max_size=30),
    st.sampled_from(["a.csv", "a.csv.gz"]),
)
def test_a_written_trace_is_read_back(requests: list[tuple[int, int, int]], name: str) -> None:
    microseconds, prompts, outputs = np.array(sorted(requests)).T.copy()
    microseconds -= microseconds[0]
    trace = replace(
        make_trace("sharegpt", 1.0, 10.0, 0),
        arrival_s=microseconds / 1e6,
        prompt_tokens=prompts.copy(),
        output_tokens=outputs.copy(),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        write_trace(trace, path)
        assert read_trace(path).hash == trace.hash


def test_the_sample_is_what_its_generator_makes(tmp_path: Path) -> None:
    write_trace(make_sample(), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == SAMPLE.read_bytes()
    card = read_trace(SAMPLE).card
    assert 200 < card.num_requests < 400 and card.gap_variation > 1.5
    assert max(card.rate_over_time) > 2.5 > 1 > min(card.rate_over_time)


def test_one_moment_is_a_trace_too(tmp_path: Path) -> None:
    card = read_trace(written(tmp_path, HEAD + "7,1,2\n7,3,4\n")).card
    assert (card.duration_s, card.rate_per_s, card.rate_over_time, card.gap_variation) == (0.0, 0.0, (), None)
    assert "undefined" in str(card)


def test_lengths_alone_get_arrivals_from_make_trace(tmp_path: Path) -> None:
    path = str(written(tmp_path, "prompt_tokens,output_tokens\n5,6\n"))
    trace = with_arrivals(path, rate=2.0, duration_s=50.0)
    assert trace.hash == make_trace("sharegpt", 2.0, 50.0, 0, lengths=path).hash
