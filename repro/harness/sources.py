"""Which source code a result depends on, and the hash of that code.

The rule: a point's function counts with the names that it uses, and those that these use in turn, while they are
defined in modules of studies; any other module of the project that such a name comes from counts whole, with all that
it imports. The reason: a study's module holds what computes beside what draws and judges, and only the first may cost a
new computation; everywhere else the coarse rule is the one that misses nothing.

Imports inside functions count. Comments, docstrings and imports for type checkers do not: a change of them computes
nothing again. Names in the annotations of arguments are not followed. Data files beside a reached module count by
content, a name that `repro` offers lazily as what it stands for. Installed libraries do not count (the manifest has
their versions), nor imports by a computed name."""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro import paths
from repro.errors import UserError
from repro.hashing import canonical_json, sha256_file, sha256_json, sha256_text

#: Files with these endings hold data that is read, in the package or as an argument.
DATA_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".txt", ".yaml", ".yml", ".toml", ".npz", ".gguf")
#: A module and a name in it, with the attributes taken from it: ("repro.bench", "plan.Rows"). "*" is the whole module,
#: "" what it does when it is imported.
Part = tuple[str, str]
_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARY_FOLDERS = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Sources:
    """The project's source files as they are on disk now, read once each. Made anew whenever points are identified:
    files may have changed, and workers start fresh from them."""

    def __init__(self) -> None:
        self.digest = functools.cache(self._digest)
        self._module = functools.cache(self._parsed)

    def _parsed(self, name: str) -> _Module | None:
        path = self.path(name)
        return _parsed(name, path, path.read_text(encoding="utf-8"), paths.studies_package()) if path else None

    def _digest(self, roots: frozenset[Part]) -> str:
        """The hash of all the code and data that the given parts reach."""
        code = self.reached(roots)
        packages = {self.path(module).parent for module, _ in code}
        data = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in DATA_SUFFIXES)
        data = [path for path in data if next(up for up in path.parents if (up / "__init__.py").exists()) in packages]
        files = {str(path.relative_to(_PACKAGE)): sha256_file(path) for path in data}
        return sha256_json([sorted(code.items()), files])

    def reached(self, roots: Iterable[Part]) -> dict[Part, str]:
        """Every part that the given ones reach, themselves included -> the hash of its source."""
        reached: dict[Part, str] = {}
        todo = list(roots)
        while todo:
            module, dotted = todo.pop()
            name, _, attribute = dotted.partition(".")
            if name and self.path(f"{module}.{name}") is not None:
                todo.append((f"{module}.{name}", attribute or "*"))
            elif (found := self._module(module)) is not None:
                part = module, dotted if name in found.parts else "*"
                if part not in reached:
                    reached[part], links = found.read(part[1])
                    todo += [*links, (module.rpartition(".")[0], "")]  # importing a module runs the packages around it
        return reached

    def path(self, module: str) -> Path | None:
        """The file of one of the project's own modules; None for libraries, notebooks and what does not exist."""
        parts = module.split(".")
        if parts[0] == _PACKAGE.name:
            beside = _PACKAGE.joinpath(*parts[1:])
            return next(filter(Path.is_file, (beside / "__init__.py", beside.with_suffix(".py"))), None)
        named = getattr(sys.modules.get(module), "__file__", None)  # a study kept outside the package
        if module == "__main__" or not named or not named.endswith(".py"):
            return None
        path = Path(named).resolve()
        return None if any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS) else path


