"""Benchmarks of the scheduler of V1 beside that of 2023, `end_to_end` and `mixed`, with a tiny model on the CPU."""

import csv
import json
from dataclasses import replace

import pytest
from test_load import MAX_LEN
from test_warm_engine import tiny

from repro import cli
from repro.errors import UserError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from repro.bench import end_to_end, mixed  # noqa: E402
from repro.bench.serving import client, warm_engine  # noqa: E402
from repro.bench.serving.warm_engine import WarmEngine  # noqa: E402
from repro.engine.loop import Observer  # noqa: E402
from repro.engine.systems import of_today, system  # noqa: E402
from repro.llm import workers  # noqa: E402
from repro.llm.parts import Source  # noqa: E402
from repro.llm.pool import PoolSize  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = mixed.Mix(
    decoding=4, prompt=8, long_prompt=64, long_output=3, every_s=0.05, warm_s=0.1, counted_s=0.2, max_model_len=4096
)


class Profiled(Observer):
    shares = {"gaps": 0.5}

    def observe(self, engine, output, start_s):
        pass


def parts(num_gpus):
    """The tiny model in so many processes."""
    loaded = tiny()
    return loaded if num_gpus == 1 else workers.split(Source("tiny", loaded.model.config, "float32"), num_gpus)


@pytest.fixture
def no_gpu(monkeypatch):
    """Benchmarks that ask for a GPU measure a tiny model on the CPU; the sizes of pools that they ask for."""
    asked = []

    def pool(**size):
        asked.append(size)
        return PoolSize(num_blocks=512)

    monkeypatch.setattr(warm_engine, "PoolSize", pool)
    for module in (end_to_end, mixed):
        monkeypatch.setattr(module, "require_gpu", lambda name: None)
        monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(mixed.models, "load", lambda *arguments: tiny())
    monkeypatch.setattr(end_to_end.workers, "load", lambda *arguments, num_gpus: parts(num_gpus))
    monkeypatch.setattr(end_to_end, "_Profile", Profiled)
    return asked


