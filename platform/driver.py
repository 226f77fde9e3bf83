"""The driver's end of a run: it watches the controller, shows what it tells, and passes on the user's wish to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shoal.kernels.errors import ClusterError
from shoal.platform.run_plan import RunReport
from shoal.platform.state_messages import RunPhase


class ControllerClient(Protocol):
    """The Controller as the driver sees it."""

    def report(self, cursor: int) -> RunReport: ...
    def stop(self, reason: str) -> None: ...


def watch(client: ControllerClient, on_item: Callable[[Any], None], *, poll_interval_s: float = 0.25) -> RunReport:
    """The driver's loop: hand every item of the run to ``on_item`` until it is over.

    Ctrl-C or SIGTERM once asks for an orderly end (the step in progress, a checkpoint); twice raises KeyboardInterrupt.
    """
    cursor = 0
    with _stop_signals() as signals:
        asked = False
        while True:
            report = client.report(cursor)
            cursor = report.cursor
            for item in report.items:
                on_item(item)
            if report.phase.is_over:
                return report
            if signals and not asked:
                asked = True
                on_item(("stopping", {"reason": signals[0], "hint": "once more to end now"}))
                client.stop(signals[0])
            if len(signals) > 1:
                raise KeyboardInterrupt
            time.sleep(poll_interval_s)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """The names of SIGINT and SIGTERM received inside, in order. Outside the main thread: none."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: Any) -> None:
        received.append(signal.Signals(number).name)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_failure(report: RunReport, failure: BaseException | None) -> None:
    """Raise what ended a failed run."""
    if report.phase is RunPhase.FAILED:
        raise failure if failure is not None else ClusterError(report.reason)
