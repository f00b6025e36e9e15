"""What all tests share: the process environment, the settings of hypothesis, the paper's own data.

The environment is set when this file is read, before any test module imports a library that reads it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, tab  # noqa: F401  (fixtures for all tests that open pages)
from hypothesis import settings

from repro.setup.environment import nvidia_driver, prepare_environment

prepare_environment(os.environ)
os.environ["MPLBACKEND"] = "Agg"
if not nvidia_driver():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the kernels can still be checked, on the CPU

# The same examples in every run, so that a failure is the code's; --hypothesis-profile=search finds new ones.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files marked as heavy, the heaviest first: one that is begun last would keep one core only."""

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("heavy")
        return mark.args[0] if mark else 0

    items.sort(key=seconds, reverse=True)  # stable: within a file, and among the others, the order stays


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread: tiny models gain nothing from more, and lose much when other work shares the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run of the tests, the same in all of its worker processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Return the folder of the paper's own data, which is not published here; skip the test without it."""
    folder = os.environ.get("REPRO_REFERENCE_DIR")
    if not folder:
        pytest.skip("REPRO_REFERENCE_DIR is not set: no data of the paper's own to compare with")
    return Path(folder)
