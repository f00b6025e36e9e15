"""What a result depends on, as one hash: the key under which a finished point is kept.

A point is computed again exactly if the hash of one of these two changes, whatever the files' dates say:

* its arguments, by content: numbers and text as they are, a data file that is named by what is in it, a function or
  class by the code that it reaches;
* the code that its function reaches: by name within studies, whole modules elsewhere (repro.harness.sources says how).

A function or class of a notebook's cell counts with its source and with every global that it uses."""

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

from repro.errors import UserError
from repro.harness.sources import DATA_SUFFIXES, Part, Sources, canonical_source, imports_of, names_in, normalised
from repro.hashing import canonical_json, sha256_file, sha256_json, sha256_text


@dataclass(frozen=True)
class Identity:
    """A point by content: its key, its function's name, its arguments as JSON values, the hash of its code."""

    key: str
    function: str
    arguments: dict[str, Any]
    code: str


def identify(function: Any, arguments: Mapping[str, Any], sources: Sources | None = None) -> Identity:
    """The identity of the call `function(**arguments)`; `sources` is shared between the points of one run.

    Raises UserError for an argument that has no content to hash (an open file, a generator, an arbitrary object)."""
    collector = _Collector()
    described = collector.describe(function, "function")
    content = {name: collector.describe(value, f"argument {name!r}") for name, value in sorted(arguments.items())}
    code = sha256_json([described, (sources or Sources()).digest(frozenset(collector.roots))])
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    return Identity(sha256_json([code, content]), name, content, code)


def describe(value: Any) -> Any:
    """A value by content as plain JSON values, for instance the parameters of a run; UserError as for `identify`."""
    return _Collector().describe(value, "value")


class _Collector:
    """Describes values as JSON, and gathers the parts of the project's source that they lead to."""

    def __init__(self) -> None:
        self.roots: set[Part] = set()
        self._met: dict[int, Any] = {}  # definitions: they may refer to one another

    def describe(self, value: Any, where: str) -> Any:
        """A value by content; `where` it was found goes into the UserError for one that has none."""
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
            return {"partial": self.describe((value.func, value.args, value.keywords), where)}
        if inspect.ismodule(value):
            self.roots.add((value.__name__, "*"))
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
        module, name = getattr(thing, "__module__", None) or "builtins", getattr(thing, "__qualname__", repr(thing))
        described: dict[str, Any] = {"name": f"{module}.{name}"}
        if id(thing) in self._met:
            return described
        self._met[id(thing)] = thing
        self.roots.add((module, name.split(".")[0]))
        if module == "__main__" and inspect.isclass(thing):
            described["of"] = self.describe([thing.__bases__, _members(thing)], f"{where}, {name}")
        elif inspect.isfunction(thing) and (module == "__main__" or "<locals>" in name):
            try:
                tree = normalised(ast.parse(textwrap.dedent(inspect.getsource(thing)) if module == "__main__" else ""))
            except (OSError, SyntaxError, TypeError) as error:
                define = "define it with `def` in a notebook cell or a file"
                raise UserError(f"{where}: the source of {name} cannot be read; {define}") from error
            self.roots.update(imports_of(tree))
            described |= {"source": canonical_source(tree), "values": self._values(thing, names_in(tree), where)}
        return described

    def _values(self, function: types.FunctionType, names: set[str], where: str) -> dict[str, Any]:
        """What a function takes from outside its own source: the globals in `names`, its closure, its defaults."""
        values: dict[str, Any] = {}
        for name, _, attribute in (dotted.partition(".") for dotted in sorted(names)):
            value = function.__globals__.get(name)
            if inspect.ismodule(value):
                self.roots.add((value.__name__, attribute or "*"))
            elif name in function.__globals__:
                values[name] = value
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values |= {name: cell.cell_contents for name, cell in cells}
        values |= {f"default {index}": value for index, value in enumerate(function.__defaults__ or ())}
        values |= function.__kwdefaults__ or {}
        inside = f"{where}, {function.__qualname__} uses"
        return {name: self.describe(value, f"{inside} {name!r}") for name, value in values.items()}


def _members(thing: type) -> dict[str, Any]:
    """What a notebook's class defines. A dataclass's own methods follow from its annotations and defaults."""
    members: dict[str, Any] = {}
    for name, member in vars(thing).items():
        member = getattr(member, "__func__", getattr(member, "fget", member))
        if inspect.isfunction(member):
            if inspect.unwrap(member).__code__.co_filename != "<string>":
                members[name] = member
        elif name == "__annotations__":
            members[name] = {key: str(hint) for key, hint in member.items()}
        elif not (name.startswith("__") or name == "_abc_impl" or inspect.isdatadescriptor(member)):
            members[name] = member
    return members


def _file_or_value(value: Any) -> Any:
    """A value as it is; the name of a data file as its content, so that moving the file changes nothing."""
    if isinstance(value, (str, Path)) and str(value).lower().endswith(DATA_SUFFIXES) and Path(value).is_file():
        return {"file": Path(value).name, "sha256": sha256_file(Path(value))}
    return str(value) if isinstance(value, Path) else value
