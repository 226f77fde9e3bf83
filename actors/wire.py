"""Wire: how row blocks and what belongs to them travel between two workers.

A message is a fixed header, a small JSON object (``meta``) and a payload of raw bytes. The header carries run, epoch,
sender, stream, sequence and a CRC-32 over all of the message (PROTOCOLS F7). Nothing is pickled: rows are the bytes of
their columns behind a table of int64 that says how many there are of each (table, block).

Legend: M sections of a message, N rows, D embedding_dim, S float32 values of optimizer state per row.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.kernels.cut import TORCH_DTYPES, BlockRows
from shoal.kernels.errors import PeerError, ProtocolError
from shoal.kernels.spec import TableSpec

MAGIC = b"SHLT"
VERSION = 1
#: No message carries more bytes than this; rows of a larger block are cut into several messages.
MESSAGE_BYTES_MAX = 64 * 2**20
META_BYTES_MAX = 2**20
SENDER_BYTES_MAX = 64
_MASK64 = (1 << 64) - 1
# Below this size copying two buffers together is cheaper than handing both to the kernel.
_JOIN_BYTES = 2**16

_HEADER = struct.Struct(f"<4sHHQqQQIII{SENDER_BYTES_MAX}s")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a message is. Replies are OK or REFUSED and repeat the sequence of what they answer."""

    OK = 0
    REFUSED = 1
    #: What do you hold of these blocks? The first message of a channel.
    STATE = 2
    #: Rows of blocks as of one step; a block's first piece replaces what was there.
    BASE = 3
    #: Rows changed or deleted between two snapshots.
    CHANGES = 4
    #: All changes of a snapshot were sent: what every block amounts to now.
    END = 5
    #: Bytes with a name: dense state, metric bins.
    BLOB = 6


class RefusedError(PeerError):
    """The receiver refused a message: another run or epoch, not a member, damaged, or out of order (F7)."""

    code = "SHOAL-504"


class LinkError(PeerError):
    """The connection to a worker failed: names its address."""

    code = "SHOAL-505"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """The fixed part of a message. ``run`` is the 64-bit hash of the run, ``stream`` a random number per connection's
    user, ``sequence`` counts its messages from 1."""

    kind: Kind
    run: int
    epoch: int
    stream: int
    sequence: int
    sender: str
    meta_bytes: int = 0
    payload_bytes: int = 0
    crc: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One received message. ``payload`` uint8 [n] is this message's own memory."""

    header: Header
    meta: Mapping[str, Any]
    payload: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What a handler answers, and what a sender gets."""

    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    payload: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8))


# ---- frames -------------------------------------------------------------------------------------------------------


def encode(header: Header, meta: Mapping[str, Any], payload: Sequence[Any]) -> list[memoryview]:
    """The buffers of one message, its lengths and CRC filled in; ``payload`` buffers are not copied."""
    text = json.dumps(dict(meta)).encode()
    views = [_view_of(part) for part in payload if memoryview(part).nbytes]
    num_bytes = sum(map(len, views))
    if num_bytes > MESSAGE_BYTES_MAX or len(text) > META_BYTES_MAX:
        raise ValueError(f"a message of {num_bytes} bytes (meta: {len(text)}) is above the limit; cut it")
    header = dataclasses.replace(header, meta_bytes=len(text), payload_bytes=num_bytes)
    crc = zlib.crc32(text, zlib.crc32(_pack(header)))
    for view in views:
        crc = zlib.crc32(view, crc)
    head = _pack(dataclasses.replace(header, crc=crc)) + text
    return [memoryview(head), *views]


def _view_of(data: Any) -> memoryview:
    return memoryview(data).cast("B")


def _pack(header: Header) -> bytes:
    sender = header.sender.encode()
    if len(sender) > SENDER_BYTES_MAX:
        raise ValueError(f"worker id {header.sender!r} is longer than {SENDER_BYTES_MAX} bytes")
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.run,
        header.epoch,
        header.stream,
        header.sequence,
        header.meta_bytes,
        header.payload_bytes,
        header.crc,
        sender,
    )


def decode_header(data: bytes | bytearray) -> Header:
    """The header in ``data``. Raises ProtocolError where it is none of ours or announces more than is allowed."""
    magic, version, kind, run, epoch, stream, sequence, meta, payload, crc, sender = _HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not a transfer message: magic {magic!r}, version {version} (expected {VERSION})")
    if meta > META_BYTES_MAX or payload > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a transfer message announces {payload} bytes, {meta} of meta: above the limit")
    try:
        return Header(
            kind=Kind(kind),
            run=run,
            epoch=epoch,
            stream=stream,
            sequence=sequence,
            sender=sender.rstrip(b"\0").decode(),
            meta_bytes=meta,
            payload_bytes=payload,
            crc=crc,
        )
    except ValueError as error:
        raise ProtocolError(f"a transfer message's header is damaged: {error}") from error


def is_intact(header: Header, text: bytes | bytearray, payload: np.ndarray) -> bool:
    """Whether the CRC fits header, meta and payload."""
    crc = zlib.crc32(text, zlib.crc32(_pack(dataclasses.replace(header, crc=0))))
    return zlib.crc32(payload, crc) == header.crc


# ---- rows ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows of one block within a message.

    In BASE: rows [origin, origin + N) of the block's ``total``, whose checksum is ``checksum``. In CHANGES: rows
    created or updated, and ids deleted, since snapshot ``origin``.
    """

    table: int
    block: int
    rows: BlockRows
    deleted: Tensor
    origin: int
    total: int = 0
    checksum: int = 0

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + 8 * self.deleted.numel() + 8 * _FIELDS


