"""Inbound: what other workers send to this one: copies of their row blocks, dense state, metric bins (PROTOCOLS F7)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shoal.actors.blobs import Blobs
from shoal.actors.copies import CopyHolder
from shoal.actors.messages import BlockSet
from shoal.actors.transfer import TransferServer
from shoal.actors.wire import Kind, Message, Reply, decode_sections
from shoal.kernels import faults
from shoal.kernels.errors import ProtocolError
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

#: Names of blobs with the aux state of a worker that is gone, to be kept like those of wards.
KEPT = "kept:"


class Inbound:
    """A server, and where its messages go. Methods may be called from any thread."""

    def __init__(
        self, store: RowStore, tables: Sequence[TableSpec], *, run: int, bind_address: str, timeout_s: float
    ) -> None:
        self._tables = tuple(tables)
        self.copies = CopyHolder(store, tables)
        self.blobs = Blobs()
        #: Epoch -> workers that may send under it; None: whoever knows the epoch, which is never told to others.
        #: Replaced, never changed.
        self._accepted: dict[int, frozenset[str] | None] = {}
        self.server = TransferServer(
            self._handle, run=run, fence=self._fence, bind_address=bind_address, timeout_s=timeout_s
        )

    def expect(self, epoch: int, senders: Iterable[str] | None) -> None:
        """Accept messages of ``epoch`` too, from ``senders``; None: from whoever sends under it."""
        if epoch not in self._accepted:
            self.blobs.forget_below(1 << 62)  # of an epoch that did not come about
        self._accepted = self._accepted | {epoch: None if senders is None else frozenset(senders)}

    def decide(self, epoch: int, members: Iterable[str]) -> None:
        """``epoch`` is decided: messages of older ones are refused from now on."""
        later = {other: who for other, who in self._accepted.items() if other > epoch}
        self._accepted = later | {epoch: frozenset(members)}

    def refuse(self, epoch: int | None = None) -> None:
        """Accept messages of ``epoch`` no more; None: of none."""
        self._accepted = {} if epoch is None else {e: who for e, who in self._accepted.items() if e != epoch}

    def freeze(self) -> None:
        """Take nothing in, end all connections and waits."""
        self.copies.freeze()
        self.blobs.abort()
        self.server.abort()

    def thaw(self) -> None:
        """Undo ``freeze``."""
        self.blobs.thaw()
        self.copies.thaw()

    def close(self) -> None:
        """End all threads."""
        self.freeze()
        self.copies.close()
        self.server.close()

    def receive(self, blocks: BlockSet, step: int, names: Sequence[str], timeout_s: float) -> Mapping[str, bytes]:
        """Wait for row blocks and blobs as of ``step``; returns the blobs. Raises ExchangeTimeoutError, PeerError."""
        deadline_s = time.monotonic() + timeout_s
        self.copies.wait_for(blocks, step, timeout_s)
        return self.blobs.wait_for(names, step, max(0.0, deadline_s - time.monotonic()))

    def _keep(self, name: str, step: int) -> None:
        """Aux state of a worker that is gone joins what is kept of others, and is dropped when that is."""
        data = self.blobs.at(step).get(name) if name.startswith(KEPT) else None
        if data is not None:
            self.blobs.forget(name, step)
            self.copies.keep_aux(name.removeprefix(KEPT), step, data)

    def _fence(self, epoch: int, sender: str) -> str | None:
        accepted = self._accepted
        if epoch not in accepted:
            return f"epoch {epoch} is not one of {sorted(accepted)}"
        members = accepted[epoch]
        return None if members is None or sender in members else f"{sender} is no member of epoch {epoch}"

    def _handle(self, message: Message) -> Reply:
        header, meta, payload = message.header, message.meta, message.payload
        if header.kind is Kind.STATE:
            keys = map(tuple, payload.view(np.int64).reshape(-1, 2).tolist())
            return Reply(payload=self.copies.state(header.sender, keys).view(np.uint8).reshape(-1))
        if header.kind is Kind.END:
            size = 32 * int(meta["blocks"])
            aux = payload[size:].tobytes() if meta["has_aux"] else None
            table = payload[:size].view(np.int64).reshape(-1, 4)
            wrong = self.copies.finish(header.sender, int(meta["step"]), table, aux)
            faults.reach("snapshot.ack")
            return Reply(meta={"wrong": wrong})
        if header.kind is Kind.BLOB:
            self.blobs.add(meta, payload)
            self._keep(str(meta["name"]), int(meta["step"]))
            return Reply()
        sections = decode_sections(payload, int(meta["sections"]), self._tables)
        if header.kind is Kind.BASE:
            wrong = self.copies.add_base(header.sender, header.epoch, int(meta["step"]), sections)
            return Reply(meta={"wrong": wrong})
        if header.kind is Kind.CHANGES:
            self.copies.stage(int(meta["step"]), sections)
            return Reply()
        raise ProtocolError(f"a message of kind {header.kind.name} is no request")