def bench(*arguments):
    assert cli.main(["bench", *map(str, arguments)]) == 0


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_both_schedulers_serve_a_workload_in_turns_and_the_passes_are_summed_up(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(end_to_end, "REQUESTS", {"alpaca": 12, "sharegpt": 2})
    monkeypatch.setattr(end_to_end, "make_trace", partial_trace)
    command = ["end_to_end", "--out", tmp_path, "--workload", "alpaca", "--passes", 2]
    bench(*command, "--only", "vllm-v1")
    bench(*command)
    rows = rows_of(tmp_path / "end_to_end.csv")
    keys = [f"{name}/12 GiB/{attempt}" for attempt in (0, 1) for name in ("vllm", "vllm-v1")]
    assert [row["key"] for row in rows] == [*keys[1::2], *keys[0::2]]  # those that are there are not measured again
    assert {row["model"] for row in rows} == {"opt-13b"} and {row["dtype"] for row in rows} == {"float16"}
    assert {row["requests"] for row in rows} == {"12"} and len({row["output_tokens"] for row in rows}) == 1
    assert {(row["system"], row["max_num_batched_tokens"]) for row in rows} == {("vllm", "2560"), ("vllm-v1", "2048")}
    assert {row["key"]: row["gaps_ms"] for row in rows} == dict(zip(keys, ["", "", "500.0", "500.0"]))
    assert {frozenset(one.items()) for one in no_gpu} == {frozenset({("kv_gib", 12.0)})}
    passes = json.loads((tmp_path / "manifest.json").read_text())["passes"]
    assert set(passes) == {"vllm/12 GiB", "vllm-v1/12 GiB"}
    for run, found in passes.items():
        own = [float(row["seconds"]) for row in rows if row["key"].startswith(f"{run}/")]
        assert found == {"least_s": min(own), "median_s": pytest.approx(sum(own) / 2)}
    assert "vllm-v1/12 GiB: 2 passes, least" in capsys.readouterr().out


def test_rows_of_several_gpus_say_so_and_count_again(no_gpu, tmp_path):
    command = ["end_to_end", "--out", tmp_path, "--runs", "12:vllm", "--requests", 3, "--passes", 1, "--num-gpus"]
    bench(*command, 1)
    bench(*command, 2)
    one, two = rows_of(tmp_path / "end_to_end.csv")
    assert (one["num_gpus"], two["num_gpus"]) == ("", "2")
    for column in ("iterations", "mean_batch", "output_tokens", "pool_tokens", "pool_gib"):
        assert one[column] == two[column]


def partial_trace(workload, rate, duration_s, seed):
    from repro.workloads import make_trace

    return make_trace(workload, rate, duration_s, seed, max_model_len=MAX_LEN)


def test_the_plan_takes_turns_within_a_pool_and_other_systems_run_once(no_gpu, tmp_path):
    asked = ["12:vllm", "0:vllm", "12:orca-max", "12:vllm-v1"]
    options = cli._parser().parse_args(["bench", "end_to_end", "--runs", *asked, "--passes", "2"])
    steps = end_to_end.EndToEnd(options).steps(None)
    assert [step.key for step in steps] == [
        *(f"{name}/12 GiB/0" for name in ("vllm", "orca-max", "vllm-v1")),
        *(f"{name}/12 GiB/1" for name in ("vllm", "vllm-v1")),
        *(f"vllm/0 GiB/{attempt}" for attempt in (0, 1)),
    ]


def test_a_workload_is_the_first_requests_of_its_trace():
    for workload, count in end_to_end.REQUESTS.items():
        pairs = end_to_end.pairs_of_trace(workload)
        assert len(pairs) == count and pairs == end_to_end.pairs_of_trace(workload)
        assert max(map(sum, pairs)) <= 2048


def test_two_loads_at_once_are_refused(no_gpu, tmp_path, capsys):
    command = ["bench", "end_to_end", "--workload", "alpaca", "--lengths", "some.csv", "--out", str(tmp_path / "new")]
    assert cli.main(command) == 2
    assert "--workload alpaca and --lengths some.csv are two loads; give one of them" in capsys.readouterr().err


# Long prompts among decoding sequences


@pytest.fixture(scope="module")
def warm():
    loaded = tiny()
    return WarmEngine(
        replace(loaded, config=replace(loaded.config, max_model_len=FEW.max_model_len)), 8192 * 4, max_model_len=4096
    )


@pytest.mark.parametrize("name, budget", [("vllm-v1", 32), ("vllm-v1", 512), ("vllm", 2560)])
def test_a_mix_is_measured_as_a_client_sees_it(warm, name, budget, monkeypatch):
    chosen = of_today(system(name)).with_scheduler(max_num_batched_tokens=budget, max_num_seqs=16)
    kept = []
    monkeypatch.setattr(mixed, "TokenTimes", lambda clock: kept.append(client.TokenTimes(clock)) or kept[0])
    row = mixed.measure(warm, chosen, FEW)
    times = kept[0].of_requests()
    assert row["budget"] == budget and row["num_unanswered"] == 0 and row["num_prompts"] == 4
    assert 0 < row["gap_median_ms"] <= row["gap_90_ms"] <= row["gap_99_ms"] <= row["gap_largest_ms"]
    assert 0 < row["first_token_median_ms"] <= row["first_token_99_ms"]
    counted = [sum(FEW.warm_s <= moment <= FEW.stop_s for moment in times[index][1:]) for index in range(FEW.decoding)]
    assert row["num_gaps"] == sum(counted)
    assert all(len(times[index]) == FEW.long_output for index in range(FEW.decoding, FEW.decoding + 5))


def test_decoding_sequences_must_last(warm):
    short = replace(FEW, max_model_len=12, counted_s=0.7)
    with pytest.raises(UserError, match="a sequence of 12 tokens ended after .* count fewer seconds"):
        mixed.measure(warm, system("vllm"), short)


def test_the_mix_is_recorded_for_each_budget_and_for_whole_prompts(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixed, "Mix", lambda: FEW)
    bench("mixed", "--out", tmp_path)
    before = (tmp_path / "mixed.csv").read_bytes()
    bench("mixed", "--out", tmp_path, "--budget", "0")
    assert (tmp_path / "mixed.csv").read_bytes() == before and "points left out" not in capsys.readouterr().out
    rows = rows_of(tmp_path / "mixed.csv")
    assert [row["key"] for row in rows] == ["vllm-v1/512", "vllm-v1/2048", "vllm-v1/8192", "vllm/whole"]
    assert [row["budget"] for row in rows] == ["512", "2048", "8192", "2560"]
    assert {*mixed.GAPS, *mixed.FIRST, "model", "dtype", "device", "evidence"} <= set(rows[0])
    assert no_gpu == [{"free_share": 0.92}] * 2


def test_the_mix_is_that_of_the_text():
    mix = mixed.Mix()
    decoding, long = mix.requests[:32], mix.requests[32:]
    assert {(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in decoding} == {(0.0, 64, 2496)}
    assert {(one.prompt_tokens, one.output_tokens) for one in long} == {(2048, 8)}
    assert [one.arrival_s for one in long] == [0.25 * index for index in range(1, 40)]
    assert mix.stop_s - mix.warm_s == 7