_FIELDS = 7
NO_IDS = torch.empty(0, dtype=torch.int64)


def encode_sections(sections: Sequence[Section]) -> list[np.ndarray]:
    """The payload of a BASE or CHANGES message: int64 [M, 7], then the columns of each section; small ones joined."""
    index = np.empty((len(sections), _FIELDS), np.int64)
    parts: list[np.ndarray] = [index.view(np.uint8).reshape(-1)]
    for i, s in enumerate(sections):
        index[i] = (s.table, s.block, len(s.rows), s.deleted.numel(), s.origin, s.total, signed(s.checksum))
        rows = s.rows
        used = 0
        # Columns of 8-byte values first, so that each begins where its type may be read in place.
        for column in (rows.ids, rows.last_step, rows.count, s.deleted, rows.slots, rows.weights):
            if column.numel():
                parts.append(_bytes_of(column))
                used += parts[-1].size
        if used % 8:
            parts.append(np.zeros(-used % 8, np.uint8))
    return _joined(parts)


def _bytes_of(column: Tensor) -> np.ndarray:
    # numpy's views cost a third of torch's, but it has no bfloat16.
    found = column.view(torch.int16) if column.dtype is torch.bfloat16 else column
    return found.numpy().reshape(-1).view(np.uint8)


def _joined(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    made: list[np.ndarray] = []
    small: list[np.ndarray] = []
    for part in parts:
        if part.size < _JOIN_BYTES:
            small.append(part)
            continue
        if small:
            made.append(np.concatenate(small))
            small = []
        made.append(part)
    if small:
        made.append(np.concatenate(small))
    return made


def decode_sections(payload: np.ndarray, num_sections: int, tables: Sequence[TableSpec]) -> Iterator[Section]:
    """Inverse of ``encode_sections``; the columns are views of ``payload``. Raises ProtocolError where it is none."""
    memory = torch.from_numpy(payload)
    at = 8 * _FIELDS * num_sections
    if at > payload.size:
        raise ProtocolError(f"{num_sections} sections do not fit a payload of {payload.size} bytes")
    index = payload[:at].view(np.int64).reshape(num_sections, _FIELDS).tolist()
    for table, block, num_rows, num_deleted, origin, total, checksum in index:
        if not 0 <= table < len(tables) or num_rows < 0 or num_deleted < 0:
            raise ProtocolError(f"a section names table {table}, {num_rows} rows, {num_deleted} deleted")
        spec = tables[table]
        slot_width = spec.optimizer.slot_width(spec.embedding_dim)
        columns = []
        for dtype, shape in (
            (torch.int64, (num_rows,)),
            (torch.int64, (num_rows,)),
            (torch.int64, (num_rows,)),
            (torch.int64, (num_deleted,)),
            (torch.float32, (num_rows, slot_width)),
            (TORCH_DTYPES[spec.data_type], (num_rows, spec.embedding_dim)),
        ):
            num_bytes = dtype.itemsize * int(np.prod(shape))
            if at + num_bytes > payload.size:
                raise ProtocolError(f"a section of table {spec.name!r}, block {block} is cut short")
            columns.append(memory[at : at + num_bytes].view(dtype).reshape(shape))
            at += num_bytes
        at += -at % 8
        ids, last_step, count, deleted, slots, weights = columns
        yield Section(
            table=table,
            block=block,
            rows=BlockRows(ids=ids, weights=weights, slots=slots, last_step=last_step, count=count),
            deleted=deleted,
            origin=origin,
            total=total,
            checksum=unsigned(checksum),
        )


def signed(value: int) -> int:
    """A 64-bit pattern as int64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """A 64-bit pattern as uint64: checksums are sums modulo 2^64."""
    return value & _MASK64
