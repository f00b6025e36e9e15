"""Parameter files and values: everything wrong is refused by name, with what is allowed."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import UserError
from repro.harness.parameters import ParameterFile, Parameters, make_parameters, parse_yaml, read_parameter_file
from repro.studies.common import BlockSize, Count, Positive, Seeds, Systems, Workloads


class Params(Parameters):
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    pair: tuple[int, str]
    mode: Literal["swap", "recompute"]
    limit: int | float
    flag: bool
    table: dict[str, int] | None
    text: str
    anything: Any


VALUES: dict[str, Any] = {
    "rates": [], "seeds": [], "pair": [1, "a"], "mode": "swap", "limit": 1, "flag": False, "table": None, "text": "",
    "anything": None,
}  # fmt: skip


def made(cls: type[Parameters] = Params, smoke: Any = None, scale: str = "paper", **given: Any) -> Parameters:
    file = ParameterFile(Path("file.yaml"), "A", VALUES if cls is Params else {}, smoke or {}, {}, {}, {})
    return make_parameters(cls, file, scale, given)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("rates", [1, 2.5], (1.0, 2.5)),
        ("seeds", [], ()),
        ("pair", [2, "b"], (2, "b")),
        ("mode", "recompute", "recompute"),
        ("limit", 2, 2),
        ("limit", 2.5, 2.5),
        ("flag", True, True),
        ("table", {"a": 1}, {"a": 1}),
        ("anything", {"x": [1]}, {"x": [1]}),
        ("text", "a.csv", "a.csv"),
    ],
)
def test_values_of_the_right_type_pass(name: str, value: Any, expected: Any) -> None:
    checked = getattr(made(**{name: value}), name)
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
        ("text", 3, "text"),
        ("text", None, "text"),
        ("table", {"a": "b"}, "each value a whole number"),
        ("limit", True, "a whole number or a finite number"),
        ("rates", None, "a list"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"overrides: parameter '{name}' must be ") as caught:
        made(**{name: value})
    assert said in str(caught.value)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match="overrides: unknown parameter 'sedes' .did you mean 'seeds'.*known: rates, seeds, pair"
    ):
        made(sedes=[1])
    for name in (None, 3, ("a",), ""):
        with pytest.raises(UserError, match="unknown parameter"):
            make_parameters(Params, ParameterFile(Path("x"), "A", VALUES, {}, {}, {}, {}), "paper", {name: 1})


def test_huge_values_give_short_messages() -> None:
    with pytest.raises(UserError) as caught:
        made(flag=["x" * 10_000] * 10_000)
    assert len(str(caught.value)) < 300


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(values, st.sampled_from(list(Params.__annotations__)))
def test_any_value_either_conforms_or_is_refused(value: Any, name: str) -> None:
    try:
        checked = getattr(made(**{name: value}), name)
    except UserError:
        return
    if name == "rates":
        assert all(type(item) is float and math.isfinite(item) for item in checked)
    if name == "seeds":
        assert all(type(item) is int for item in checked)
    if name == "limit":
        assert type(checked) in (int, float) and math.isfinite(checked)


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
            make_parameters(
                Params, ParameterFile(Path("x"), "A", parse_yaml(text, "file.yaml"), {}, {}, {}, {}), "paper", {}
            )


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
        assert read_parameter_file(path).title == "A"
    else:
        with pytest.raises(UserError, match="x.yaml") as caught:
            read_parameter_file(path)
        assert said in str(caught.value)


def test_a_missing_parameter_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*none.yaml"):
        read_parameter_file(tmp_path / "none.yaml")


def test_a_comment_is_the_meaning_and_captions_and_notes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "title: A\nparams:\n  rate: 4.0   # req/s: fills the queue\n  seeds: [0, 1]\nsmoke:\n  rate: 1.0  # fewer\n"
        "captions:\n  x: what to see\nnotes:\n  claim: 'about {share} %'\n"
    )
    file = read_parameter_file(path)
    assert file.meanings == {"rate": "req/s: fills the queue"}
    assert (file.captions, file.notes) == ({"x": "what to see"}, {"claim": "about {share} %"})


def test_the_source_of_a_mistake_is_named() -> None:
    with pytest.raises(UserError, match="file.yaml, smoke: parameter 'flag' must be true or false"):
        made(smoke={"flag": 3})  # found at the paper's scale, too
    with pytest.raises(UserError, match="file.yaml, params: parameter 'flag' is missing; give it a value"):
        without = {name: value for name, value in VALUES.items() if name != "flag"}
        make_parameters(Params, ParameterFile(Path("file.yaml"), "A", without, {}, {}, {}, {}), "paper", {"rates": [1]})
    assert made(smoke={"limit": 2}, scale="smoke").limit == 2 and made(smoke={"limit": 2}).limit == 1


def test_a_run_is_the_papers_while_only_what_is_free_differs() -> None:
    assert made().as_in_paper and made(seeds=[7]).as_in_paper
    assert not made(rates=[1.0]).as_in_paper
    assert made(rates=[]).as_in_paper
    assert not made(smoke={"limit": 2}, scale="smoke").as_in_paper


def test_a_number_makes_another_run_and_a_list_chooses_what_to_run() -> None:
    smoke, chosen = made(smoke={"limit": 2}, scale="smoke"), made(rates=[1.0])
    assert (
        smoke.no_verdicts == "no verdicts: limit is 2 instead of 1" and smoke.another_run == "limit is 2 instead of 1"
    )
    assert chosen.no_verdicts.startswith("no verdicts: rates is [1] instead of") and not chosen.another_run
    assert not made(seeds=[7]).no_verdicts and not made(seeds=[7]).another_run


class Bounded(Parameters):
    rate: Positive = 1.0
    count: Count = 1
    seeds: Seeds = (0,)
    systems: Systems = ("vllm",)
    workloads: Workloads = ("alpaca",)
    block_size: BlockSize = 16


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("rate", 0, "'rate' must be above 0, not 0"),
        ("rate", -1.5, "'rate' must be above 0, not -1.5"),
        ("rate", math.nan, "'rate' must be a finite number"),
        ("count", 0, "'count' must be at least 1"),
        ("seeds", [], "'seeds' = [] leaves nothing to run; give at least one"),
        ("seeds", [1, 1], "names one of them twice"),
        ("seeds", [-1], "'seeds' must be at least 0"),
        ("systems", ["vlm"], "unknown system 'vlm'; known: "),
        ("workloads", ["x"], "unknown workload 'x'; known: alpaca, sharegpt"),
        ("block_size", 12, "block_size = 12 is not supported; use a power of two"),
    ],
)
def test_bounds_say_what_is_allowed(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        made(Bounded, **{name: value})
    assert said in str(caught.value) and "\n" not in str(caught.value)
