"""Working copies of notebooks follow the project's own, and what a reader has written in one is never lost."""

import json
from pathlib import Path
from typing import Any

import pytest

from repro.setup import lab


def notebook(*sources: str, **more: Any) -> dict[str, Any]:
    cells = [{"cell_type": "code", "source": [text], "metadata": {}, "outputs": []} for text in sources]
    return {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5, **more}


class Folders:
    def __init__(self, folder: Path) -> None:
        self.originals, self.copies = folder / "notebooks", folder / "work"
        self.originals.mkdir()

    def publish(self, *sources: str) -> None:
        (self.originals / "a.ipynb").write_text(json.dumps(notebook(*sources)))

    def copy(self) -> dict[str, Any]:
        return json.loads((self.copies / "a.ipynb").read_text())

    def save(self, content: dict[str, Any]) -> None:
        (self.copies / "a.ipynb").write_text(json.dumps(content))

    def refresh(self) -> list[str]:
        return lab.refresh_copies(self.originals, self.copies)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def sources(content: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in content["cells"]]


def test_a_copy_that_was_only_run_follows_the_original(folders: Folders) -> None:
    folders.publish("1", "2")
    assert folders.refresh() == []
    copy = folders.copy()
    copy["cells"][0] |= {"outputs": [{"output_type": "stream", "text": "1"}], "execution_count": 1, "source": "1"}
    copy["cells"].append({"cell_type": "code", "source": "", "metadata": {}, "outputs": []})  # as Shift+Enter leaves
    folders.save(copy)
    assert folders.refresh() == [] and folders.copy() == copy  # nothing is newer, so the outputs stay
    folders.publish("1", "3")
    assert folders.refresh() == [] and sources(folders.copy()) == ["1", "3"]
    folders.publish("1", "4")
    assert folders.refresh() == [] and sources(folders.copy()) == ["1", "4"]


def test_a_copy_with_changes_stays_and_is_named_while_the_original_is_newer(folders: Folders) -> None:
    folders.publish("1")
    folders.refresh()
    copy = folders.copy()
    copy["cells"][0]["source"] = "my own"
    folders.save(copy)
    assert folders.refresh() == [] and folders.copy() == copy
    folders.publish("2")
    for _ in range(2):
        assert folders.refresh() == ["work/a.ipynb has changes of yours and is kept; notebooks/a.ipynb is newer"]
        assert folders.copy() == copy
    (folders.copies / "a.ipynb").rename(folders.copies / "mine.ipynb")
    assert folders.refresh() == [] and sources(folders.copy()) == ["2"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": 1}', json.dumps(notebook("other")), '{"cells": [], "metadata": 1}']
)
def test_a_file_that_is_no_copy_is_left_alone(folders: Folders, text: str) -> None:
    folders.publish("1")
    folders.copies.mkdir()
    (folders.copies / "a.ipynb").write_text(text)
    assert len(folders.refresh()) == 1
    assert (folders.copies / "a.ipynb").read_text() == text
    assert [path.name for path in folders.copies.iterdir()] == ["a.ipynb"]


def test_notebooks_in_folders_are_copied_into_folders_and_checkpoints_are_not(folders: Folders) -> None:
    for folder in ("course", "course/.ipynb_checkpoints"):
        (folders.originals / folder).mkdir()
        (folders.originals / folder / "b.ipynb").write_text(json.dumps(notebook("1")))
    assert folders.refresh() == []
    copy = folders.copies / "course" / "b.ipynb"
    assert [path for path in folders.copies.rglob("*") if path.is_file()] == [copy]
    assert sources(json.loads(copy.read_text())) == ["1"]
    copy.write_text(json.dumps(notebook("my own")))
    (folders.originals / "course" / "b.ipynb").write_text(json.dumps(notebook("2")))
    said = "work/course/b.ipynb has changes of yours and is kept; notebooks/course/b.ipynb is newer"
    assert folders.refresh() == [said]


def test_what_is_no_notebook_is_not_copied(folders: Folders) -> None:
    (folders.originals / "a.ipynb").write_text("half a no")
    assert folders.refresh() == [] and list(folders.copies.iterdir()) == []


def test_the_address_is_one_line_and_the_way_there_another() -> None:
    said = lab.address({"url": "http://localhost:8889/", "port": 8889, "token": "abc"}).splitlines()
    assert said[0] == "JupyterLab: http://localhost:8889/?token=abc"
    assert said[1].startswith("From another machine, first: ssh -N -L 8889:localhost:8889 ")
    assert lab.address({"url": "http://h:1/", "port": 1, "token": ""}).splitlines()[0] == "JupyterLab: http://h:1/"
