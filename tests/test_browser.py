"""The browser of the tests sees what a page shows and complains of."""

from pathlib import Path

from browser import Tab

PAGE = """<!doctype html><html lang="en"><title>A page</title><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><body>
<button onclick="this.textContent = 'pressed'">press</button><input autofocus>
{}</body></html>"""


def page(folder: Path, body: str) -> str:
    path = folder / "page ü.html"
    path.write_text(PAGE.format(body), encoding="utf-8")
    return path.as_uri()


def test_a_page_is_opened_and_used(tab: Tab, tmp_path: Path) -> None:
    tab.look(width=400, height=800, dark=True)
    tab.open(page(tmp_path, ""))
    tab.click("button")
    tab.click("input")
    tab.type("words")
    assert tab.evaluate("[document.title, document.querySelector('button').textContent]") == ["A page", "pressed"]
    assert tab.evaluate("document.querySelector('input').value") == "words"
    assert tab.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [400, True]
    tab.look(media="print")
    assert tab.evaluate("[innerWidth, matchMedia('print').matches]") == [1400, True]
    tab.screenshot(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")
    assert tab.complaints == []


def test_what_a_page_complains_of_is_collected(tab: Tab, tmp_path: Path) -> None:
    said = "<script>console.warn('beware'); console.log('fine'); setTimeout(() => missing())</script>"
    tab.open(page(tmp_path, said + "<img src='absent.png'>"))
    tab.wait_for("true")
    text = "\n".join(tab.complaints)
    assert "console warning: beware" in text and "missing is not defined" in text and "absent.png" in text
    assert len(tab.complaints) == 3
