"""Background: threads that yield the processor to the training thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

#: Added to the niceness of a thread that keeps copies current: a third of a training thread's share where cores are
#: short, so that it runs in the idle times of steps and still comes to an end where there are none.
NICENESS = 5


def yield_to_training() -> None:
    """Lower the priority of the calling thread, where the system has one per thread (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
