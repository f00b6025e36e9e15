"""The source code that a computation depends on, found by following imports, and its hash.

* A study (a module with `points` and `draw`) counts only with the definitions that are reached by name from
  the point's function: editing its `draw` or `judge`, or an import that only they use, changes nothing.
* Every other module of the project that is reached, also by an import inside a function, counts whole.
* Comments, docstrings and imports for type checkers never count.
* The data files of every reached package count too (cost-model profiles, histograms).

Installed libraries do not count; their versions are in the manifest. An import by a computed name
(`importlib.import_module`) is not seen. This module knows nothing of points, arguments and results.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro.engine.errors import UserError
from repro.hashing import canonical_json, sha256_file, sha256_text

#: Files with these endings hold data that is read, in the package or as an argument.
DATA_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".txt", ".toml", ".yaml", ".npz", ".gguf")
_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARY_FOLDERS = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})


class Sources:
    """The project's source files as they are on disk now, read once each.

    Made anew for each run: the workers start fresh from the files, so it is the files that count.
    """

    def __init__(self) -> None:
        self._modules: dict[str, _Module | None] = {}
        self._digests: dict[frozenset[tuple[str, str]], str] = {}

    def path(self, module: str) -> Path | None:
        """The file of one of the project's own modules; None for libraries, notebooks and what does not exist."""
        parts = module.split(".")
        if parts[0] == _PACKAGE.name:
            beside = _PACKAGE.joinpath(*parts[1:])
            candidates = (beside / "__init__.py", beside.with_suffix(".py"))
            return next((path for path in candidates if path.is_file()), None)
        named = getattr(sys.modules.get(module), "__file__", None)  # a study kept outside the package
        if module == "__main__" or not named or not named.endswith(".py"):
            return None
        path = Path(named).resolve()
        return None if any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS) else path

    def digest(self, roots: frozenset[tuple[str, str]]) -> str:
        """The hash of all the code and data that the given (module, name) pairs reach."""
        if roots not in self._digests:
            reached = self.reached(roots)
            parts: dict[str, Any] = {}
            for module, names in reached.items():
                parts[module] = self._module(module).text_and_imports(names)[0]
            for path in self._data_files(reached):
                parts[str(path.relative_to(_PACKAGE))] = sha256_file(path)
            self._digests[roots] = sha256_text(canonical_json(parts))
        return self._digests[roots]

    def reached(self, roots: frozenset[tuple[str, str]]) -> dict[str, frozenset[str]]:
        """Module -> the top-level names of it that are reached ("" stands for the whole module)."""
        reached: dict[str, set[str]] = {}
        todo = list(roots)
        while todo:
            module, name = todo.pop()
            submodule = f"{module}.{name}"
            if name and self.path(submodule) is not None:
                module, name = submodule, ""
            found = self._module(module)
            if found is None:
                continue
            name = name if found.is_study and name in found.bindings else ""
            if name in reached.setdefault(module, set()):
                continue
            reached[module].add(name)
            todo.extend(found.text_and_imports(frozenset({name}))[1])
            parent = module.rpartition(".")[0]
            if parent:
                todo.append((parent, ""))
        return {module: frozenset(names) for module, names in reached.items()}

    def _module(self, module: str) -> _Module | None:
        if module not in self._modules:
            path = self.path(module)
            self._modules[module] = _Module(module, path) if path else None
        return self._modules[module]

    def _data_files(self, reached: Mapping[str, Any]) -> list[Path]:
        """The data files whose nearest enclosing package is reached."""
        packages = {self.path(module).parent for module in reached}

        def package_of(folder: Path) -> Path:
            is_package = folder == _PACKAGE or (folder / "__init__.py").exists()
            return folder if is_package else package_of(folder.parent)

        return sorted(
            path for path in _PACKAGE.rglob("*") if path.suffix in DATA_SUFFIXES and package_of(path.parent) in packages
        )


class _Module:
    """One source file, taken apart into what each top-level name is bound by."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._is_package = name, path.name == "__init__.py"
        self._reached: dict[frozenset[str], tuple[str, list[tuple[str, str]]]] = {}
        try:
            self._tree = normalised(ast.parse(path.read_text(encoding="utf-8")))
        except SyntaxError as error:
            raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
        self.bindings: dict[str, list[ast.stmt]] = {}
        self._always: list[ast.stmt] = []
        for statement in self._tree.body:
            names = _bound_names(statement)
            for bound in names:
                self.bindings.setdefault(bound, []).append(statement)
            if not names:  # may have a side effect
                self._always.append(statement)
        self.is_study = {"points", "draw"} <= self.bindings.keys()

    def _statements(self, names: frozenset[str]) -> list[ast.stmt]:
        if "" in names:
            return self._tree.body
        kept = {id(statement): statement for statement in self._always}
        todo = set(names).union(*map(names_in, self._always))
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            seen.add(name)
            for statement in self.bindings.get(name, ()):
                # Of an import only the names that are used count, see below; its own names lead nowhere else.
                kept[id(statement)] = statement
                if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                    todo |= names_in(statement) - seen
        trimmed = []
        for statement in self._tree.body:
            if id(statement) in kept:
                if isinstance(statement, (ast.Import, ast.ImportFrom)):
                    used = [alias for alias in statement.names if _alias_name(alias) in seen | {"*"}]
                    statement = type(statement)(**{**dict(ast.iter_fields(statement)), "names": used})
                trimmed.append(statement)
        return trimmed

    def text_and_imports(self, names: frozenset[str]) -> tuple[str, list[tuple[str, str]]]:
        """The source that the given names reach ("" for all of it), and what it imports."""
        if names not in self._reached:
            tree = ast.Module(body=self._statements(names), type_ignores=[])
            self._reached[names] = canonical_source(tree), imports_of(tree, self._name, self._is_package)
        return self._reached[names]


def imports_of(tree: ast.AST, module: str = "__main__", is_package: bool = False) -> list[tuple[str, str]]:
    """Every import in the tree as (module, name); name is "" where the module itself is meant."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".") if is_package else module.split(".")[:-1]
                above = above[: len(above) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            found += [(base, "" if alias.name == "*" else alias.name) for alias in node.names]
    return found


def _alias_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _bound_names(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement only binds; none for a statement that may do more."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [_alias_name(alias) for alias in statement.names if alias.name != "*"]
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else ([statement.target] if isinstance(statement, (ast.AnnAssign, ast.AugAssign)) else [])
    )
    names = [node for target in targets for node in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [node.id for node in names] if all(isinstance(node, ast.Name) for node in names) else []


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def normalised(tree: ast.Module) -> ast.Module:
    """The tree without what cannot change a result: docstrings and imports for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [statement for statement in node.body if not _is_inert(statement)] or [ast.Pass()]
    return tree


def canonical_source(tree: ast.AST) -> str:
    """The tree as text that is the same in every version of Python (that of `ast.unparse` is not)."""
    return canonical_json(_plain(tree))


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr):  # some versions end a format with an empty text
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    # Newer versions have more fields, empty in what older ones can read; ctx and kind say nothing more.
    kept = {name: value for name, value in fields.items() if name not in ("ctx", "kind") and value not in (None, [])}
    return [type(node).__name__, *([name, _plain(kept[name])] for name in sorted(kept))]


def _is_inert(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
