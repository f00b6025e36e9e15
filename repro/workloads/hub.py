"""The real data sets: lengths of their texts under a model's tokenizer, through Hugging Face `datasets`.

Only on request: the hub is never consulted otherwise, and when it is, one short probe decides within seconds whether it
can be reached. A local file in a data set's own format (json, jsonl, parquet) goes through the same loaders and the
same code, so that a machine without a network can use what was carried to it, and the tests test what runs.

The paper names the data sets, not every detail of their use. Choices made here: an Alpaca prompt is the instruction, a
line break and the input, if there is one; lengths count the special tokens that the tokenizer adds by default (in the
authors' pairs the stock greeting of nine words and marks has ten tokens)."""

import functools
import json
import os
import reprlib
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro.errors import UserError
from repro.workloads.lengths import COLUMNS, LengthPairs

OPT_TOKENIZER = "facebook/opt-13b"  # the OPT models share one tokenizer
HUB_TIMEOUT_S = 5.0
DATASET_SUFFIXES = (".json", ".jsonl", ".parquet")
_REMEDY = (
    "leave LENGTHS out for the embedded lengths, give a CSV file of lengths, or give a local copy of the data set "
    "(.json, .jsonl, .parquet) and a tokenizer that is on this machine"
)

Row = dict[str, Any]
TextPair = tuple[str, str]  # prompt, output


def _text(holder: Any, *names: str) -> str:
    """The text under the first of `names` that `holder` has; ValueError that says what is there instead."""
    if not isinstance(holder, Mapping):
        raise ValueError(f"{reprlib.repr(holder)} stands where {' or '.join(names)} should be")
    value = next((holder[name] for name in names if holder.get(name) is not None), None)
    if not isinstance(value, str):
        raise ValueError(f"{' or '.join(names)} is {reprlib.repr(value)}, not text")
    return value


def sharegpt_texts(row: Row) -> TextPair | None:
    """The first round of a conversation: the first human turn and the reply right after it, if any. A turn has `from`
    and `value`, or `role` and `content`."""
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"conversations is {reprlib.repr(turns)}, not a list of turns")
    who = [_text(turn, "from", "role") for turn in turns]
    first = next((i for i, name in enumerate(who) if name in ("human", "user")), len(turns))
    if first + 1 >= len(turns) or who[first + 1] in ("human", "user", "system"):
        return None
    return _text(turns[first], "value", "content"), _text(turns[first + 1], "value", "content")


def alpaca_texts(row: Row) -> TextPair | None:
    """The instruction, with its input on the next line if there is one, and the answer."""
    asked = (_text(row, "instruction"), "" if row.get("input") is None else _text(row, "input"))
    return "\n".join(filter(None, asked)), _text(row, "output")


def translation_texts(row: Row) -> TextPair | None:
    """An English sentence and its German translation, without instruction or examples (section 6.4)."""
    return _text(row["translation"], "en"), _text(row["translation"], "de")


@dataclass(frozen=True)
class DatasetSpec:
    """Where a data set is on the hub, which columns its rows must have, and how a row becomes two texts."""

    hub_id: str
    split: str
    columns: tuple[str, ...]
    texts: Callable[[Row], TextPair | None]
    config: str | None = None
    data_files: str | None = None


_SHAREGPT, _FILE = "anon8231489123/ShareGPT_Vicuna_unfiltered", "ShareGPT_V3_unfiltered_cleaned_split.json"
DATASETS = {
    "sharegpt": DatasetSpec(_SHAREGPT, "train", ("conversations",), sharegpt_texts, data_files=_FILE),
    "alpaca": DatasetSpec("tatsu-lab/alpaca", "train", ("instruction", "output"), alpaca_texts),
    "translation": DatasetSpec("wmt/wmt16", "test", ("translation",), translation_texts, config="de-en"),
}


def is_dataset_file(path: str | Path) -> bool:
    """Whether a file's name says that it is in a data set's own format."""
    return Path(path).suffix.lower() in DATASET_SUFFIXES


def lengths_from_dataset(
    workload: str, path: str | None = None, tokenizer: str = OPT_TOKENIZER, max_model_len: int = 2048
) -> LengthPairs:
    """Length pairs of a data set in DATASETS: from the hub, or from a local file in the data set's format.

    `tokenizer` is a hub id or a folder. Tokenized lengths stay in the cache of `datasets`, for later processes too.
    UserError where there is no network, no such file, or not this data set's format."""
    if workload not in DATASETS:
        raise UserError(f"no data set for workload {workload!r}: the known ones are {', '.join(DATASETS)}")
    modified_ns = 0
    if path is not None:
        if not is_dataset_file(path) or not Path(path).is_file():
            raise UserError(f"no data set file {path!r}: need an existing {', '.join(DATASET_SUFFIXES)}; or {_REMEDY}")
        modified_ns = Path(path).stat().st_mtime_ns
    return _load(workload, path, modified_ns, tokenizer, max_model_len)


