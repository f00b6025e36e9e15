"""Named tables: their CSV text, keys, hashes, and what is written beside figures."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import UserError
from repro.harness.diff import first_difference
from repro.harness.tables import Rows, csv_of, read_table, tables_hash

KEYS = {"latency": ("system", "seed"), "crossing": ("system",)}


def hash_of(table: pd.DataFrame) -> str:
    return hashlib.sha256(csv_of(table)).hexdigest()


def collected() -> Rows:
    return Rows.collect(
        [
            {"latency": [{"system": "vllm", "seed": 0, "evidence": "modelled", "value": 0.1}]},
            {"latency": [{"system": "vllm", "seed": 1, "evidence": "modelled", "value": 0.2}]},
        ],
        KEYS,
    )


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_rows_survive_their_csv_bit_for_bit(values: list[float]) -> None:
    rows = pd.DataFrame({"value": values})
    back = [float(line) for line in csv_of(rows).decode().splitlines()[1:]]
    assert back == values and hash_of(pd.DataFrame({"value": back})) == hash_of(rows)


def test_the_hash_of_rows_sees_values_order_and_columns() -> None:
    rows = pd.DataFrame({"a": [1, 2], "b": [0.1, 0.2]})
    others = [
        rows[::-1],
        rows[["b", "a"]],
        rows.assign(b=[0.1, 0.2 + 1e-16 * 2]),
        rows.rename(columns={"a": "c"}),
        rows[:1],
    ]
    assert len({hash_of(other) for other in [rows, *others]}) == 6
    assert hash_of(rows.set_axis([5, 6])) == hash_of(rows)  # the index is no data


def test_rows_of_points_become_tables_and_an_empty_one_has_its_keys() -> None:
    rows = collected()
    assert list(rows) == ["latency", "crossing"] and list(rows["latency"]["seed"]) == [0, 1]
    assert rows["crossing"].empty and {"system", "evidence", "trace_hash"} <= set(rows["crossing"].columns)
    assert rows.distinct("evidence") == ["modelled"] and rows.distinct("system") == ["vllm"]


def test_a_sum_in_another_order_gives_the_same_rows() -> None:
    terms = [0.1 * number for number in range(1, 60)]
    orders = (terms, terms[::-1], terms[::2] + terms[1::2])
    assert len({sum(order) for order in orders}) > 1
    tables = [Rows.collect([{"sums": [{"id": 1, "mean": sum(order)}]}], {"sums": ("id",)}) for order in orders]
    assert len({table.hash() for table in tables}) == 1
    assert first_difference(tables[0]["sums"], pd.DataFrame({"id": [1], "mean": [sum(terms[::-1])]})) == ""
    assert first_difference(tables[0]["sums"], pd.DataFrame({"id": [1], "mean": [sum(terms) * 1.00001]}))


def test_rows_with_equal_keys_and_undeclared_tables_are_mistakes() -> None:
    twice = {"latency": [{"system": "vllm", "seed": 0}, {"system": "vllm", "seed": 0}]}
    with pytest.raises(ValueError, match="two rows of the table 'latency' have the keys .*'vllm'"):
        Rows.collect([twice], KEYS)
    with pytest.raises(ValueError, match="a table 'speed'; the study declares latency, crossing"):
        Rows.collect([{"speed": []}], KEYS)


def test_tables_are_written_read_and_described(tmp_path: Path) -> None:
    rows = collected()
    (tmp_path / "x.crossing.csv").write_text("left by an earlier run")
    assert rows.write(tmp_path, "x.") == {"latency": "x.latency.csv"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.latency.csv"]
    again = Rows.read({"latency": tmp_path / "x.latency.csv"}, KEYS)
    assert again["latency"].equals(rows["latency"]) and again["crossing"].empty and again.hash() == rows.hash()
    about = rows.described()
    assert about == {"latency": {"rows": 2, "keys": ["system", "seed"], "sha256": hash_of(rows["latency"])}}
    assert rows.hash() == tables_hash({"latency": about["latency"]["sha256"]})
    with pytest.raises(UserError, match="cannot be read as rows"):
        read_table(tmp_path / "none.csv")
