"""Blobs: named bytes as of a step (dense state, metric bins) that travel in pieces beside the row blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.actors.transfer import TransferClient
from shoal.actors.wire import Kind
from shoal.kernels.errors import ExchangeTimeoutError, PeerError, ProtocolError

PIECE_BYTES = 16 * 2**20


def send_blob(
    client: TransferClient, epoch: int, name: str, step: int, data: bytes, announces: Sequence[str] = ()
) -> None:
    """Send ``data`` under a name; returns when all of it is acknowledged. Raises as ``TransferClient.post`` does.

    ``announces``: names of blobs of the same step that others send, which the receiver is to wait for as well.
    """
    view = memoryview(data)
    for start in range(0, max(1, len(view)), PIECE_BYTES):
        meta = {"name": name, "step": step, "first": start, "total": len(view), "announces": list(announces)}
        client.post(Kind.BLOB, epoch, meta, [view[start : start + PIECE_BYTES]])
    client.drain()


class Blobs:
    """What has arrived. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arriving: dict[tuple[str, int], bytearray] = {}
        self._complete: dict[tuple[str, int], bytes] = {}
        self._announced: dict[tuple[str, int], list[str]] = {}
        self._is_aborted = False

    def add(self, meta: Mapping[str, Any], piece: np.ndarray) -> None:
        """Take in a piece; pieces of a blob come in order. The newest blob of a name and step replaces an earlier."""
        key, first, total = (str(meta["name"]), int(meta["step"])), int(meta["first"]), int(meta["total"])
        with self._changed:
            if first == 0:
                self._arriving[key] = bytearray()
            found = self._arriving.get(key)
            if found is None or len(found) != first or first + piece.size > total:
                raise ProtocolError(f"a piece of {key[0]!r} of step {key[1]} does not follow what has come")
            found += memoryview(piece)
            if len(found) == total:
                self._complete[key] = bytes(self._arriving.pop(key))
                self._announced[key] = [str(name) for name in meta.get("announces", ())]
                self._changed.notify_all()

    def at(self, step: int) -> dict[str, bytes]:
        """Name -> bytes of the complete blobs of ``step``."""
        with self._changed:
            return {name: data for (name, at), data in self._complete.items() if at == step}

    def wait_for(self, names: Sequence[str], step: int, timeout_s: float) -> dict[str, bytes]:
        """The named blobs of ``step``, and those they announce. Raises ExchangeTimeoutError naming what is missing,
        PeerError after ``abort``."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                announced = [other for name in names for other in self._announced.get((name, step), ())]
                wanted = dict.fromkeys([*names, *announced])
                missing = [name for name in wanted if (name, step) not in self._complete]
                if not missing:
                    return {name: self._complete[name, step] for name in wanted}
                left_s = deadline_s - time.monotonic()
                if self._is_aborted:
                    raise PeerError("this worker has parked and waits for nothing")
                if left_s <= 0:
                    raise ExchangeTimeoutError(f"{', '.join(missing)} of step {step} did not come in {timeout_s:g} s")
                self._changed.wait(left_s)

    def newest_step(self, name: str, timeout_s: float) -> int:
        """Step of the newest complete blob of that name; -1 where none comes in ``timeout_s`` or after ``abort``."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                newest = max((step for found, step in self._complete if found == name), default=-1)
                left_s = deadline_s - time.monotonic()
                if newest >= 0 or left_s <= 0 or self._is_aborted:
                    return newest
                self._changed.wait(left_s)

    def forget(self, name: str, step: int) -> None:
        """Drop one blob."""
        with self._changed:
            self._complete.pop((name, step), None)
            self._announced.pop((name, step), None)

    def forget_below(self, step: int) -> None:
        """Drop blobs of steps < ``step``."""
        with self._changed:
            self._complete = {key: data for key, data in self._complete.items() if key[1] >= step}
            self._announced = {key: names for key, names in self._announced.items() if key[1] >= step}
            self._arriving = {key: data for key, data in self._arriving.items() if key[1] >= step}

    def abort(self) -> None:
        """End every wait."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def thaw(self) -> None:
        """Waits are allowed again."""
        with self._changed:
            self._is_aborted = False
