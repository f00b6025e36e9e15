"""A published package, fetched by name from the package index: unpacked, not installed, and imported in part.

Only Python files are kept, in a cache outside the checkout. Modules that are heavy and decide nothing (torch, ray, the
workers) are replaced by empty ones while the package is imported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import zipfile
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class NotFetched(Exception):
    """The package cannot be had or read here, in one line."""


def cache() -> Path:
    """Where unpacked packages are kept: the user's own cache, never the checkout, whose tests look at all its files."""
    if named := os.environ.get("REPRO_ORACLE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "repro-oracle"


def fetched(name: str, version: str, python: str, platform: str) -> Path:
    """The folder that holds the Python files of a package's wheel. NotFetched if it cannot be had."""
    folder = cache() / f"{name}-{version}"
    if folder.exists():
        return folder
    print(f"fetching {name} {version}", flush=True)
    try:
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as work:
            _unpack(_wheel(name, version, python, platform, Path(work)), Path(work) / "unpacked")
            os.replace(Path(work) / "unpacked", folder)  # last, so that an interrupted call leaves nothing half-made
    except OSError as error:
        raise NotFetched(f"{name} {version} cannot be kept in {cache()} ({error.strerror})") from error
    return folder


def _wheel(name: str, version: str, python: str, platform: str, work: Path) -> Path:
    # Not the source archive: to fetch that, pip would build it, with a compiler and a GPU's tools.
    target = ["--only-binary", ":all:", "--python-version", python, "--platform", platform]
    options = ["--no-deps", *target, "--retries", "1", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", f"{name}=={version}", *options]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.splitlines() or ["pip gave no reason"]
        reason = [line for line in lines if "ERROR" in line] or lines
        raise NotFetched(f"{name} {version} cannot be fetched ({reason[-1].removeprefix('ERROR: ')})")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [member for member in archive.namelist() if member.endswith(".py")])


class _Anything(ABCMeta):  # so that classes may have both kinds of parents
    """Classes that have every attribute: the contents of empty modules."""

    def __getattr__(cls, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name)
        setattr(cls, name, made)
        return made

    def __or__(cls, other: object) -> _Anything:  # in annotations
        return cls

    __ror__ = __or__


def _made(name: str) -> _Anything:
    def call(self: object, *arguments: object, **named: object) -> object:
        return arguments[0] if arguments else None  # as a decorator

    body = {
        "__init__": lambda self, *arguments, **named: None,
        "__call__": call,
        "__class_getitem__": classmethod(lambda cls, key: cls),
        "__init_subclass__": classmethod(lambda cls, **named: None),
    }
    return _Anything(name, (), body)


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _made(name)
        setattr(self, name, made)
        return made


class _Finder:
    """Finds the package in its folder without running its own first lines, and empty modules for what is left out."""

    def __init__(self, package: str, folder: Path, left_out: Sequence[str]) -> None:
        self.package, self.folder, self.left_out = package, folder, left_out

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.package and not self.leaves_out(name):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.folder / name)] if name == self.package else []
        return spec

    def leaves_out(self, name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in self.left_out)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name) if spec.name != self.package else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def importing(package: str, folder: Path, left_out: Sequence[str]) -> Iterator[None]:
    """Within it, `package` comes from `folder` and the modules `left_out` are empty. Afterwards all is as before."""
    finder = _Finder(package, folder, left_out)

    def concerned() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == package or finder.leaves_out(name)]

    before = {name: sys.modules.pop(name) for name in concerned()}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in concerned():
            del sys.modules[name]
        sys.modules.update(before)


def modules(package: str, folder: Path, names: Sequence[str], left_out: Sequence[str]) -> list[ModuleType]:
    """Some modules of a package, imported. NotFetched if one does not import here."""
    with importing(package, folder, left_out):
        found = []
        for name in names:
            try:
                found.append(importlib.import_module(name))
            except Exception as error:
                line = str(error).partition("\n")[0]
                raise NotFetched(f"{name} of {folder.name} does not import ({type(error).__name__}: {line})") from error
        return found
