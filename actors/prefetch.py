"""Batches prepared ahead of the step that uses them, by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.kernels.errors import ExchangeTimeoutError

if TYPE_CHECKING:
    from shoal.kernels.batch import Batch


class Prefetcher:
    """Runs ``load(step)`` for consecutive steps in a thread, at most ``depth`` ahead of the consumer.

    An exception of ``load`` is raised by the next ``get``, with the thread's traceback, until ``restart`` clears it.
    """

    def __init__(
        self,
        load: Callable[[int], Batch],
        *,
        start_step: int,
        stop_step: int | None,
        depth: int,
        timeout_s: float,
        describe: Callable[[], str],
    ) -> None:
        self._load = load
        self._stop_step = stop_step
        self._depth = depth
        self._timeout_s = timeout_s
        self._describe = describe
        self._changed = threading.Condition()
        self._next = start_step
        # The consumer's step: batches before it are not kept, or they would fill the bound and nothing could follow.
        self._wanted = start_step
        # The step asked for last, and until when it may take.
        self._asked, self._deadline = -1, 0.0
        self._loading: int | None = None
        self._ready: dict[int, Batch] = {}
        self._error: BaseException | None = None
        self._generation = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shoal-feed", daemon=True)
        self._thread.start()

    def get(self, step: int) -> Batch:
        """The batch of a step. Raises what ``load`` raised, or ExchangeTimeoutError saying what is missing."""
        with self._changed:
            self._aim(step)
            while self._error is None and step not in self._ready:
                assert not self._is_closed, "the feed is closed"
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    raise ExchangeTimeoutError(
                        f"the feed did not deliver the batch of step {step} within {self._timeout_s:g} s: "
                        f"{self._describe()}"
                    )
                self._changed.wait(left_s)
            if self._error is not None:
                raise self._error
            batch = self._ready[step]
            self._want(step + 1)
            return batch

    def is_ready(self, step: int, timeout_s: float) -> bool:
        """Whether ``get`` of that step would return, or raise, at once; waits for it at most ``timeout_s``."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._aim(step)
            while self._error is None and step not in self._ready:
                now = time.monotonic()
                if now >= self._deadline:
                    return True
                if now >= until:
                    return False
                self._changed.wait(min(until, self._deadline) - now)
            return True

    def restart(self, step: int) -> None:
        """Forget what is prepared, and any error, and go on from ``step``: a rewind, or the slice has changed."""
        with self._changed:
            self._seek(step)

    def close(self) -> None:
        """Stop the thread; waits for a load in progress at most 5 s (the thread is a daemon)."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    def _aim(self, step: int) -> None:
        """With the lock held. The consumer asks for ``step``: its deadline counts from the first time it does."""
        assert self._stop_step is None or step < self._stop_step, f"step {step} is beyond the last, {self._stop_step}"
        if self._error is None and step not in self._ready and step not in (self._loading, self._next):
            self._seek(step)
        if step != self._asked:
            self._asked, self._deadline = step, time.monotonic() + self._timeout_s
        self._want(step)

    def _want(self, step: int) -> None:
        """With the lock held. Forget what the consumer has passed, which makes room for what follows."""
        self._wanted = step
        self._ready = {later: kept for later, kept in self._ready.items() if later >= step}
        self._changed.notify_all()

    def _seek(self, step: int) -> None:
        """With the lock held. A load in progress belongs to an older generation now, so its result is dropped."""
        self._generation += 1
        self._ready = {}
        self._error = None
        self._loading = None
        self._next = step
        self._asked = -1
        self._want(step)

    def _may_load(self) -> bool:
        is_past_end = self._stop_step is not None and self._next >= self._stop_step
        return self._error is None and not is_past_end and len(self._ready) < self._depth

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not self._may_load():
                    self._changed.wait()
                if self._is_closed:
                    return
                step, generation = self._next, self._generation
                self._loading, self._next = step, step + 1
            batch, error = None, None
            try:
                batch = self._load(step)
            except BaseException as caught:  # Whatever it is, it belongs to the trainer's thread.
                error = caught
            with self._changed:
                if generation != self._generation:
                    continue
                self._loading = None
                if batch is not None and step >= self._wanted:
                    self._ready[step] = batch
                self._error = error
                self._changed.notify_all()
