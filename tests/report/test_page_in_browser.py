"""The page of the committed figures, as a reader of a fresh clone has it: links, and what happens in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from browser import Tab
from test_page import check_links

from repro.cli import main
from repro.harness.experiment import parameter_file
from repro.setup.environment import ROOT


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files that the page needs or links, without results, and the page built there."""
    folder = tmp_path_factory.mktemp("clone")
    needed = ("figures", "notebooks", "experiments", "docs", "README.md")
    listed = subprocess.run(["git", "ls-files", "-z", *needed], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    for path in files or [path.relative_to(ROOT) for name in needed for path in (ROOT / name).rglob("*.*")]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    with pytest.MonkeyPatch.context() as changed:
        for name in ("REPRO_RESULTS_DIR", "REPRO_FIGURES_DIR", "REPRO_VARIANT"):
            changed.delenv(name, raising=False)
        changed.setenv("REPRO_ROOT", str(folder))
        assert main(["page"]) == 0
    return folder / "figures"


@pytest.fixture
def page(clone: Path, tab: Tab) -> Tab:
    tab.open((clone / "index.html").as_uri())
    return tab


def test_every_link_and_picture_is_in_a_clone(clone: Path) -> None:
    pages = [clone / "index.html", *sorted((clone / "notebooks").glob("*.html"))]
    checked = [check_links(path) for path in pages]
    assert len(checked[0].pictures) == len(list(clone.glob("*.svg"))) > 30
    assert all({"width", "height"} <= set(picture) for picture in checked[0].pictures)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_it_opens_without_a_complaint_and_fits_the_window(clone: Path, tab: Tab, width: int, dark: bool) -> None:
    tab.look(width=width, height=800, dark=dark)
    for path in [clone / "index.html", *sorted((clone / "notebooks").glob("*.html"))]:
        tab.open(path.as_uri())
        assert tab.complaints == [], path
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path


@pytest.mark.parametrize("width", [1400, 400])
def test_nothing_moves_while_pictures_arrive(clone: Path, tab: Tab, width: int) -> None:
    tab.look(width=width, height=800)
    tab.open((clone / "index.html").as_uri())
    places = (
        "[...document.querySelectorAll('h2, h3, figcaption')].map((one) => one.getBoundingClientRect().top + scrollY)"
    )
    before = tab.evaluate(places)
    all_loaded = """(async () => {
      for (const picture of document.images) { picture.loading = "eager"; await picture.decode(); }
      return [...document.images].every((picture) => picture.naturalWidth > 0);
    })()"""
    assert tab.evaluate(all_loaded)
    assert max(abs(a - b) for a, b in zip(before, tab.evaluate(places), strict=True)) < 5


ARRIVALS = """(async () => {
  const missed = [], go = (hash) => new Promise((done) => {
    addEventListener("hashchange", () => setTimeout(done), { once: true });
    location.hash = hash;
  });
  const links = new Map([...document.querySelectorAll("a[href^='#']")].reverse().map((link) => [link.hash, link]));
  for (const link of links.values()) {
    await go(link.hash);
    const [place, query] = decodeURIComponent(link.hash.slice(1)).split("?");
    const box = document.getElementById(place).getBoundingClientRect();
    const farthest = innerHeight + scrollY + 1 >= document.documentElement.scrollHeight;
    const arrived = box.height && box.top >= -1 && box.top < (farthest ? innerHeight : 80);
    if (!arrived) missed.push([link.hash, box.top, box.height]);
    const shown = document.querySelectorAll(".ledger > tbody:not([hidden])").length;
    const count = link.querySelector("b");
    if (place === "ledger" && count && Number(count.textContent) !== shown) missed.push(`${link.hash}: ${shown}`);
  }
  return missed;
})()"""


@pytest.mark.parametrize("width", [1400, 400])
def test_every_link_on_the_page_arrives_and_counts_are_right(page: Tab, width: int) -> None:
    page.look(width=width, height=800)
    assert page.evaluate(ARRIVALS) == []


def test_a_link_to_a_claim_clears_a_filter_that_hides_it(clone: Path, page: Tab) -> None:
    page.open((clone / "index.html").as_uri() + "#ledger?verdict=differs&text=sharegpt")
    shown = "[...document.querySelectorAll('.ledger > tbody:not([hidden])')].map((one) => one.dataset.verdict)"
    assert set(page.evaluate(shown)) == {"differs"} and page.evaluate("document.forms[0].text.value") == "sharegpt"
    page.evaluate("location.hash = '#claim-fig8-parallel-cow'")
    page.wait_for("document.querySelector('#claim-fig8-parallel-cow.opened.reached:not([hidden])')")
    assert page.evaluate("document.forms[0].verdict.value + document.forms[0].text.value") == ""


def test_the_filter_and_the_order_stand_in_the_address(page: Tab) -> None:
    page.click(".filters input")
    page.type("beam")
    page.click("[data-sort=apart]")
    assert page.evaluate("location.hash") == "#ledger?text=beam&sort=apart"
    apart = page.evaluate(
        "[...document.querySelectorAll('tbody[data-apart]:not([hidden])')].map((a) => +a.dataset.apart)"
    )
    assert len(apart) > 3 and apart == sorted(apart, reverse=True)
    page.click(".filters button[type=reset]")
    assert page.evaluate("location.hash") == "#ledger"
    assert page.evaluate("document.querySelectorAll('.ledger > tbody[hidden]').length") == 0


def test_a_click_shows_a_figure_large(page: Tab) -> None:
    page.click("a.zoom")
    page.wait_for("document.querySelector('dialog[open] img').naturalWidth > 0")
    page.click("dialog button")
    assert not page.evaluate("document.querySelector('dialog').open")


def test_a_closer_look_draws_the_rows_and_reads_them_out(page: Tab) -> None:
    """Every view draws marks; a point under the mouse shows its row; a series can be hidden."""
    page.evaluate("document.querySelectorAll('details.view').forEach((one) => { one.open = true; })")
    page.wait_for(
        "[...document.querySelectorAll('details.view')].every((one) => one.querySelector('circle:not(.ring)'))"
    )
    stated = [parameter_file(path.stem).views for path in (ROOT / "experiments").glob("*.yaml")]
    assert page.evaluate("document.querySelectorAll('details.view').length") == sum(map(len, stated)) > 20
    view = "#figure-fig12_basic_sampling .view"
    series = f"document.querySelectorAll('{view} polyline').length"
    before = page.evaluate(series)
    place = page.evaluate(
        f"(() => {{ const mark = document.querySelector('{view} circle'); mark.scrollIntoView({{block: 'center'}});"
        "const box = mark.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    page.wait_for(f"document.querySelector('{view} .row').textContent.includes('latency s per token')")
    page.click(f"{view} .legend input")
    assert page.evaluate(series) == before - 1
    assert page.complaints == []


def test_without_a_script_all_of_it_is_there(page: Tab, clone: Path) -> None:
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.open((clone / "index.html").as_uri())
    page.send("Emulation.setScriptExecutionDisabled", value=False)
    hidden = "[...document.querySelectorAll('.detail')].filter((one) => !one.getBoundingClientRect().height).length"
    assert page.evaluate(hidden) == 0


def test_print_shows_every_note_and_no_controls(page: Tab) -> None:
    page.look(width=800, media="print")
    hidden = "[...document.querySelectorAll('.detail')].filter((one) => !one.getBoundingClientRect().height).length"
    assert page.evaluate(hidden) == 0
    assert page.evaluate("document.querySelector('nav').getBoundingClientRect().height") == 0
    assert page.send("Page.printToPDF")["data"]
