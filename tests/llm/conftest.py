"""The two smallest models that tests of `generate` share; see tiny.py."""

import pytest


@pytest.fixture(scope="session")
def tiny():
    return pytest.importorskip("tiny", exc_type=ImportError).tiny()


@pytest.fixture(scope="session")
def spoken():
    return pytest.importorskip("tiny", exc_type=ImportError).spoken()
