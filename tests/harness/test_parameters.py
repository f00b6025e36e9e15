"""Parameter files and values: everything wrong is refused by name, with what is allowed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.engine.errors import UserError
from repro.harness.parameters import check_parameters, conform, parse_yaml, read_parameter_file


@dataclass(frozen=True)
class Params:
    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    mode: Literal["swap", "recompute"] = "swap"
    lengths: Path | None = None
    limit: int | float = 1
    flag: bool = False
    table: dict[str, int] | None = None
    policy: Callable[[int], int] | None = None
    anything: Any = None


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("rates", [1, 2.5], (1.0, 2.5)),
        ("seeds", [], ()),
        ("pair", [2, "b"], (2, "b")),
        ("mode", "recompute", "recompute"),
        ("lengths", "a.csv", Path("a.csv")),
        ("lengths", None, None),
        ("limit", 2, 2),
        ("limit", 2.5, 2.5),
        ("flag", True, True),
        ("table", {"a": 1}, {"a": 1}),
        ("policy", len, len),
        ("anything", {"x": [1]}, {"x": [1]}),
    ],
)
def test_values_of_the_right_type_pass(name: str, value: Any, expected: Any) -> None:
    checked = check_parameters(Params, {name: value}, "here")[name]
    assert checked == expected and type(checked) is type(expected)
    if isinstance(checked, tuple):
        assert [type(item) for item in checked] == [type(item) for item in expected]


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("rates", 1.0, "a list, each entry a finite number"),
        ("rates", [True], "finite number"),
        ("rates", ["1"], "write 1.0"),
        ("rates", [math.nan], "finite number"),
        ("rates", [math.inf], "finite number"),
        ("seeds", [1.0], "a whole number"),
        ("seeds", [True], "a whole number"),
        ("seeds", "01", "a list"),
        ("pair", [1], "a list of 2"),
        ("pair", ["a", 1], "whole"),
        ("mode", "Swap", "one of 'swap', 'recompute'"),
        ("flag", 1, "true or false"),
        ("flag", "yes", "true or false"),
        ("lengths", 3, "a file name or null"),
        ("table", {"a": "b"}, "each value a whole number"),
        ("policy", "len", "a function"),
        ("limit", True, "a whole number or a finite number"),
        ("rates", None, "a list"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"here: parameter '{name}' must be ") as caught:
        check_parameters(Params, {name: value}, "here")
    assert said in str(caught.value)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match="here: unknown parameter 'sedes' .did you mean 'seeds'.*known: rates, seeds, pair"
    ):
        check_parameters(Params, {"sedes": [1]}, "here")
    for name in (None, 3, ("a",), ""):
        with pytest.raises(UserError, match="unknown parameter"):
            check_parameters(Params, {name: 1}, "here")


def test_huge_values_give_short_messages() -> None:
    with pytest.raises(UserError) as caught:
        check_parameters(Params, {"flag": ["x" * 10_000] * 10_000}, "here")
    assert len(str(caught.value)) < 300


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(values, st.sampled_from(list(Params.__annotations__)))
def test_any_value_either_conforms_or_is_refused(value: Any, name: str) -> None:
    try:
        checked = check_parameters(Params, {name: value}, "here")[name]
    except UserError:
        return
    if name == "rates":
        assert all(type(item) is float and math.isfinite(item) for item in checked)
    if name == "seeds":
        assert all(type(item) is int for item in checked)
    if name != "anything":
        assert conform(checked, {"rates": tuple[float, ...], "seeds": tuple[int, ...]}.get(name, Any)) == checked


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [1", "line 1"),
        ("a: 1\nb: 2\na: 3", "line 3: not valid YAML: the name 'a' is given twice"),
        ("a: !!python/x y", "line 1"),
        ("a: b: c", "line 1"),
        ("\tx: 1", "line 1"),
        ("a: \x00", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("? [a]\n: 1", ""),
        ("a: &x [1, *x]", ""),
        ("2020-99-99", "not valid YAML"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(text: str, said: str) -> None:
    if said:
        with pytest.raises(UserError, match="^file.yaml") as caught:
            parse_yaml(text, "file.yaml")
        assert said in str(caught.value) and "\n" not in str(caught.value)
    else:
        with pytest.raises(UserError):
            check_parameters(Params, parse_yaml(text, "file.yaml"), "file.yaml")


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        parse_yaml(text, "file.yaml")


@pytest.mark.parametrize(
    "text, said",
    [
        ("title: A\nparams: {a: 1}\nsmoke: {}\n", None),
        ("title: A\n", None),
        ("params: {}", "'title' must be one line"),
        ("title: [1]", "'title' must be"),
        ("title: A\nparam: {}", "unknown section 'param'; known: title, params, smoke"),
        ("title: A\nparams: 3", "'params' must hold"),
        ("title: A\nsmoke: [a]", "'smoke' must hold"),
        ("", "must hold the sections"),
        ("- a", "must hold the sections"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_the_sections_of_a_parameter_file(tmp_path: Path, text: str | bytes, said: str | None) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if said is None:
        assert read_parameter_file(path)[0] == "A"
    else:
        with pytest.raises(UserError, match="x.yaml") as caught:
            read_parameter_file(path)
        assert said in str(caught.value)


def test_a_missing_parameter_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*none.yaml"):
        read_parameter_file(tmp_path / "none.yaml")
