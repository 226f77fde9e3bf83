"""Shipping: the memory of messages with rows, and whole row blocks and named bytes to one worker while training stands
still (recoveries, joiners)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shoal.actors.blobs import send_blob
from shoal.actors.copies import Key
from shoal.actors.transfer import WINDOW, TransferClient
from shoal.actors.wire import Kind, Reply
from shoal.kernels.errors import PeerError
from shoal.kernels.packed import SECTION_BYTES, BlockPack, record_type
from shoal.kernels.spec import TableSpec

#: Rows of one message are cut at this many bytes, which a cache holds from their packing to their sending.
PIECE_BYTES = 4 * 2**20


class Buffers:
    """The memory of messages that carry rows, in turn: one is filled again when its message has been answered."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        row_bytes = max((record_type(table).itemsize for table in tables), default=8)
        self._size = -(-max(PIECE_BYTES, SECTION_BYTES + row_bytes) // 8) * 8
        self._made: list[np.ndarray] = []
        self._at = -1

    def next(self) -> np.ndarray:
        """A buffer of uint8 that no message of WINDOW unanswered ones is in. It holds a row of any table."""
        if len(self._made) <= WINDOW:
            self._made.append(np.empty(self._size, np.uint8))
            return self._made[-1]
        self._at = (self._at + 1) % len(self._made)
        return self._made[self._at]


def packed_block(rows: BlockPack, buffers: Buffers) -> list[np.ndarray]:
    """All rows of a block in memory of their own: payloads of one section each."""
    pieces = []
    while not rows.is_done:
        buffer = buffers.next()
        pieces.append(buffer[: rows.fill(buffer.ctypes.data, buffer.size)].copy())
    return pieces


def ship_once(
    client: TransferClient,
    epoch: int,
    step: int,
    keys: Sequence[Key],
    export: Callable[[Key], Iterable[np.ndarray]],
    blobs: Mapping[str, bytes],
    announces: Sequence[str],
) -> None:
    """Send blocks, one at a time in memory, then blobs; returns when all is acknowledged.

    ``export``: all rows of a block, as ``packed_block`` makes them. ``announces``: what the receiver of the dense state
    waits for as well. Raises PeerError naming blocks that arrived damaged, and what ``TransferClient.post`` raises.
    """
    wrong: list[Key] = []
    for key in keys:
        for payload in export(key):
            wrong += _wrong(client.post(Kind.BASE, epoch, {"step": step, "sections": 1}, [payload]))
    wrong += _wrong(client.drain())
    if wrong:
        raise PeerError(f"{len(wrong)} row blocks arrived damaged at {client.address}: {wrong[:3]}")
    for name, data in blobs.items():
        send_blob(client, epoch, name, step, data, announces if name == "dense" else ())


def _wrong(replies: Iterable[Reply]) -> list[Key]:
    return [(table, block) for reply in replies for table, block in reply.meta.get("wrong", ())]
