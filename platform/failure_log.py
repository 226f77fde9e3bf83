"""Why a run failed: of all the errors its workers told, the cause, not a victim whose peers were gone."""

from __future__ import annotations

import threading

from shoal.kernels.errors import ClusterError


class FailureLog:
    """The newest error of each worker. ``note`` may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[str, tuple[int, BaseException]] = {}

    def note(self, worker_id: str, error: BaseException, is_origin: bool) -> None:
        """A worker failed; ``is_origin``: by itself, not because of others."""
        self._add(worker_id, 0 if is_origin else 3, error)

    def note_launch(self, worker_id: str, error: BaseException) -> None:
        """A worker that was asked for did not come."""
        self._add(worker_id, 1, error)

    def note_gone(self, worker_id: str, reason: str) -> None:
        """A worker's process ended; what it said before says more."""
        with self._lock:
            self._errors.setdefault(worker_id, (2, ClusterError(reason)))

    def clear(self) -> None:
        """What happened so far has been overcome."""
        with self._lock:
            self._errors.clear()

    def cause(self) -> BaseException | None:
        """The error that explains the others; the newest among equals."""
        with self._lock:
            ranked = [(rank, -index, error) for index, (rank, error) in enumerate(self._errors.values())]
        return min(ranked, key=lambda entry: entry[:2])[2] if ranked else None

    def _add(self, worker_id: str, rank: int, error: BaseException) -> None:
        with self._lock:
            known = self._errors.pop(worker_id, None)
            # Polls repeat an error; a worker that suffers from others may have told its own before.
            self._errors[worker_id] = known if known is not None and known[0] < rank else (rank, error)
