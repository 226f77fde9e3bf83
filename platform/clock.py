"""Time, for what runs a control plane; decisions take ``now_s`` as a value and never look here."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A clock that only rises, and a wait that can be cut short."""

    def now_s(self) -> float: ...
    def wait(self, woken: threading.Event, timeout_s: float) -> None: ...


class SystemClock:
    """The machine's own monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def wait(self, woken: threading.Event, timeout_s: float) -> None:
        """Return after ``timeout_s``, or soon after ``woken`` is set."""
        woken.wait(timeout_s)
