"""An experiment's parameters: stated once, in experiments/<stem>.yaml, and checked before any work.

The file gives each parameter's value, and the comment behind it is what the parameter means. A study's class gives
types and bounds (pydantic) and no values. An unknown name lists the known ones, a value of the wrong type says what is
allowed. Whole numbers are accepted for floats and lists become tuples; nothing else is converted."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, field_validator

from repro.errors import UserError

_SECTIONS = ("title", "params", "smoke", "captions", "views", "notes")
_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}
#: A parameter's line in the file: its name, its value, and its meaning.
_MEANING = re.compile(r"^  (\w+):[^#\n]*\s#\s*(.+)$", re.MULTILINE)


class Parameters(BaseModel):
    """Base of a study's `Params`: annotated fields without defaults, checked when they are made, then fixed.

    `free` names what may differ from the file while the paper's claims are still judged."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    free: ClassVar[tuple[str, ...]] = ("seeds", "lengths")
    _stated: Any = PrivateAttr(default=None)  # the file's parameters at the paper's scale

    @field_validator("*", mode="before")
    @classmethod
    def _lists_become_tuples(cls, value: Any) -> Any:
        return _tuples(value)

    @property
    def as_in_paper(self) -> bool:
        """Whether everything is as in the experiment's file, but for what is `free`."""
        return self._stated is not None and not self._differing(free=False)

    @property
    def no_verdicts(self) -> str:
        """Why the paper's claims are not judged, in words; "" if they are."""
        return "" if self.as_in_paper else f"no verdicts: {', '.join(self._differing(free=False))}"

    @property
    def another_run(self) -> str:
        """What makes this another run than the one in the experiment's file; "" if it is that run.

        A duration, a window, a rate, a model or a file of data does; what lists or switches choose to run does not.
        The paper's own points are drawn only beside that run."""
        return ", ".join(self._differing(free=True, chosen=False))

    def _differing(self, free: bool, chosen: bool = True) -> list[str]:
        """What differs from the experiment's file: with what is `free`, if it brings data of its own; with lists and
        switches, if `chosen`."""
        if self._stated is None:
            return ["the parameters are not those of the experiment's file"]
        pairs = {name: (getattr(self, name), getattr(self._stated, name)) for name in type(self).model_fields}
        return [
            f"{name} is {_written(value)}" + ("" if stated is None else f" instead of {_written(stated)}")
            for name, (value, stated) in pairs.items()
            if value != stated
            and (name not in self.free or free and stated is None)
            and (chosen or not isinstance(value, (tuple, bool)) or name.endswith("window_s"))
        ]

    def __repr__(self) -> str:
        """A line for each."""
        return "\n".join(f"{name} = {reprlib.repr(value)}" for name, value in self)

    def pick(self, *names: str) -> dict[str, Any]:
        """Some of the parameters by name, as arguments of a point."""
        return {name: getattr(self, name) for name in names}


def _tuples(value: Any) -> Any:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, of a file's name that is not UTF-8 say
            raise ValueError("holds a character that is no text and cannot be written down") from None
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


@dataclass(frozen=True)
class ParameterFile:
    """The content of a parameter file."""

    path: Path
    title: str
    params: dict[str, Any]  # values at the paper's scale
    smoke: dict[str, Any]  # changes at the smoke scale
    meanings: dict[str, str]  # of the parameters
    captions: dict[str, str]  # what to see in each figure
    notes: dict[str, str]  # what to say beside a claim, with places for numbers as in `str.format`
    views: dict[str, Any] = field(default_factory=dict)  # which of a figure's rows the page charts (repro.report.views)


def make_parameters(cls: type[Parameters], file: ParameterFile, scale: str, given: Mapping[Any, Any]) -> Parameters:
    """The parameters of a run: the file's, at the smoke scale with its changes, and what is given instead.

    UserError that names the source for a name that is unknown or missing and for a value that cannot be."""
    paper = {f"{file.path}, params": file.params}
    smoke = paper | {f"{file.path}, smoke": file.smoke}
    whole = _checked(cls, paper)
    _checked(cls, smoke)  # a mistake there is found at any scale
    run = _checked(cls, (smoke if scale == "smoke" else paper) | {"overrides": given})
    run._stated = whole
    return run


def _checked(cls: type[Parameters], sources: Mapping[str, Mapping[Any, Any]]) -> Parameters:
    """The parameters that the sources give, a later one before an earlier one."""
    known, values, origin = list(cls.model_fields), {}, {}
    for source, given in sources.items():
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise UserError(f"{source}: unknown parameter {name!r}{hint}; known: {', '.join(known)}")
        values |= given
        origin |= dict.fromkeys(given, source)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UserError) or not first["loc"]:
            raise UserError(str(cause or first["msg"])) from None
        name = str(first["loc"][0])
        source = origin.get(name, next(iter(sources)))
        if first["type"] == "missing" and len(first["loc"]) == 1:
            raise UserError(f"{source}: parameter {name!r} is missing; give it a value") from None
        annotation = get_type_hints(cls, include_extras=True)[name]
        raise UserError(f"{source}: parameter {name!r} {_fault(values[name], annotation, first)}") from None


def _fault(value: Any, annotation: Any, error: Mapping[str, Any]) -> str:
    """What is wrong with a value, and what is allowed."""
    shown = f"not {reprlib.repr(value)} ({type(value).__name__})"
    context = error.get("ctx", {})
    if "error" in context:  # a bound of ours
        return f"= {reprlib.repr(value)} {context['error']}"
    if error["type"].startswith(("greater_than", "less_than")):
        words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
        bound = next(f"{words[name]} {limit:g}" for name, limit in context.items() if name in words)
        return f"must be {bound}, {shown}"
    hint = ""
    if float in _plain_types(annotation) and isinstance(error["input"], str):  # YAML reads 1e3 as text
        with contextlib.suppress(ValueError):
            hint = f"; write {float(error['input'])!r}" if math.isfinite(float(error["input"])) else ""
    return f"must be {in_words(annotation)}, {shown}{hint}"


def _plain_types(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*map(_plain_types, inner))


def in_words(annotation: Any) -> str:
    """What values a type allows, for people."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(inner[0])
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, inner))
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return f"a list, each entry {in_words(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: " + ", ".join(map(in_words, inner))
    if origin is Callable:
        return "a function"
    if origin in (dict, Mapping):
        return f"'name: value' lines, each value {in_words(inner[1])}"
    return _WORDS.get(annotation) or getattr(annotation, "__name__", str(annotation))


class _Loader(yaml.SafeLoader):
    """Safe loading that refuses a name given twice (YAML would silently keep the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                twice = f"the name {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> Any:
    """The content of a YAML text; UserError with the source and line if it cannot be parsed."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        cause = getattr(error, "problem", None) or next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{source}{where}: not valid YAML: {cause}") from error


def read_parameter_file(path: Path) -> ParameterFile:
    """The content of an experiments/<stem>.yaml. UserError if it cannot be read or has another form."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold the sections {', '.join(_SECTIONS)}")
    for section in content:
        if section not in _SECTIONS:
            raise UserError(f"{path}: unknown section {section!r}; known: {', '.join(_SECTIONS)}")
    title = content.get("title")
    if not isinstance(title, str) or not title.strip():
        raise UserError(f"{path}: 'title' must be one line of text")
    sections = {name: content.get(name) or {} for name in _SECTIONS[1:]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UserError(f"{path}: {name!r} must hold 'name: value' lines")
    stated = text[text.find("\nparams:") :].partition("\nsmoke:")[0]
    return ParameterFile(path, title.strip(), meanings=dict(_MEANING.findall(stated)), **sections)
