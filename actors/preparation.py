"""Preparation: a view that a worker gets ready for in the background, while the present one trains (V2, V3)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from shoal.actors.messages import PrepareProgress, View
from shoal.actors.open_view import OpenView
from shoal.actors.protocol_messages import CutOverCalled, News, PrepareFailed, PrepareReady
from shoal.kernels import faults
from shoal.kernels.errors import PeerError

#: How often it is looked whether the copies are current.
_PROGRESS_INTERVAL_S = 0.02


class Preparation:
    """Forms the groups of ``view`` in a thread, watches the copies, and says once when both are ready, or why not.

    Args:
        open_view: forms the groups; None for a leaver, which has none to form.
        copies: how far the copies are that this worker sends.
        tell: takes PrepareReady or PrepareFailed, and CutOverCalled.
        wait_for_dense: of a joiner: waits the given seconds for the dense state to come, which says that the cutover is
            on (V4); its step, or -1.
    """

    def __init__(
        self,
        view: View,
        open_view: Callable[[], OpenView | None],
        copies: Callable[[], PrepareProgress],
        tell: Callable[[News], None],
        wait_for_dense: Callable[[float], int] | None = None,
    ) -> None:
        self.view = view
        self._copies = copies
        self._tell = tell
        self._wait_for_dense = wait_for_dense
        self._opened: OpenView | None = None
        self._error: str | None = None
        self._is_formed = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(open_view,), name=f"prepare-{view.epoch}", daemon=True).start()

    def _run(self, open_view: Callable[[], OpenView | None]) -> None:
        try:
            faults.reach("prepare.form")
            opened = open_view()
            with self._lock:
                self._opened, self._is_formed = opened, True
            if self._is_over.is_set():
                self.cancel()
            while not self._is_over.wait(_PROGRESS_INTERVAL_S):
                progress = self.progress()
                if progress.error is not None:
                    raise PeerError(progress.error)
                if progress.is_ready:
                    faults.reach("prepare.ready")
                    self._tell(PrepareReady(self.view.epoch))
                    break
            self._await_call()
        except Exception as error:  # the thread's edge: the controller reads it and aborts the view
            self._error = f"{type(error).__name__}: {error}"
            self._tell(PrepareFailed(self.view.epoch, self._error))

    def _await_call(self) -> None:
        """A joiner sees no headers of the present view: what tells it of the cutover is the dense state."""
        while self._wait_for_dense is not None and not self._is_over.is_set():
            step = self._wait_for_dense(0.25)
            if step >= 0:
                self._tell(CutOverCalled(self.view.epoch, step))
                return

    def progress(self) -> PrepareProgress:
        """Ready once the groups are formed and the copies this worker sends are current enough (V2)."""
        copies = self._copies()
        error = self._error or copies.error
        # A joiner has nothing to send; what it receives is its senders' affair.
        is_current = copies.is_ready or self._wait_for_dense is not None
        return dataclasses.replace(copies, is_ready=is_current and self._is_formed and not error, error=error)

    def take(self) -> OpenView | None:
        """The formed view, which the caller closes from now on; None for a leaver, and before it is formed."""
        self._is_over.set()
        with self._lock:
            opened, self._opened = self._opened, None
        return opened

    def cancel(self) -> None:
        """Leave the groups, now or when they are formed."""
        opened = self.take()
        if opened is not None:
            opened.close()

    def abort(self, reason: str) -> None:
        """Break the groups, from any thread."""
        opened = self._opened
        if opened is not None:
            opened.abort(reason)
