"""The real data sets, through datasets' own json and parquet readers, on small files in the real formats."""

import json
import socket
import time
from pathlib import Path

import pytest

from repro.errors import UserError
from repro.workloads import make_trace

pytest.importorskip("datasets")
pytest.importorskip("transformers")

from repro.workloads import hub  # noqa: E402
from repro.workloads.hub import lengths_from_dataset  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a real fast tokenizer: one token a word, and one at the start as OPT's adds it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"</s>": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", bos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Fails every look-up at once and records it."""
    asked: list[str] = []

    def refuse(host: str, *_: object, **__: object) -> None:
        asked.append(str(host))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return asked


def words(count: int) -> str:
    return " ".join(["word"] * count)


def turn(who: str, count: int) -> dict[str, str]:
    return {"from": who, "value": words(count)}


def write_json(path: Path, rows: list[dict]) -> str:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


SHAREGPT_ROWS = [
    {"id": "a_0", "conversations": [turn("human", 3), turn("gpt", 5), turn("human", 70), turn("gpt", 90)]},
    {"id": "b_0", "conversations": [turn("system", 9), turn("human", 4), turn("gpt", 6)]},
    {"id": "c_0", "conversations": [turn("gpt", 8), turn("human", 2), turn("gpt", 7)]},  # opens with a reply
    {"id": "d_0", "conversations": [turn("human", 1)]},  # nobody replied
    {"id": "e_0", "conversations": []},
    {"id": "f_0", "conversations": [turn("human", 2), turn("human", 3), turn("gpt", 4)]},  # not a round
    {"id": "f_1", "conversations": [turn("human", 2), turn("system", 3), turn("gpt", 4)]},
    {"id": "g_0", "conversations": [turn("human", 0), turn("gpt", 1)]},  # empty prompt: the start token is left
    {"id": "h_0", "conversations": [turn("human", 30), turn("gpt", 40)]},  # over the limit below
]


ROUND = {"conversations": [turn("human", 1), turn("gpt", 1)]}
ASKED = {"instruction": "a", "input": "b", "output": "c"}


def test_other_forms_of_the_same_rows(tmp_path: Path, tokenizer: str) -> None:
    turns = [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(5)}]
    named = write_json(tmp_path / "roles.JSON", [{"conversations": turns}])
    assert make_trace("sharegpt", 1.0, 20.0, 0, lengths=named, tokenizer=tokenizer).prompt_tokens[0] == 4
    no_input = write_json(tmp_path / "alpaca.Json", [{"instruction": words(3), "output": words(2)}])
    assert lengths_from_dataset("alpaca", no_input, tokenizer).pairs.tolist() == [[4, 3]]


def test_sharegpt_takes_the_first_round(tmp_path: Path, tokenizer: str, no_network: list[str]) -> None:
    path = write_json(tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json", SHAREGPT_ROWS)
    lengths = lengths_from_dataset("sharegpt", path, tokenizer, max_model_len=64)
    assert lengths.pairs.tolist() == [[4, 6], [5, 7], [3, 8], [1, 2]]
    assert "5 of 9 rows" in lengths.facts.source and "4 of 5 pairs" in lengths.facts.filter
    assert not lengths.facts.equals_paper_trace
    assert no_network == [], "a local file and a local tokenizer need no look-up"


def test_alpaca_json_and_parquet_agree(tmp_path: Path, tokenizer: str) -> None:
    import pandas as pd

    rows = [
        {"instruction": words(3), "input": "", "output": words(10), "text": "ignored"},
        {"instruction": words(3), "input": words(4), "output": words(2), "text": "ignored"},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ["train-00000-of-00001.parquet", "alpaca.jsonl", write_json(tmp_path / "alpaca_data.json", rows)]
    for name in files:
        pairs = lengths_from_dataset("alpaca", str(tmp_path / name), tokenizer).pairs
        assert pairs.tolist() == [[4, 11], [8, 3]], name


def test_translation_is_english_to_german(tmp_path: Path, tokenizer: str) -> None:
    import pandas as pd

    rows = {"translation": [{"de": words(7), "en": words(5)}, {"de": words(2), "en": words(3)}]}
    pd.DataFrame(rows).to_parquet(tmp_path / "test.parquet")
    pairs = lengths_from_dataset("translation", str(tmp_path / "test.parquet"), tokenizer).pairs
    assert pairs.tolist() == [[6, 8], [4, 3]]


def test_make_trace_takes_a_data_set_file(tmp_path: Path, tokenizer: str) -> None:
    path = write_json(tmp_path / "sharegpt.json", SHAREGPT_ROWS)
    trace = make_trace("sharegpt", 1.0, 100.0, 0, lengths=path, tokenizer=tokenizer)
    drawn = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist()))
    assert drawn == {(4, 6), (5, 7), (3, 8), (1, 2), (31, 41)}
    assert trace.card.source.num_pairs == 5


