"""Keeps a controller's claim to its run's folder alive, and notices when another has taken over (F7)."""

from __future__ import annotations

import logging
import threading

from shoal.kernels.errors import LockLostError
from shoal.platform.run_lock import LockOwner, RunLock
from shoal.platform.run_plan import RunPlan

logger = logging.getLogger(__name__)

#: A controller that is silent for this long may be taken over by one of another cluster. Seconds.
LEASE_S = 15.0


class RunGuard:
    """The lock of the run's folder, renewed by a thread of its own."""

    def __init__(self, plan: RunPlan, cluster: str) -> None:
        #: Set once another controller has the run.
        self.lost: LockLostError | None = None
        self._run = plan.name
        self._lock = RunLock(plan.storage, LockOwner.here(cluster), LEASE_S, token=plan.token)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def incarnation(self) -> int:
        return self._lock.incarnation

    def acquire(self) -> None:
        """Take the folder; raises LockHeldError, naming who has it, and LockLostError."""
        self._lock.acquire()
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder back, unless another has it."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(LEASE_S)
        if self.lost is None:
            self._lock.release()

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            try:
                self._lock.renew()
            except LockLostError as error:
                self.lost = error
                return
            except Exception as error:  # while nobody can write, nobody can take over
                logger.warning("run=%s lock=%s", self._run, error)
