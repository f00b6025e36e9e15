"""What the paper's own figures show, so that every figure of ours can lay the paper's points beside it.

The numbers were read off the vector graphics of arXiv:2309.06180's PDF, each panel calibrated on its own tick marks
(residual under 0.001 of the axis); nothing here was measured by us. A point is [x, y]. A third item, "off", marks where
a line leaves the top of its plot: that is a place on the drawn line, not a measured point. Systems carry our ids.

What is kept: table1 (as printed), fig1 (GB and token/s against the batch), fig2 (% of the KV cache), fig12, fig14,
fig16, fig17 (normalized latency in s/token against the request rate in req/s, by panel and system), fig18a (us against
the context length), fig18b and fig19b (s/token against the block size), fig19a (ms against the block size). Fig. 11's
histograms belong to `repro.workloads`."""

import json
from copy import deepcopy
from functools import cache, reduce
from importlib import resources
from operator import getitem
from typing import Any

Point = tuple[float, float]


@cache
def _curves() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath("curves.json").read_text(encoding="utf-8"))


def figure(name: str) -> dict[str, Any]:
    """A copy of the figure's data, e.g. ``figure("fig12")["opt-13b/sharegpt"]["vllm"]``; KeyError if it is not kept."""
    return deepcopy(_curves()[name])


def line(name: str, *path: str) -> list[Point]:
    """Every vertex of one drawn line, the exit through the top of the plot included."""
    return [(point[0], point[1]) for point in reduce(getitem, path, _curves()[name])]


def points(name: str, *path: str) -> list[Point]:
    """The measured points of one drawn line: `line` without the places where it leaves the plot."""
    return [(point[0], point[1]) for point in reduce(getitem, path, _curves()[name]) if "off" not in point[2:]]


def crossing(vertices: list[Point], level: float) -> float | None:
    """x where the line first rises through `level`, interpolated linearly between vertices; None if it never does.

    Interpolating between coarse points reads a convex curve up to 6 % early: compare like with like."""
    for (x0, y0), (x1, y1) in zip(vertices, vertices[1:]):
        if y0 < level <= y1:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def crossings(name: str, level: float = 0.5) -> dict[str, dict[str, float | None]]:
    """panel -> system -> request rate (req/s) at which the drawn latency curve reaches `level` s/token."""
    return {
        panel: {system: crossing(line(name, panel, system), level) for system in systems}
        for panel, systems in _curves()[name].items()
    }
