"""Shipping: whole row blocks and named bytes to one worker, while training stands still (recoveries, joiners)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.actors.blobs import send_blob
from shoal.actors.channel import base_sections
from shoal.actors.copies import Key
from shoal.actors.transfer import TransferClient
from shoal.actors.wire import Kind, Reply, encode_sections
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import PeerError


def ship_once(
    client: TransferClient,
    epoch: int,
    step: int,
    keys: Sequence[Key],
    export: Callable[[Key], BlockRows],
    blobs: Mapping[str, bytes],
    announces: Sequence[str],
) -> None:
    """Send blocks, one at a time in memory, then blobs; returns when all is acknowledged.

    ``announces``: what the receiver of the dense state waits for as well. Raises PeerError naming blocks that arrived
    damaged, and what ``TransferClient.post`` raises.
    """
    wrong: list[Key] = []
    for key in keys:
        for section in base_sections(key, export(key)):
            meta = {"step": step, "sections": 1}
            wrong += _wrong(client.post(Kind.BASE, epoch, meta, encode_sections([section])))
    wrong += _wrong(client.drain())
    if wrong:
        raise PeerError(f"{len(wrong)} row blocks arrived damaged at {client.address}: {wrong[:3]}")
    for name, data in blobs.items():
        send_blob(client, epoch, name, step, data, announces if name == "dense" else ())


def _wrong(replies: Iterable[Reply]) -> list[Key]:
    return [(table, block) for reply in replies for table, block in reply.meta.get("wrong", ())]
