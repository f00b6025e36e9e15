"""What a reader does in the checkout is not what git keeps, and a checkout without git is taken as it lies."""

import os
import subprocess
from pathlib import Path

from committed import committed


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_a_readers_changes_and_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "README.md").write_text("ours")
    (tmp_path / "notebooks" / "ours ü.ipynb").write_text("{}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "kept")
    (tmp_path / "notebooks" / "ours ü.ipynb").write_text("outputs")
    (tmp_path / "notebooks" / "mine.ipynb").write_text("no notebook")
    (tmp_path / "README.md").unlink()
    kept = committed(tmp_path)
    assert {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*") if path.is_file()} == {
        "README.md": "ours",
        os.path.join("notebooks", "ours ü.ipynb"): "{}",
    }


def test_without_git_all_files_count(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("text")
    (tmp_path / "other").write_text("not looked at")
    monkeypatch.setenv("PATH", "")
    assert [path.name for path in committed(tmp_path).rglob("*") if path.is_file()] == ["page.md"]
