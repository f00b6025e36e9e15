"""The recording of a benchmark: a file of rows and a manifest, side by side in one folder.

The rows file is all the state there is. It is written whole after every point, and a point whose rows it has, from the
same code, is not measured again. Nothing that was ever measured is removed from it."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from repro.errors import UserError
from repro.hashing import pretty_json, read_json, write_atomically

Row = dict[str, Any]


class Recording:
    """`name`.csv and manifest.json in `folder`: rows are text, in the order of measurement; `code` is the hash of what
    measures. Rows of other code do not count, unless it is named in `also`. UserError if the file holds others."""

    def __init__(self, folder: Path, name: str, code: str, also: Collection[str] = ()) -> None:
        self.folder, self.path, self.code = folder, folder / f"{name}.csv", code
        self._counting = {code, *also}
        self.all: list[Row] = []
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.all = list(reader)
            if not {"key", "code"} <= set(reader.fieldnames or ()) or any(None in row for row in self.all):
                raise UserError(f"{self.path} does not hold rows of this program; name another folder, or move it away")

    @property
    def rows(self) -> list[Row]:
        """Those that count."""
        return [row for row in self.all if row["code"] in self._counting]

    def of(self, key: str) -> list[Row]:
        """The rows of the newest measurement of a point."""
        found = [row for row in self.rows if row["key"] == key]
        return [row for row in found if row["code"] == found[-1]["code"]]

    def find(self, key: str) -> Row | None:
        """The first of them, None if there is none."""
        return next(iter(self.of(key)), None)

    def add(self, key: str, rows: Iterable[Row], setting: Row | None = None) -> None:
        self.all += [{"key": key, "code": self.code, **row, **(setting or {})} for row in rows]
        text = io.StringIO()
        columns = dict.fromkeys(name for row in self.all for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.all)
        write_atomically(self.path, text.getvalue().encode())

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write the manifest of a call that begins; `earlier_parts` are those of earlier calls, if there are rows."""
        earlier = read_manifest(self.folder)
        parts = {"earlier_parts": [*earlier.pop("earlier_parts", []), earlier]} if self.all else {}
        self._manifest = {**about, **parts}
        self.end({}, points_left_out=None)

    def end(self, about: Mapping[str, Any], points_left_out: int | None) -> None:
        """Complete the manifest of the call."""
        manifest = {**self._manifest, **about, "points_left_out": points_left_out}
        write_atomically(self.folder / "manifest.json", pretty_json(manifest))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a recording, empty if there is none. Its `points_left_out` is None if the call did not end."""
    return read_json(folder / "manifest.json")
