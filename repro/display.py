"""Rows as HTML for notebooks, for every `_repr_html_` that shows a table: escaped, and bounded in size. Colours are
those of the page that the table stands on."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from numbers import Real

#: rows of a table that are shown; of a longer one the first and the last
MOST = 20
#: characters of a cell
LONGEST = 160

Row = Mapping[str, object]


def table(caption: str, rows: Sequence[Row], most: int = MOST) -> str:
    """Rows of a table under its caption, which may have several lines. Columns are those of all rows shown."""
    return indexed(caption, len(rows), rows.__getitem__, most)


def indexed(caption: str, count: int, row: Callable[[int], Row], most: int = MOST) -> str:
    """The same for rows that are made when they are shown."""
    left_out = count - most if count > most else 0
    head = range(count if not left_out else most - most // 2)
    shown = [row(number) for number in (*head, *range(len(head) + left_out, count))]
    columns = list(dict.fromkeys(name for one in shown for name in one))
    lines = [_line(one.get(name) for name in columns) for one in shown]
    if left_out:
        lines.insert(len(head), f'<tr><td colspan="{len(columns)}">… {left_out:,} more …</td></tr>')
    heads = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    body = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>" if shown else ""
    return f"<div><p>{'<br>'.join(escape(caption).splitlines())}</p>{body}</div>"


def fields(caption: str, values: Row) -> str:
    """One thing: its fields, a line each."""
    return table(caption, [{"field": name.replace("_", " "), "value": value} for name, value in values.items()], 100)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order, with those that count up as one: 7 8 9 3 is 7-9, 3."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _line(values: Iterator[object]) -> str:
    cells = []
    for value in values:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        side = "" if is_number else ' style="text-align: left"'
        cells.append(f"<td{side}>{escape(_text(value))}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _text(value: object) -> str:
    """A value as people read it: a number, a name, or text of one line that is not too long."""
    if value is None or (isinstance(value, Real) and value != value):  # nothing, or not a number
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, enum.Enum):
        value = value.value
    text = str(getattr(value, "__name__", value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
