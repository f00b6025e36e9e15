"""One thread that steps an engine for as long as it has work; all others hand it what to do between two iterations."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from repro.engine.loop import Engine
from repro.errors import UserError


class EngineEnded(UserError):
    """Nothing more runs here."""


class Driver:
    """`open_engine` gives the engine; its context is entered and left in the thread. `after_step` is called after each
    iteration, `at_end` once, when nothing more will run, with the error that ended it or None.

    The constructor returns when the engine is there, and raises what `open_engine` raises."""

    def __init__(
        self,
        open_engine: Callable[[], AbstractContextManager[Engine]],
        after_step: Callable[[], None],
        at_end: Callable[[Exception | None], None],
    ) -> None:
        self._open_engine, self._after_step, self._at_end = open_engine, after_step, at_end
        self._changed = threading.Condition()
        self._inbox: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_closing = self._has_ended = False
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.result()

    def later(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done between two iterations; what it returns or raises. EngineEnded if the engine has."""
        done: Future[Any] = Future()
        with self._changed:
            if self._has_ended:
                raise EngineEnded("this engine has ended; begin another one")
            self._inbox.append((work, done))
            self._changed.notify()
        return done

    def call(self, work: Callable[[], Any]) -> Any:
        """The same, waited for. What runs in the engine's thread itself, a callback, does not wait: None."""
        done = self.later(work)
        return None if threading.current_thread() is self._thread else done.result()

    def close(self) -> None:
        """End after the present iteration, and what has been handed in before."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        failure = None
        try:
            with self._open_engine() as engine:
                self._ready.set_result(None)
                self._loop(engine)
        except Exception as error:  # noqa: BLE001 - all that wait must hear of it
            failure = error
        with self._changed:
            self._has_ended = True
            inbox, self._inbox = self._inbox, []
        self._at_end(failure)
        for _, done in inbox:
            if done.set_running_or_notify_cancel():
                done.set_exception(failure or EngineEnded("this engine has ended; begin another one"))
        if not self._ready.done():
            self._ready.set_exception(failure)

    def _loop(self, engine: Engine) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or engine.scheduler.has_work or self._is_closing)
                inbox, self._inbox = self._inbox, []
            for work, done in inbox:
                if not done.set_running_or_notify_cancel():  # whoever asked has gone meanwhile
                    continue
                try:
                    done.set_result(work())
                except Exception as error:  # noqa: BLE001 - it belongs to the caller
                    done.set_exception(error)
            if self._is_closing:
                return
            if engine.scheduler.has_work:
                engine.step()
            self._after_step()
