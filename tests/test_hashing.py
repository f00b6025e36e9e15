"""One JSON text for a value, and hashes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro import hashing
from repro.hashing import canonical_json, sha256_text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_exact_ascii_and_does_not_see_the_order_of_names(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value and text.isascii()

    def reordered(value: object) -> object:
        if isinstance(value, dict):
            return {name: reordered(value[name]) for name in reversed(value)}
        return [reordered(item) for item in value] if isinstance(value, list) else value

    assert canonical_json(reordered(value)) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": object()}])
def test_canonical_json_refuses_what_json_has_not(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical_json(value)


def test_known_hashes(tmp_path: Path) -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tmp_path / "x").touch()
    assert sha256_text("") == empty == hashing.sha256_file(tmp_path / "x")
