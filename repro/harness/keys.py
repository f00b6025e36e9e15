"""What a result depends on, as one hash: the key under which a finished point is kept.

A key covers the point's function, its arguments by content, and the source of the code that computes it
(repro.harness.sources), so results are reused exactly as long as nothing that could change them has changed, whatever
the files' dates say. A function or class that is defined in a notebook cell counts with its source and every global
that it uses; a data file that is named as an argument counts with its content.

This module knows nothing of engines, of what studies compute, or of how results are kept.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from repro.engine.errors import UserError
from repro.harness.sources import DATA_SUFFIXES, Sources, canonical_source, imports_of, names_in, normalised
from repro.hashing import canonical_json, sha256_file, sha256_text

_NOT_CODE = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True)
class Identity:
    """A point by content: its key, the hash of its computing code, its function's name, its arguments as JSON
    values."""

    key: str
    code: str
    function: str
    arguments: dict[str, Any]


def identify(function: Any, arguments: Mapping[str, Any], sources: Sources | None = None) -> Identity:
    """The identity of the call `function(**arguments)`; `sources` is shared between the points of one run.

    Raises UserError for an argument that has no content to hash (an open file, a generator, an arbitrary object).
    """
    collector = _Collector(sources or Sources())
    described = collector.describe(function, "function")
    content = {name: collector.describe(value, f"argument {name!r}") for name, value in sorted(arguments.items())}
    code = sha256_text(canonical_json([described, collector.code()]))
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    return Identity(sha256_text(canonical_json([code, content])), code, name, content)


def describe(value: Any) -> Any:
    """A value by content as plain JSON values, for instance the parameters of a run; UserError as for `identify`."""
    return _Collector(Sources()).describe(value, "value")


class _Collector:
    """Describes values as JSON, and gathers the modules of the project that they reach."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._roots: set[tuple[str, str]] = set()  # (module, top-level name; "" for the whole module)
        self._open: set[int] = set()  # definitions being described: they may refer to one another

    def code(self) -> str:
        """The hash of the project's source that everything described so far reaches."""
        return self._sources.digest(frozenset(self._roots))

    def describe(self, value: Any, where: str) -> Any:
        if isinstance(value, enum.Enum):
            return {"member": value.name, "of": self._definition(type(value), where)}
        if value is None or isinstance(value, (bool, int, float, str, Path)):
            return _file_or_value(value)
        if isinstance(value, Mapping):
            items = [[self.describe(k, where), self.describe(v, where)] for k, v in value.items()]
            return {"mapping": sorted(items, key=canonical_json)}
        if isinstance(value, (list, tuple)):
            return [self.describe(item, where) for item in value]
        if isinstance(value, (set, frozenset)):
            return {"set": sorted((self.describe(item, where) for item in value), key=canonical_json)}
        if isinstance(value, functools.partial):
            return {"partial": [self.describe(part, where) for part in (value.func, value.args, value.keywords)]}
        if inspect.ismodule(value):
            self._roots.add((value.__name__, ""))
            return {"module": value.__name__}
        if inspect.ismethod(value):
            return {"method": value.__name__, "of": self.describe(value.__self__, where)}
        if inspect.isclass(value) or inspect.isroutine(value):
            return self._definition(value, where)
        if is_dataclass(value):
            inner = {field.name: self.describe(getattr(value, field.name), where) for field in fields(value)}
            return {"fields": inner, "of": self._definition(type(value), where)}
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            return {"array": [str(value.dtype), list(value.shape), sha256_text(value.tobytes().hex())]}
        raise UserError(
            f"{where}: a {type(value).__name__} cannot be identified by its content, so results that depend on it "
            "could not be kept; use numbers, text, file names, dataclasses or functions"
        )

    def _definition(self, thing: Any, where: str) -> dict[str, Any]:
        """A function or class: its name, and what its name alone does not say."""
        thing = inspect.unwrap(thing) if inspect.isfunction(thing) else thing
        module, name = (getattr(thing, "__module__", None) or "builtins", getattr(thing, "__qualname__", repr(thing)))
        described: dict[str, Any] = {"name": f"{module}.{name}"}
        if id(thing) in self._open:
            return described
        self._open.add(id(thing))
        try:
            if self._sources.path(module) is not None:
                self._roots.add((module, name.split(".")[0]))
                if inspect.isfunction(thing) and "<locals>" in name:
                    described["values"] = self._values(thing, set(), where)
            elif module == "__main__" and inspect.isclass(thing):
                described |= self._notebook_class(thing, where)
            elif module == "__main__" and inspect.isfunction(thing):
                described |= self._notebook_function(thing, where)
        finally:
            self._open.discard(id(thing))
        return described

    def _notebook_class(self, thing: type, where: str) -> dict[str, Any]:
        members = {}
        for name, member in vars(thing).items():
            member = getattr(member, "__func__", getattr(member, "fget", member))
            member = inspect.unwrap(member) if inspect.isfunction(member) else member
            special = name.startswith("__") and name != "__annotations__" and not inspect.isfunction(member)
            # A dataclass's own methods have no source; they follow from its annotations and defaults.
            generated = inspect.isfunction(member) and member.__code__.co_filename == "<string>"
            if not (special or generated or name == "_abc_impl" or isinstance(member, _NOT_CODE)):
                members[name] = (
                    {key: str(hint) for key, hint in member.items()}
                    if name == "__annotations__"
                    else self.describe(member, f"{where}, {thing.__name__}.{name}")
                )
        return {"bases": [self._definition(base, where) for base in thing.__bases__], "members": members}

    def _notebook_function(self, thing: types.FunctionType, where: str) -> dict[str, Any]:
        try:
            tree = normalised(ast.parse(textwrap.dedent(inspect.getsource(thing))))
        except (OSError, SyntaxError, TypeError) as error:
            raise UserError(
                f"{where}: the source of {thing.__qualname__} cannot be read; define it with `def` in a notebook cell "
                "or in a file"
            ) from error
        self._roots.update(imports_of(tree))
        return {"source": canonical_source(tree), "values": self._values(thing, names_in(tree), where)}

    def _values(self, function: types.FunctionType, names: set[str], where: str) -> dict[str, Any]:
        """What a function takes from outside its own source: the globals in `names`, its closure, its defaults."""
        values = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
        values |= {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        }
        values |= {f"default {index}": value for index, value in enumerate(function.__defaults__ or ())}
        values |= function.__kwdefaults__ or {}
        return {
            name: self.describe(value, f"{where}, {function.__qualname__} uses {name!r}")
            for name, value in values.items()
        }


def _file_or_value(value: Any) -> Any:
    """A value as it is; the name of a data file as its content, so that moving the file changes nothing."""
    if isinstance(value, (str, Path)) and str(value).endswith(DATA_SUFFIXES) and Path(value).is_file():
        return {"file": Path(value).name, "sha256": sha256_file(Path(value))}
    return str(value) if isinstance(value, Path) else value
