"""Parameter files and overrides, checked against a study's dataclass before any work.

Papermill only warns about an unknown parameter and YAML accepts anything, so every name and type is checked here: an
unknown name lists the known ones, a value of the wrong type says what is allowed. Whole numbers are accepted for floats
and lists become tuples; nothing else is converted.

This module does not know what the parameters mean; the study's `__post_init__` checks their ranges.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from repro.engine.errors import UserError

_SECTIONS = ("title", "params", "smoke")
_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", Path: "a file name"}


class _Loader(yaml.SafeLoader):
    """Safe loading that refuses a name given twice (YAML would silently keep the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the name {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> Any:
    """The content of a YAML text; UserError with the source and line if it cannot be parsed."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        cause = getattr(error, "problem", None) or str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{source}{where}: not valid YAML: {cause}") from error


def read_parameter_file(path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Title, parameters and smoke-scale changes of an experiments/<stem>.yaml, with its three sections checked."""
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
    title, params, smoke = content.get("title"), content.get("params") or {}, content.get("smoke") or {}
    if not isinstance(title, str) or not title.strip():
        raise UserError(f"{path}: 'title' must be one line of text")
    for name, section in (("params", params), ("smoke", smoke)):
        if not isinstance(section, dict):
            raise UserError(f"{path}: {name!r} must hold 'name: value' lines")
    return title.strip(), params, smoke


def check_parameters(params_class: type, given: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """The given parameters with their types checked against the dataclass; `source` is named in errors."""
    hints = get_type_hints(params_class)
    known = [field.name for field in fields(params_class)]
    checked = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UserError(f"{source}: unknown parameter {name!r}{hint}; known: {', '.join(known)}")
        try:
            checked[name] = conform(value, hints[name])
        except TypeError as error:
            raise UserError(f"{source}: parameter {name!r} {error}") from None
    return checked


def conform(value: Any, annotation: Any) -> Any:
    """`value` as `annotation` asks, or TypeError that says what is allowed ("must be ..., not ...")."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if isinstance(annotation, type) and origin is None:
        is_odd_bool = isinstance(value, bool) and annotation is not bool
        if (
            isinstance(value, annotation)
            and not is_odd_bool
            and not (isinstance(value, float) and not math.isfinite(value))
        ):
            return value
    elif origin is Literal:
        if any(value == allowed and type(value) is type(allowed) for allowed in inner):
            return value
    elif origin in (Union, types.UnionType):
        for option in sorted(inner, key=lambda option: type(value) is not option):  # an exact type first
            try:
                return conform(value, option)
            except TypeError:
                pass
    elif origin is Callable:
        if callable(value):
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(conform(item, inner[0]) for item in value)
        if len(inner) == len(value):
            return tuple(map(conform, value, inner))
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {conform(name, inner[0]): conform(item, inner[1]) for name, item in value.items()}
    raise TypeError(
        f"must be {_in_words(annotation)}, not {reprlib.repr(value)} "
        f"({type(value).__name__}){_number_hint(value, annotation)}"
    )


def _in_words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, inner))
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return f"a list, each entry {_in_words(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: " + ", ".join(map(_in_words, inner))
    if origin in (dict, Mapping):
        return f"'name: value' lines, each value {_in_words(inner[1])}"
    if origin is Callable:
        return "a function"
    if annotation in (None, type(None)):
        return "null"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _number_hint(value: Any, annotation: Any) -> str:
    """YAML reads 1e3 as text; the reader will not guess that."""
    if annotation is float and isinstance(value, str):
        try:
            return f"; write {float(value)!r}" if math.isfinite(float(value)) else ""
        except ValueError:
            pass
    return ""
