"""Background threads have a lower priority than the thread that starts them, and only they."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from shoal.actors.background import NICENESS, yield_to_training


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_only_the_thread_that_yields_is_nicer():
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def run() -> None:
        yield_to_training()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert found == [min(19, before + NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
