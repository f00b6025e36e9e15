"""The import contract: which room of the package may import which, and which libraries a room may need.

A room is a folder or a module directly in repro/. Imports count wherever they stand, inside functions too; only those
for type checkers do not. Names that `import repro` offers are reached by name and bind no room.
"""

import sys
from pathlib import Path

import grimp
import pytest

import repro

#: bottom to top; a room may import those below its own line
LAYERS = (
    {"display", "errors", "words"},
    {"checks", "hashing"},
    {"paths", "sampling_params"},
    {"engine"},
    {"history"},
    {"workloads", "kernels", "setup", "feed", "judge", "course"},
    {"simulate", "llm"},
    {"bench", "server"},
    {"report", "explore"},
    {"harness"},
    {"studies"},
    {"cli"},
    {"__main__"},
)
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
#: single files that every room may import
LEAVES = {"display", "errors", "words", "checks", "hashing", "paths", "sampling_params"}
STANDARD_LIBRARY_ONLY = {"engine", "history", "feed", "course", "setup", *LEAVES}
#: what runs on a GPU machine needs no more than such a machine has
ON_A_GPU_MACHINE = {*LEAVES, "engine", "history", "feed", "llm", "kernels", "bench", "simulate", "workloads"}
ITS_LIBRARIES = {"torch", "triton", "transformers", "safetensors", "numpy", "pandas", "joblib", "tqdm"}
ALSO = {("repro.workloads.hub", "datasets")}  # for the data sets themselves, on request
MAY_IMPORT_TORCH = {"llm", "kernels", "bench"}
MAX_LINES = 400

Imports = list[tuple[str, str]]


@pytest.fixture(scope="module")
def imports() -> Imports:
    """(importer, imported) for every import of the package: modules of ours, or the names of other packages."""
    graph = grimp.build_graph(
        "repro", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    ours = sorted(module for module in graph.modules if module.startswith("repro."))
    return [(module, other) for module in ours for other in sorted(graph.find_modules_directly_imported_by(module))]


def room(module: str) -> str:
    """The room of one of our modules; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def libraries(imports: Imports, rooms: set[str]) -> Imports:
    """What modules of these rooms import from outside the package and the standard library."""
    return [
        (module, other)
        for module, other in imports
        if room(module) in rooms and other.split(".")[0] not in {"repro", *sys.stdlib_module_names}
    ]


def test_the_rooms_are_those_of_the_contract(imports: Imports) -> None:
    assert {room(module) for module, _ in imports} <= set(RANK)
    assert len(set(RANK) - LEAVES - {"__main__"}) <= 17


def test_nothing_points_up_and_no_two_rooms_import_each_other(imports: Imports) -> None:
    between = [(a, b) for a, b in imports if b.startswith("repro.") and room(a) != room(b)]
    assert len(between) > 100
    assert [(a, b) for a, b in between if RANK[room(b)] >= RANK[room(a)]] == []


def test_the_lowest_rooms_need_the_standard_library_only(imports: Imports) -> None:
    assert libraries(imports, STANDARD_LIBRARY_ONLY) == []


def test_what_runs_on_a_gpu_machine_needs_only_what_is_there(imports: Imports) -> None:
    needed = libraries(imports, ON_A_GPU_MACHINE)
    assert {other for _, other in needed} >= {"torch", "triton", "numpy"}
    assert [pair for pair in needed if pair[1].split(".")[0] not in ITS_LIBRARIES and pair not in ALSO] == []


def test_torch_is_imported_where_models_run_and_nowhere_else(imports: Imports) -> None:
    others = libraries(imports, set(RANK) - MAY_IMPORT_TORCH)
    assert [pair for pair in others if pair[1].split(".")[0] in ("torch", "triton")] == []


def test_no_file_is_too_long_to_read_at_once() -> None:
    files = sorted(Path(repro.__file__).parent.rglob("*.py"))
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}
