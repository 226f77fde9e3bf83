"""Who is still there: after a failed collective every survivor signs a sheet in the store, and who did not is named.

Gloo reports a closed connection or a timeout, never a rank. A rank whose exchange failed first releases its peers
(they fail within milliseconds and sign too), so those who have not signed after a short wait are the missing ones.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.kernels.errors import ExchangeTimeoutError, PeerError
from shoal.kernels.transport import name_ranks

#: Signatures: how this rank's exchange ended.
TIMEOUT, CLOSED, LEFT = "timeout", "closed", "left"
#: How long a store that does not answer is waited for, in seconds.
_STORE_WAIT_S = 3.0


def _bounded(call: Callable[[], Any], wait_s: float) -> Any:
    """The result of ``call``; None if it raises or takes longer. A store client cannot be interrupted, so a thread runs
    it. Torch raises several types when the store's host is gone."""
    results: list[Any] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=work, name="shoal-rollcall", daemon=True)
    thread.start()
    thread.join(wait_s)
    return results[0] if results else None


class RollCall:
    """A sheet of signatures of one epoch in a torch.distributed Store that all ranks reach.

    Nobody else may use ``store``'s connection meanwhile: a store client serialises its callers.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, wait_s: float = 0.2) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._wait_s = store, wait_s
        self._signed = False

    def sign(self, how: str, why: str = "") -> None:
        """Write this rank's signature; the first one counts. A store that is gone or hangs only costs the names."""
        if not self._signed:
            self._signed = True
            _bounded(lambda: self._store.set(f"rollcall/{self.rank}", f"{how}|{why[:200]}"), _STORE_WAIT_S)

    def read(self) -> dict[int, tuple[str, str]] | None:
        """Signatures (how, why) by rank; None when the store is gone.

        Waits up to ``wait_s`` for all of them, less if one of them gives a reason: then there is nothing to find out.
        """
        return _bounded(self._read, self._wait_s + _STORE_WAIT_S)

    def _read(self) -> dict[int, tuple[str, str]]:
        deadline = time.monotonic() + self._wait_s
        found: dict[int, tuple[str, str]] = {}
        while True:
            for rank in range(self.world_size):
                key = f"rollcall/{rank}"
                if rank not in found and self._store.check([key]):
                    how, _, why = self._store.get(key).decode(errors="replace").partition("|")
                    found[rank] = (how, why)
            has_reason = any(why for _, why in found.values())
            if has_reason or len(found) == self.world_size or time.monotonic() >= deadline:
                return found
            time.sleep(0.01)

    def explain(self, operation: str, how: str, timeout_s: float, cause: str) -> PeerError:
        """Sign, wait, and build the error that names who is missing or who left, and why."""
        self.sign(how)
        found = self.read()
        what = f"{operation} failed on rank {self.rank} of {self.world_size}"
        if found is None:
            kind = ExchangeTimeoutError if how == TIMEOUT else PeerError
            return kind(f"{what} ({cause[:120]}); the store is gone too, so the rank cannot be named")
        kind = ExchangeTimeoutError if any(sign == TIMEOUT for sign, _ in found.values()) else PeerError
        reasons = [f"rank {rank} left: {why}" for rank, (_, why) in sorted(found.items()) if why and rank != self.rank]
        if reasons:
            return kind(f"{what}: {'; '.join(reasons)}")
        missing = [rank for rank in range(self.world_size) if rank not in found]
        if kind is ExchangeTimeoutError:
            who = f"{name_ranks(missing)} did not arrive" if missing else "every rank is alive but one came too late"
            return kind(f"{what}: {who} within {timeout_s:g} s")
        who = f"{name_ranks(missing)} died or cannot be reached" if missing else f"a connection broke ({cause[:120]})"
        return kind(f"{what}: {who}")
