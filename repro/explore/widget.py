"""The explorer as a widget of a notebook: the page's own controls and maps, over runs of the kernel.

The front end asks for runs by their settings, as it asks the page's interpreter, and gets what `answer` says. Needs
anywidget; made by `repro.explorer`."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

import anywidget
import pandas as pd
import traitlets

from repro.explore import page, queue, rules
from repro.explore.run import answer
from repro.explore.settings import Settings
from repro.hashing import sha256_json

#: a run that takes longer is given up: a rule of the reader's may not end
SECONDS = 30.0


class Explorer(anywidget.AnyWidget):
    """`policies` are a notebook's functions by rule, `differs` the settings that it begins with, `shown` the cards."""

    about = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        first_fit: ModuleType,
        drawn: queue.Drawn,
        policies: rules.Policies,
        differs: dict[str, Any],
        shown: list[str],
    ) -> None:
        self._first_fit, self._drawn, self._policies = first_fit, drawn, policies
        self._made: dict[str, dict[str, Any]] = {}  # settings as JSON -> row
        controls = page.controls()
        about = controls | {
            "examples": controls["examples"] | {rule: rules.text_of(one) for rule, one in policies.items()},
            "start": {"differs": differs, "shown": shown, "said": ""},
            "runs": {},  # none comes with it: the kernel makes them all
        }
        code, names = page.sources(first_fit), [getattr(one, "__name__", "a rule") for one in policies.values()]
        markup = page.template("widget.html.j2").render(
            num_sources=len(code), sources_hash=sha256_json(code), policies=" and ".join(names)
        )
        style = page.template("widget.css.j2").render()
        self._esm = page.template("widget.js.j2").render(style=style, controls=markup)
        super().__init__(about=about)
        self.on_msg(self._hear)

    def __repr__(self) -> str:
        return f"the explorer; runs so far: {len(self._made)}"

    def to_frame(self) -> pd.DataFrame:
        """The runs so far, a line each: what differs in their settings, and their counters."""
        return pd.DataFrame(list(self._made.values()))

    def _hear(self, _: object, content: dict[str, Any], buffers: object) -> None:
        self.send({"key": content["key"], **self.run(content["key"])})

    def run(self, settings: str) -> dict[str, str]:
        """The run of these settings as JSON: its result as {"text": JSON}, or why there is none as {"failure": ...}."""
        try:
            with bounded(SECONDS):
                text = answer(settings, self._first_fit.FirstFitAllocator, self._drawn, self._policies)
        except TooLong:
            return {"text": json.dumps({"error": f"no end after {SECONDS:.0f} s; change the rule or the settings"})}
        except (Exception, KeyboardInterrupt) as error:  # whatever it is, the front end waits for an answer
            return {"failure": f"{type(error).__name__}: {error}"}
        result = json.loads(text)
        if "counters" in result:
            usual = asdict(Settings())
            differs = {name: value for name, value in result["settings"].items() if value != usual[name]}
            self._made[settings] = {"policy": result["settings"]["policy"], **differs, **result["counters"]}
        return {"text": text}


class TooLong(BaseException):
    """A run is given up. No Exception, so that a rule does not catch it by chance."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """TooLong in the thread that is here, in whatever Python code it is then, if this takes longer. A notebook may hear
    its widgets in another thread than the main one, where no signal comes."""
    thread, done, lock = threading.get_ident(), False, threading.Lock()

    def stop() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TooLong))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()
