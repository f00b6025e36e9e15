"""The page: complete, self-contained, escaped, and a function of its inputs alone."""

import json
import re
import shutil
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from matplotlib.figure import Figure

from repro.errors import UserError
from repro.report import claims, embedding, page
from repro.report.claims import Judgement
from repro.report.page import Description

VOID = {"meta", "img", "input", "br", "link", "rect"}
VIEW = {"table": "runs", "x": "rate", "y": "latency", "series": "system", "panels": ["workload"], "log": "y"}
EXPERIMENTS = {
    "fig01_memory": Description(
        "Sums: sums & shares",
        {"fig01_memory": "Fig. 1: <weights> and K/V."},
        {"rates": "req/s, <each>"},
        {"fig01_memory": VIEW},
    )
}
ROWS = """\
workload,system,rate,latency,evidence,trace_hash
alpaca,vllm,1.0,0.123456789,modelled,
</script>,mine,2.0,,modelled,
"""


class Checked(HTMLParser):
    """Collects links, ids and pictures, and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.pictures = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.pictures += [attrs] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


def check_links(path):
    """Every link and picture of a page leads to something that exists."""
    checked = Checked(path.read_text(encoding="utf-8"))
    assert len(checked.ids) == len(set(checked.ids))
    for link in checked.links:
        place, _, part = link.partition("#")
        if link.startswith(("https://arxiv.org/", "data:")):
            continue
        target = (path.parent / unquote(place)).resolve() if place else path
        assert target.exists(), link
        if part:
            ids = checked.ids if target == path else Checked(target.read_text(encoding="utf-8")).ids
            assert unquote(part).partition("?")[0] in ids, link
    return checked


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """One experiment with a figure and its rows, a verdict, a manifest, its notebook, and that rendered."""
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    figures, results = tmp_path / "figures", tmp_path / "results"
    (results / "fig01_memory").mkdir(parents=True)
    for folder in (tmp_path / "notebooks", figures / "notebooks"):
        folder.mkdir(parents=True)
    (tmp_path / "notebooks" / "fig01_memory.ipynb").write_text("{}")
    (figures / "notebooks" / "fig01_memory.html").write_text("")
    judgement = Judgement("waste-under-4-percent", 3.2, "replayed", [3.1, 3.4], "a < b & c")
    claims.record([judgement], "fig01_memory", figures)
    figure = Figure(figsize=(6, 3))
    figure.subplots().plot([1, 2])
    about = {"experiment": "fig01_memory", "evidence": ["modelled"], "devices": ["a100-2023"], "scale": "smoke"}
    for file_format in embedding.FIGURE_FORMATS:
        (figures / f"fig01_memory.{file_format}").write_bytes(embedding.figure_bytes(figure, file_format, about))
    (figures / "fig01_memory.runs.csv").write_text(ROWS)
    beside = {
        "rows_hash": "0123456789abcdef" * 4,
        "tables": {"runs": {"file": "fig01_memory.runs.csv", "rows": 2}},
        "parameters": {"rates": [1.0, 2.0]},
    }
    (figures / "fig01_memory.json").write_text(json.dumps(about | beside))
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
    later = machine | {"utc": "2026-01-02T04:04:05+00:00"}
    made = {"points": 16, "seconds_of_computing": 1.5, "computed_by": [machine, later]}
    (figures / "machines.json").write_text(json.dumps({"fig01_memory": made}))
    return figures, results


def test_every_link_of_the_page_leads_somewhere(folders):
    checked = check_links(page.build(*folders, EXPERIMENTS))
    assert {"fig01_memory", "figure-fig01_memory", "claim-waste-under-4-percent", "ledger"} <= set(checked.ids)
    assert {"../notebooks/fig01_memory.ipynb", "notebooks/fig01_memory.html", "fig01_memory.runs.csv"} <= set(
        checked.links
    )
    assert "#ledger?verdict=not%20run" in checked.links


def test_it_needs_no_network(folders):
    text = page.build(*folders, EXPERIMENTS).read_text()
    fetched = re.findall(r'(?:src|@import|url\()\s*=?\s*"?([^")\s]+)', text)
    assert fetched and not [source for source in fetched if "//" in source]
    assert re.findall(r"https?://[^\"'\s)]*", text) == [
        "https://arxiv.org/abs/2309.06180",
        "http://www.w3.org/2000/svg",
    ]


def test_it_shows_figures_verdicts_machines_and_all_claims(folders):
    text = page.build(*folders, EXPERIMENTS).read_text()
    for part in (
        "Sums: sums &amp; shares",
        ">Sums</a>",
        "Fig. 1: &lt;weights&gt; and K/V.",
        "modelled · a100-2023 · scale smoke",
        "<td>[1.0, 2.0]</td><td>req/s, &lt;each&gt;</td>",
        "python -m repro verify fig01_memory",
        "a &lt; b &amp; c",
        "3.10 … 3.40",
        "&lt;CPU&gt;",
        "0123456789 + changes",
        "numpy 2.4",
        "H200",
        "<b>1</b> reproduced",
        f"<b>{len(claims.load()) - 1}</b> not run",
    ):
        assert part in text, part
    assert "a < b" not in text and "<CPU>" not in text
    assert text.count("&lt;CPU&gt;") == 1  # two runs on one machine: one line
    assert text.count('<tbody id="claim-') == len(claims.load())


def test_pictures_have_their_sizes_before_they_are_loaded(folders):
    pictures = Checked(page.build(*folders, EXPERIMENTS).read_text()).pictures
    assert [(one["width"], one["height"], one["loading"]) for one in pictures] == [("576", "288", "lazy")]


def test_kept_figures_need_no_results(folders):
    shutil.rmtree(folders[1])
    text = page.build(*folders, EXPERIMENTS).read_text()
    Checked(text)
    for part in ("Sums: sums &amp; shares", "modelled · a100-2023 · scale smoke", "&lt;CPU&gt;, 2 cores"):
        assert part in text, part


def test_an_experiment_without_a_description_goes_by_its_name(folders):
    text = page.build(*folders, {}).read_text()
    assert "<h3>fig01_memory</h3>" in text and 'alt="fig01_memory"' in text and ">Fig01 memory</a>" in text


def test_what_does_not_exist_is_not_linked(folders):
    figures = folders[0]
    (figures / "notebooks" / "fig01_memory.html").unlink()
    (figures / "fig01_memory.runs.csv").unlink()
    checked = check_links(page.build(*folders, EXPERIMENTS))
    assert not [link for link in checked.links if link.endswith((".csv", "notebooks/fig01_memory.html"))]
    assert "../notebooks/fig01_memory.ipynb" in checked.links


def test_a_closer_look_shows_the_rows_of_the_file(folders):
    text = page.build(*folders, EXPERIMENTS).read_text()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text)[1])
    assert data["columns"] == {
        "workload": {"texts": ["alpaca"], "at": [0]},
        "system": {"texts": ["vllm"], "at": [0]},
        "rate": [1.0],
        "latency": [0.123457],
        "evidence": {"texts": ["modelled"], "at": [0]},
    }
    assert data["labels"] == {"vllm": "vLLM"} and data["colors"]["vllm"].startswith("#")
    assert data["panels"] == ["workload"] and data["log"] == "y"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": "height"}, "runs.csv has no column 'height'.*it has workload, system"),
        ({"log": "z"}, "log = 'z' must be x, y or xy"),
        ({"colour": "red"}, "views: fig01_memory: .*'colour'.*table, x, y, series"),
    ],
)
def test_a_view_that_cannot_be_is_refused(folders, changed, message):
    described = Description("A title", {}, {}, {"fig01_memory": VIEW | changed})
    with pytest.raises(UserError, match=message):
        page.build(*folders, {"fig01_memory": described})


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
    assert "make reproduce" in text and f"<b>{len(claims.load())}</b> not run" in text and 'id="findings"' not in text