@pytest.mark.parametrize(
    ("workload", "content", "expected"),
    [
        ("alpaca", json.dumps(SHAREGPT_ROWS), "no column instruction, output"),
        ("sharegpt", json.dumps([{"conversations": [{"who": "human", "text": "x"}]}]), "not in the format"),
        ("sharegpt", json.dumps([{"conversations": [{"from": "human", "value": 7}] * 2}]), "none of its 0 pairs"),
        (
            "sharegpt",
            json.dumps([ROUND] * 1200 + [{"conversations": [turn("human", 1), {"from": "gpt"}]}]),
            "row 1201: ",
        ),
        ("sharegpt", json.dumps([ROUND, {"conversations": "hello"}]), "row 2: conversations is 'hello'"),
        ("sharegpt", json.dumps([{"conversations": ["hello"]}]), "row 1: 'hello' stands where from or role"),
        ("sharegpt", json.dumps([ROUND, {"id": 3}]), "row 2: conversations is None"),
        ("alpaca", json.dumps([ASKED, ASKED | {"output": ["de"]}]), "row 2: output is \\['de'\\], not text"),
        ("alpaca", json.dumps([ASKED, ASKED | {"instruction": None}]), "row 2: instruction is None"),
        ("alpaca", json.dumps([ASKED | {"input": 7}]), "row 1: input is 7"),
        ("alpaca", json.dumps(ASKED) + "\n{not json\n", "row 2: not JSON"),
        ("translation", json.dumps([{"translation": {"en": "a", "de": "b"}}, {"translation": None}]), "row 2: None st"),
        ("translation", json.dumps([{"translation": {"en": "a"}}]), "row 1: de is None"),
        ("sharegpt", "[{not json", "cannot be loaded"),
        ("sharegpt", "", "cannot be loaded"),
        ("chess", "[]", "no data set for workload 'chess'"),
    ],
)
def test_wrong_files_are_one_clear_error(
    tmp_path: Path, tokenizer: str, workload: str, content: str, expected: str
) -> None:
    (tmp_path / "data.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=expected) as error:
        lengths_from_dataset(workload, str(tmp_path / "data.json"), tokenizer)
    assert "\n" not in str(error.value)


def test_missing_file_and_broken_tokenizer_folder(tmp_path: Path, tokenizer: str, no_network: list[str]) -> None:
    with pytest.raises(UserError, match="no data set file"):
        lengths_from_dataset("sharegpt", str(tmp_path / "absent.json"), tokenizer)
    path = write_json(tmp_path / "sharegpt.json", SHAREGPT_ROWS)
    with pytest.raises(UserError, match="no tokenizer can be loaded from the folder"):
        lengths_from_dataset("sharegpt", path, str(tmp_path))
    assert no_network == []


def test_no_network_is_said_once_and_soon(tokenizer: str, no_network: list[str]) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="tokenizer 'facebook/opt-13b'.*is there a network") as error:
        make_trace("sharegpt", 1.0, 10.0, 0, lengths="hub")
    assert "\n" not in str(error.value) and "CSV" in str(error.value)
    with pytest.raises(UserError, match="data set 'tatsu-lab/alpaca'.*is there a network"):
        lengths_from_dataset("alpaca", tokenizer=tokenizer)
    assert len(no_network) == 2, "one probe each, no retries"
    assert time.monotonic() - started < 5


def test_a_hanging_name_lookup_does_not_hang_us(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        time.sleep(1)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    started = time.monotonic()
    with pytest.raises(UserError, match="is there a network"):
        lengths_from_dataset("alpaca", tokenizer=tokenizer)
    assert time.monotonic() - started < 0.9


def test_offline_mode_uses_the_cache_without_asking(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="tatsu-lab/alpaca cannot be loaded"):
        lengths_from_dataset("alpaca", tokenizer=tokenizer)
    assert no_network == []