class _Module:
    """One source file in parts: "*", the whole; where names are followed, also each top-level name, and "" for the
    statements that may do more than bind one, which count with every name."""

    def __init__(self, name: str, path: Path, source: str, studies: str) -> None:
        self._name, self._package = name, name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.read = functools.cache(self._read)
        try:
            body = normalised(ast.parse(source)).body
        except SyntaxError as error:
            raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
        if is_face := name == _PACKAGE.name:
            body += _lazy_imports(body)
        self.parts: dict[str, list[ast.stmt]] = {"*": body}
        if is_face or f"{name}.".startswith((f"{_PACKAGE.name}.studies.", f"{studies}.")):
            self.parts[""] = []
            for bound, statement in (binding for whole in body for binding in _bindings(whole)):
                self.parts.setdefault(bound, []).append(statement)

    def _read(self, dotted: str) -> tuple[str, list[Part]]:
        """The hash of a part's source, and the parts that it leads to."""
        name, _, attribute = dotted.partition(".")
        tree = ast.Module(body=self.parts[name], type_ignores=[])
        used = ["", *(used for used in names_in(tree) if used.partition(".")[0] in self.parts)]
        links = [(self._name, name) for name in used] + imports_of(tree, self._package, attribute)
        return sha256_text(canonical_source(tree)), links


#: A notebook identifies its points five times, and parsing is most of that: what has the same source is parsed once.
_parsed = functools.lru_cache(maxsize=1024)(_Module)


def _lazy_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """What a package offers lazily, as imports: the dictionary name -> (module, name) that its `__getattr__` reads."""
    tables = [node.value for node in body if isinstance(getattr(node, "value", None), ast.Dict)]
    pairs = [pair for table in tables for pair in ast.literal_eval(table).items()]
    return [ast.ImportFrom(module, [ast.alias(name, offered)], 0) for offered, (module, name) in pairs]


def _bindings(statement: ast.stmt) -> list[tuple[str, ast.stmt]]:
    """A top-level statement under each name that it binds, an import in pieces; under "" if it may do more."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        bound = [(alias.asname or alias.name).split(".")[0].strip("*") for alias in statement.names]
        pieces = [{**dict(ast.iter_fields(statement)), "names": [alias]} for alias in statement.names]
        return [(name, type(statement)(**piece)) for name, piece in zip(bound, pieces, strict=True)]
    if isinstance(statement, _DEFINITIONS):
        return [(statement.name, statement)]
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [("", statement)]
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    inner = [node for target in targets for node in ast.walk(target)]
    plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.expr_context)) for node in inner)
    return [(node.id, statement) for node in inner if isinstance(node, ast.Name)] if plain else [("", statement)]


def imports_of(tree: ast.Module, package: str = "", attribute: str = "") -> list[Part]:
    """Every import in the tree as parts; of what is imported at its top only `attribute` is used, if one is named."""
    found = []
    for node in ast.walk(tree):
        used = attribute if node in tree.body else ""
        if isinstance(node, ast.Import):
            found += [(one.name, used if used and (one.asname or "." not in one.name) else "*") for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found += [(base, f"{alias.name}.{used}".rstrip(".")) for alias in node.names]
    return found


def names_in(tree: ast.AST) -> set[str]:
    """The names that a tree uses, each with the attribute that is taken from it: "plan.Rows"."""
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif not isinstance(node, ast.arg):  # an argument holds nothing but its annotation
            todo += [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "returns", None)]
    return found


def normalised(tree: ast.Module) -> ast.Module:
    """The tree without what cannot change a result: docstrings and imports for type checkers."""

    def is_inert(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.If):
            return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *_DEFINITIONS)):
            node.body = [statement for statement in node.body if not is_inert(statement)] or [ast.Pass()]
    return tree


def canonical_source(tree: ast.AST) -> str:
    """The tree as text that is the same in every version of Python (that of `ast.unparse` is not)."""

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = dict(ast.iter_fields(node))
        if isinstance(node, ast.JoinedStr):  # some versions end a format with an empty text
            fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
        # Newer versions have more fields, empty in what older ones can read; ctx and kind say nothing more.
        kept = {name for name, value in fields.items() if name not in ("ctx", "kind") and value not in (None, [])}
        return [type(node).__name__, *([name, plain(fields[name])] for name in sorted(kept))]

    return canonical_json(plain(tree))
