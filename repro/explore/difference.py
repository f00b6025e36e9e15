"""Two runs of the same arrivals: where they part, what differs from there on, and what it costs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from repro.engine.events import Event
from repro.errors import UserError
from repro.explore.decision import told
from repro.feed.receipt import CAUSES, Receipt
from repro.hashing import write_atomically
from repro.history import map_page
from repro.history.memory_map import MemoryMap
from repro.history.pages import framed, table
from repro.history.recipe import Recipe, decisions
from repro.words import count

if TYPE_CHECKING:
    import pandas as pd

#: what a request costs, and in which unit; `t` is the unit of time
_COSTS = {
    "latency": "t",
    "normalized_latency": "t/token",
    "preemptions": "",
    "tokens_recomputed": "tokens",
    "blocks_swapped_out": "blocks",
    "blocks_swapped_in": "blocks",
    "blocks_copied": "blocks",
}
#: what all of them together cost; latencies are means, the others above are sums
_IN_ALL = {"iterations": "", "duration": "t", "throughput": "tokens/t"}
_COLUMNS = ("before", "after", "difference")
#: the kinds of events that say how many blocks have moved
_MOVES = {"blocks_swapped_out": "preempt", "blocks_swapped_in": "resume", "blocks_copied": "copy"}


@dataclass(frozen=True, repr=False)
class History:
    """What was decided; of the requests that came to their end, when that was (by the run's clock), and the receipt.
    `recipe` has when they joined, and how long their outputs are."""

    recipe: Recipe
    events: list[Event]
    ends: dict[int, float]
    receipts: dict[int, Receipt]
    num_iterations: int

    @functools.cached_property
    def decisions(self) -> list[Event]:
        return decisions(self.events)

    @functools.cached_property
    def by_request(self) -> dict[int, list[Event]]:
        """The decisions about each request."""
        found: dict[int, list[Event]] = {}
        for event in self.decisions:
            found.setdefault(event.request_id, []).append(event)
        return found

    def costs(self, number: int) -> dict[str, float]:
        """Of a request that came to its end."""
        receipt, latency = self.receipts[number], self.ends[number] - self.recipe.joined[number]
        found = {
            "latency": latency,
            "normalized_latency": latency / max(self.recipe.lengths_of(number)),
            "preemptions": receipt.num_preemptions,
            "tokens_recomputed": receipt.recomputed_tokens,
        }
        moved = [event for event in self.by_request[number] if event.detail.get("mode") != "recompute"]
        for name, kind in _MOVES.items():
            found[name] = sum(event.detail["blocks"] for event in moved if event.kind == kind)
        return found

    def totals(self, numbers: Items[int]) -> dict[str, float]:
        """Of several."""
        rows = [self.costs(number) for number in numbers]
        begin = min(self.recipe.joined[number] for number in numbers)
        lasted = max(self.ends[number] for number in numbers) - begin
        made = sum(sum(self.recipe.lengths_of(number)) for number in numbers)
        found = {"iterations": self.num_iterations, "duration": lasted, "throughput": made / lasted}
        for name in _COSTS:
            found[name] = (fmean if name.endswith("latency") else sum)(row[name] for row in rows)
        return found


@dataclass(frozen=True)
class Parting:
    """The first decision that differs: the two events. Either is None if its run has no more."""

    before: Event | None
    after: Event | None

    @property
    def iteration(self) -> int:
        return min(event.iteration for event in (self.before, self.after) if event is not None)

    def __str__(self) -> str:
        pair = self.before, self.after
        was, now = ("nothing more" if one is None else told(one) for one in pair)
        if None not in pair and self.before.iteration == self.after.iteration:
            return f"Iteration {self.iteration:,}: {was}. Now: {now}."
        was, now = (f"{said} in iteration {one.iteration:,}" if one else said for said, one in zip((was, now), pair))
        return f"Iteration {self.iteration:,}: next was that {was}. Now it is that {now}."


@dataclass(frozen=True, repr=False)
class Difference:
    """`before` is the run as it was, `after` the one with something changed, which `what` says. Times are in seconds,
    or in iterations where no cost model says how long one takes."""

    what: str
    before: History
    after: History
    _make: tuple[Callable[[], MemoryMap], Callable[[], MemoryMap]] = field(compare=False)

    @property
    def unit(self) -> str:
        return self.before.recipe.unit

    @functools.cached_property
    def first(self) -> Parting | None:
        """The first decision that differs; None if none does."""
        pairs = zip_longest(self.before.decisions, self.after.decisions)
        return next((Parting(*pair) for pair in pairs if pair[0] != pair[1]), None)

    @functools.cached_property
    def num_decisions(self) -> dict[str, int]:
        """How many decisions are those of the first run alone, of the second alone, and of both. Two are the same if
        they are equal, and of the same iteration."""
        was, now = (Counter(map(str, one.decisions)) for one in (self.before, self.after))
        return {"before": (was - now).total(), "after": (now - was).total(), "both": (was & now).total()}

    @functools.cached_property
    def requests(self) -> list[int]:
        """The requests that were decided otherwise, or ended at another moment."""
        was, now = self.before, self.after
        return [
            number
            for number in was.recipe.joined
            if was.by_request.get(number) != now.by_request.get(number) or was.ends.get(number) != now.ends.get(number)
        ]

    @property
    def _ended(self) -> list[int]:
        """Requests that came to their end in both runs."""
        return [number for number in self.before.recipe.joined if number in self.before.ends.keys() & self.after.ends]

    def costs(self) -> list[dict[str, Any]]:
        """What it costs in all, over the requests that came to their end in both runs: a row for each quantity.

        Latencies are means, from joining to the last token; `throughput` is output tokens over `duration`, which is
        from the first one's joining to the last one's end."""
        if not self._ended:
            return []
        was, now = (one.totals(self._ended) for one in (self.before, self.after))
        return [
            {
                "cost": name,
                "unit": self._unit(unit),
                "before": was[name],
                "after": now[name],
                "difference": now[name] - was[name],
            }
            for name, unit in (_IN_ALL | _COSTS).items()
        ]

    def _unit(self, unit: str) -> str:
        return {"t": self.unit, "t/token": f"{self.unit}/token", "tokens/t": f"tokens/{self.unit}"}.get(unit, unit)

    def rows(self) -> list[dict[str, Any]]:
        """The same of each request that came to its end in both runs; where times are seconds, also how many more of
        them each cause of its latency has (`repro.feed.receipt`)."""
        rows = []
        for number in self._ended:
            was, now = self.before.costs(number), self.after.costs(number)
            row: dict[str, Any] = {"request_id": number, "joined": self.before.recipe.joined[number]}
            for name in _COSTS:
                row |= {
                    f"{name}_before": was[name],
                    f"{name}_after": now[name],
                    f"{name}_difference": now[name] - was[name],
                }
            if not self.before.recipe.in_iterations:
                causes = (one.receipts[number].causes for one in (self.before, self.after))
                charged, charges = causes
                row |= {f"{cause}_difference": charges[cause] - charged[cause] for cause in CAUSES}
            rows.append(row)
        return rows

    def to_frame(self) -> pd.DataFrame:
        """`rows` by request, as a table of pandas; `pandas.DataFrame(difference.costs())` has the costs in all."""
        import pandas as pd

        return pd.DataFrame(self.rows()).set_index("request_id") if self._ended else pd.DataFrame()

    @functools.cached_property
    def maps(self) -> tuple[MemoryMap, MemoryMap]:
        """Who held which block, before and after. Both runs are made once more, watched."""
        before, after = self._make
        return before(), after()

    def html(self) -> str:
        """A page of its own, without a network: both memory maps, one above the other, what parts them, the costs.
        UserError if there was no request."""
        if not self.before.events:
            raise UserError("nothing has run, so there is nothing to be seen")
        shown = [[self._named(row), *(f"{row[name]:,.5g}" for name in _COLUMNS)] for row in self.costs()]
        parting = None if self.first is None else self.first.iteration
        return map_page.render_pair(
            *self.maps,
            parting,
            heading=f"What if {self.what}?",
            said="\n".join(self.sentences()[:2]).partition("? ")[2],
            what=self.what,
            costs=table(shown, ["", *_COLUMNS]),
        )

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page into a file."""
        write_atomically(Path(path), self.html().encode())
        return Path(path)

    def _repr_html_(self) -> str:
        return framed(self.html(), "two memory maps", 1250)

    @staticmethod
    def _named(row: dict[str, Any]) -> str:
        name, unit = row["cost"].replace("_", " "), row["unit"]
        return name if not unit or unit in name else f"{name}, {unit}"

    def __repr__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """What parts the two runs, what differs, and what it costs, a line each."""
        if self.first is None:
            return [
                f"What if {self.what}? Every decision is the same" + ("." if self.requests else ", and every time.")
            ]
        number, whole = self.num_decisions, count(len(self.before.recipe.joined), "request")
        lines = [
            f"What if {self.what}? {self.first}",
            f"After that {count(number['after'], 'decision')} are new, {number['before']:,} are no more. "
            f"Of {whole}, {len(self.requests):,} are decided or end otherwise.",
        ]
        for row in self.costs():
            if row["difference"]:
                name, unit = row["cost"].replace("_", " "), f" {row['unit']}".rstrip()
                lines.append(f"{name}: {row['before']:,.4g} -> {row['after']:,.4g}{unit} ({row['difference']:+,.4g})")
        return lines
