"""How long the two memory maps of a what-if take to be drawn again while one scrubs, in headless Chromium.

    python tests/map_redraw.py

500 blocks, some 5,000 iterations, a window of 1,400 by 1,600 pixels. The time that passes suffers from whoever else
uses the cores; the processor time of the page's thread does not."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from browser import new_tab, running

import repro

STEPS = 100
SCRUB = """(() => {
  const times = [], slider = document.querySelector("input[name=step]"), span = document.querySelector("[name=span]");
  span.value = "%s";
  span.dispatchEvent(new Event("change"));
  for (let step = 0; step < %d; step++) {
    slider.value = Math.floor((step * 1037.7) %% Number(slider.max));
    const began = performance.now();
    slider.dispatchEvent(new Event("input"));
    document.body.offsetHeight;
    times.push(performance.now() - began);
  }
  return times.sort((one, other) => one - other);
})()"""


def main() -> None:
    paper = repro.DEPLOYMENTS["opt-13b"]
    trace = repro.make_trace("sharegpt", rate=1.2, duration_s=150, seed=0)
    parted = repro.what_if(repro.serve("vllm", replace(paper, kv_slots=500 * 16), trace), preemption="swap")
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as address, new_tab(address) as tab:
        tab.look(1400, 1600)
        tab.send("Performance.enable", timeDomain="threadTicks")
        tab.open(parted.save(Path(folder) / "pair.html").as_uri())
        tab.wait_for("document.body.dataset.state === 'settled'")
        print(f"two maps of {parted.maps[0].num_blocks} blocks x {len(parted.maps[0]):,} iterations")
        for span in ("0", "2000", "500"):
            before = _processor_s(tab)
            times = tab.evaluate(SCRUB % (span, STEPS))
            spent = 1000 * (_processor_s(tab) - before) / STEPS
            shown = f"{int(span):,} iterations shown" if span != "0" else "the whole run shown"
            print(f"{shown}: {times[STEPS // 2]:.1f} ms in the median, {spent:.1f} ms of processor time")


def _processor_s(tab: object) -> float:
    return next(one["value"] for one in tab.send("Performance.getMetrics")["metrics"] if one["name"] == "TaskDuration")


if __name__ == "__main__":
    main()