@functools.lru_cache(maxsize=8)
def _load(workload: str, path: str | None, modified_ns: int, tokenizer: str, max_model_len: int) -> LengthPairs:
    import datasets

    spec = DATASETS[workload]
    encode = _load_tokenizer(tokenizer)  # first: it fails faster than a data set loads
    dataset = _load_rows(spec, path)
    where, present = path or spec.hub_id, ", ".join(dataset.column_names)
    if missing := ", ".join(name for name in spec.columns if name not in dataset.column_names):
        raise UserError(f"{where} is not in the format of {spec.hub_id}: no column {missing} among {present}")

    def count_tokens(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[int]]:
        rows = (dict(zip(batch, values)) for values in zip(*batch.values()))
        found = (_checked(spec, where, number + 1, row) for number, row in zip(numbers, rows))
        if not (texts := [pair for pair in found if pair is not None]):
            return {name: [] for name in COLUMNS}
        encoded = (encode(list(column))["input_ids"] for column in zip(*texts))
        return {name: [len(ids) for ids in column] for name, column in zip(COLUMNS, encoded)}

    features = datasets.Features({name: datasets.Value("int64") for name in COLUMNS})
    how = {"batched": True, "with_indices": True, "remove_columns": dataset.column_names, "features": features}
    try:
        counted = dataset.map(count_tokens, **how)
    except OSError as error:
        remedy = "set HF_DATASETS_CACHE to a folder that it can"
        raise UserError(f"datasets cannot write its cache ({error}): {remedy}") from error
    pairs = np.stack([np.asarray(counted[name], dtype=np.int64) for name in COLUMNS], axis=1)
    pairs = pairs[(pairs >= 1).all(axis=1)]
    where = Path(path).name if path else spec.hub_id
    source = f"{where}, {len(pairs)} of {len(dataset)} rows have a prompt and an output, tokenizer {tokenizer}"
    return LengthPairs.filtered(pairs, source, workload, max_model_len)


def _checked(spec: DatasetSpec, where: str, number: int, row: Any) -> TextPair | None:
    """A row's texts; UserError that names the row if it has another form."""
    try:
        return spec.texts(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{where}, row {number}: {cause}; it is not in the format of {spec.hub_id}") from error


def _check_rows(spec: DatasetSpec, path: str) -> None:
    """UserError for the first row of a JSON file that has another form; nothing if the file as a whole has."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        listed = text.lstrip().startswith("[")
        rows = json.loads(text) if listed else text.splitlines()
    except (OSError, ValueError, RecursionError):
        return
    for number, row in enumerate(rows, start=1):
        try:
            row = row if listed else json.loads(row or "null")
        except ValueError as error:
            raise UserError(f"{path}, row {number}: not JSON ({error})") from error
        if row is not None or listed:
            _checked(spec, path, number, row)


def _load_tokenizer(name: str) -> Callable[..., Any]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)  # a folder, or already in the cache
    except (OSError, ValueError) as error:
        if Path(name).exists():
            raise UserError(f"no tokenizer can be loaded from the folder {name!r}: {_first_line(error)}") from error
    _require_hub(f"tokenizer {name!r}")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {name!r} cannot be loaded: {_first_line(error)}; or {_REMEDY}") from error


def _load_rows(spec: DatasetSpec, path: str | None) -> Any:
    import datasets

    if path is None:
        _require_hub(f"data set {spec.hub_id!r}")
    try:
        if path is None:
            return datasets.load_dataset(spec.hub_id, spec.config, data_files=spec.data_files, split=spec.split)
        # load_dataset("json", ...) would ping a download counter on the network first, even for a local file
        reader = datasets.Dataset.from_parquet if _is_parquet(path) else datasets.Dataset.from_json
        return reader(path)
    except Exception as error:  # a foreign library at its door: what it raises for bad data differs by version
        cause = error.__cause__ or error
        if path is not None and not _is_parquet(path):
            _check_rows(spec, path)  # a column of mixed types, say: the library does not name the row
        raise UserError(f"{path or spec.hub_id} cannot be loaded: {_first_line(cause)}; or {_REMEDY}") from error


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _require_hub(wanted: str) -> None:
    """Return if the hub answers, or if HF_HUB_OFFLINE tells its libraries to use only their cache; else UserError.

    A thread, because a name look-up without a network can outlast every timeout that one can set on it."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    reached: list[bool] = []

    def probe() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # it answered
        except (OSError, ValueError):
            return
        reached.append(True)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if not reached:
        raise UserError(f"{wanted}: no answer from {endpoint} in {HUB_TIMEOUT_S:g} s, is there a network? {_REMEDY}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
