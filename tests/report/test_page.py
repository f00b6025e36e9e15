"""The page: complete, self-contained, escaped, and a function of its inputs alone."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from repro.report import claims, embedding, page
from repro.report.claims import Judgement
from repro.report.page import Description

VOID = {"meta", "img", "input", "br"}
EXPERIMENTS = {"fig01_memory": Description("Sums & shares", {"fig01_memory": "Fig. 1: <weights> and K/V."})}


class Checked(HTMLParser):
    """Collects links and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """One experiment with a figure, a verdict, a manifest and both of its notebooks."""
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    figures, results = tmp_path / "figures", tmp_path / "results"
    (results / "fig01_memory").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    for path in (tmp_path / "notebooks", results / "fig01_memory"):
        (path / "fig01_memory.ipynb").write_text("{}")
    judgement = Judgement("waste-under-4-percent", 3.2, "replayed", [3.1, 3.4], "a < b & c")
    claims.record([judgement], "fig01_memory", figures)
    figure = Figure()
    figure.subplots().plot([1, 2])
    about = {"experiment": "fig01_memory", "evidence": ["modelled"], "devices": ["a100-2023"], "scale": "smoke"}
    for file_format in embedding.FIGURE_FORMATS:
        (figures / f"fig01_memory.{file_format}").write_bytes(embedding.figure_bytes(figure, file_format, about))
    (figures / "fig01_memory.json").write_text(json.dumps(about))
    machine = {
        "commit": "0123456789abcdef",
        "uncommitted_changes": True,
        "cpu": "<CPU>",
        "cores": 2,
        "gpus": ["H200"],
        "python": "3.11.7",
        "libraries": {"numpy": "2.4", "torch": None},
        "utc": "2026-01-02T03:04:05+00:00",
    }
    made = {"points": 16, "seconds_of_computing": 1.5, "computed_by": [machine]}
    (figures / "machines.json").write_text(json.dumps({"fig01_memory": made}))
    return figures, results


def test_the_page_is_well_formed_and_every_local_link_leads_somewhere(folders):
    path = page.build(*folders, EXPERIMENTS)
    checked = Checked(path.read_text())
    assert len(checked.ids) == len(set(checked.ids))
    for link in checked.links:
        if link.startswith("#"):
            assert link[1:] in checked.ids
        elif not link.startswith("https://arxiv.org/"):
            assert (path.parent / link).resolve().exists(), link


def test_it_needs_no_network(folders):
    text = page.build(*folders, EXPERIMENTS).read_text()
    fetched = re.findall(r'(?:src|@import|url\()\s*=?\s*"?([^")\s]+)', text)
    assert fetched and not [source for source in fetched if "//" in source]
    assert "<link" not in text


def test_it_shows_figures_verdicts_machines_and_all_claims(folders):
    text = page.build(*folders, EXPERIMENTS).read_text()
    for part in (
        "Sums &amp; shares",
        "Fig. 1: &lt;weights&gt; and K/V.",
        "modelled · a100-2023 · scale smoke",
        "a &lt; b &amp; c",
        "3.1 … 3.4",
        "&lt;CPU&gt;",
        "0123456789 + changes",
        "numpy 2.4",
        "H200",
        "<b>1</b> reproduced",
        f"<b>{len(claims.load()) - 1}</b> not run",
    ):
        assert part in text, part
    assert "a < b" not in text and "<CPU>" not in text
    assert text.count('<tr id="claim-') == len(claims.load())


def test_kept_figures_need_no_results(folders):
    shutil.rmtree(folders[1])
    text = page.build(*folders, EXPERIMENTS).read_text()
    Checked(text)
    for part in ("Sums &amp; shares", "modelled · a100-2023 · scale smoke", "&lt;CPU&gt;, 2 cores"):
        assert part in text, part


def test_an_experiment_without_a_description_goes_by_its_name(folders):
    text = page.build(*folders, {}).read_text()
    assert "<h3>fig01_memory</h3>" in text and 'alt="fig01_memory"' in text


def test_notebooks_are_linked_only_where_they_exist(folders):
    figures, results = folders
    assert '"../results/fig01_memory/fig01_memory.ipynb"' in page.build(*folders, EXPERIMENTS).read_text()
    (results / "fig01_memory" / "fig01_memory.ipynb").unlink()
    text = page.build(*folders, EXPERIMENTS).read_text()
    assert "../results/fig01_memory" not in text and '"../notebooks/fig01_memory.ipynb"' in text


def test_equal_inputs_give_equal_bytes(folders):
    first = page.build(*folders, EXPERIMENTS).read_bytes()
    assert page.build(*folders, EXPERIMENTS).read_bytes() == first


def test_figures_of_nobody_are_shown_as_such(folders):
    (folders[0] / "stray.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folders[0] / "stray.png").write_bytes(b"")
    text = page.build(*folders, EXPERIMENTS).read_text()
    Checked(text)
    assert "Other figures" in text and "no provenance" in text


def test_an_empty_checkout_has_a_page_too(tmp_path):
    text = page.build(tmp_path / "figures", tmp_path / "results", {}).read_text()
    Checked(text)
    assert "make reproduce" in text and f"<b>{len(claims.load())}</b> not run" in text
