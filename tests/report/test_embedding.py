"""What a figure carries, and that equal figures have equal bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from repro.errors import UserError
from repro.report import embedding
from repro.report.embedding import figure_bytes, read_embedded


def figure(title: str = "a") -> Figure:
    drawn = Figure()
    axes = drawn.add_subplot(title=title)
    axes.plot([1, 2], [3, 4], "o-", label="<ü & é>")
    axes.fill_between([1, 2], [3, 4], hatch="//")  # hatches and clips get ids in an SVG
    axes.legend()
    return drawn


@pytest.mark.parametrize("file_format", embedding.FIGURE_FORMATS)
def test_figures_have_equal_bytes_and_give_back_what_they_carry(file_format: str, tmp_path: Path) -> None:
    embedded = {"rows_hash": "12", "evidence": ["exact", "<&>\"'"], "devices": ["Gerät 1"], "none": None}
    content = figure_bytes(figure(), file_format, embedded)
    assert content == figure_bytes(figure(), file_format, embedded)
    assert content != figure_bytes(figure("b"), file_format, embedded)
    assert content != figure_bytes(figure(), file_format, {**embedded, "rows_hash": "13"})
    path = tmp_path / f"x.{file_format}"
    path.write_bytes(content)
    assert read_embedded(path) == embedded


def laid_out(labels: int) -> Figure:
    drawn = Figure(layout="constrained", figsize=(5.3, 2.1))
    for index, axes in enumerate(drawn.subplots(1, 3)):
        axes.plot([1, 2], [3, 4 + index], label="x")
        axes.set(xlabel="rate (req/s)", ylabel=f"{'y' * labels} {index}", title="a title")
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
    return drawn


def test_figures_do_not_depend_on_what_was_drawn_before() -> None:
    """A constrained layout settles a fraction of a pixel elsewhere when it starts from where it last ended."""
    for labels in (1, 5, 9):
        first = [figure_bytes(laid_out(labels), name, {}) for name in embedding.FIGURE_FORMATS]
        other = laid_out(labels)
        for name in ("svg", "png", "svg"):
            figure_bytes(laid_out(labels + 1), name, {})
            figure_bytes(other, name, {})
        assert [figure_bytes(other, name, {}) for name in embedding.FIGURE_FORMATS] == first


def test_figures_do_not_depend_on_time_zone_locale_or_hash_seed() -> None:
    program = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from test_embedding import figure;from "
        "repro.report.embedding import figure_bytes as b;print(*(hashlib.sha256(b(figure(), f, dict(a=1))).hexdigest() "
        "for f in ('png', 'svg')))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **changes},
        ).stdout
        for changes in (
            {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"},
            {"PYTHONHASHSEED": "2", "TZ": "America/Lima", "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": "5"},
        )
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    "name, content",
    [
        ("no.png", None),
        ("no.svg", None),
        ("text.png", b"no image"),
        ("empty.png", b""),
        ("bare.svg", b"<svg/>"),
        ("other.svg", b"<svg><dc:description>[1]</dc:description></svg>"),
        ("latin.svg", b"\xff\xfe"),
        ("broken.svg", b"<dc:description>{</dc:description>"),
        ("figure.pdf", b"%PDF"),
    ],
)
def test_what_is_no_figure_of_ours_is_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_embedded(tmp_path / name)


def test_an_image_without_provenance_is_refused(tmp_path: Path) -> None:
    for file_format in embedding.FIGURE_FORMATS:
        figure().savefig(tmp_path / f"plain.{file_format}")
        with pytest.raises(UserError, match="carries no provenance"):
            read_embedded(tmp_path / f"plain.{file_format}")


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    content = figure_bytes(figure(), "png", {"a": 1})
    for length in (8, 20, 40, 60):
        (tmp_path / "cut.png").write_bytes(content[:length])
        with pytest.raises(UserError, match="cut.png"):
            read_embedded(tmp_path / "cut.png")
