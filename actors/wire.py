"""Wire: how row blocks and what belongs to them travel between two workers.

A message is a fixed header, a small JSON object (``meta``) and a payload of raw bytes. The header carries run, epoch,
sender, stream, sequence and a CRC-32C over all of the message (PROTOCOLS F7). Nothing is pickled: rows are packed
records in sections of one (table, block) each (``kernels.packed``), written by the native code into the message and
read where they have arrived.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.kernels.errors import PeerError, ProtocolError
from shoal.kernels.packed import SECTION_BYTES, crc32c, crc32c_quarters, record_type
from shoal.kernels.spec import TableSpec

MAGIC = b"SHLT"
VERSION = 2
#: No message carries more bytes than this; rows of a larger block are cut into several messages.
MESSAGE_BYTES_MAX = 64 * 2**20
META_BYTES_MAX = 2**20
SENDER_BYTES_MAX = 64
_MASK64 = (1 << 64) - 1

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
    """One received message. ``payload`` uint8 [n] is recycled when nobody refers to it: who keeps views of it keeps it
    as well."""

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
    """The buffers of one message, its lengths and CRC filled in; a single ``payload`` buffer is not copied."""
    text = json.dumps(dict(meta)).encode()
    views = [np.frombuffer(part, np.uint8) for part in payload if memoryview(part).nbytes]
    num_bytes = sum(view.size for view in views)
    if num_bytes > MESSAGE_BYTES_MAX or len(text) > META_BYTES_MAX:
        raise ValueError(f"a message of {num_bytes} bytes (meta: {len(text)}) is above the limit; cut it")
    whole: Any = views[0] if len(views) == 1 else np.concatenate([np.empty(0, np.uint8), *views])
    header = dataclasses.replace(header, meta_bytes=len(text), payload_bytes=num_bytes)
    head = _pack(dataclasses.replace(header, crc=_crc(header, text, whole))) + text
    return [memoryview(head), *([memoryview(whole)] if num_bytes else [])]


def _crc(header: Header, text: bytes | bytearray, payload: np.ndarray) -> int:
    head = np.frombuffer(_pack(dataclasses.replace(header, crc=0)) + bytes(text), np.uint8)
    return crc32c(head, crc32c_quarters(payload))


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
    return _crc(header, text, payload) == header.crc


# ---- rows ---------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """Rows of one block within a message.

    In BASE: the rows after the first ``origin`` of the block's ``total``, which is an upper bound but in the last
    section, that also has the ``checksum`` of all. In CHANGES: rows made or updated, and ids deleted, since snapshot
    ``origin``.
    """

    table: int
    block: int
    num_rows: int
    num_deleted: int
    origin: int
    total: int
    checksum: int
    is_last: bool
    #: Of the message, whose memory is kept as long as the section; and the raw address of the first record in it.
    payload: np.ndarray
    address: int
    nbytes: int

    @property
    def key(self) -> tuple[int, int]:
        return self.table, self.block


_SECTION = struct.Struct("<8q")
assert _SECTION.size == SECTION_BYTES


def decode_sections(payload: np.ndarray, num_sections: int, tables: Sequence[TableSpec]) -> list[Section]:
    """The sections of a BASE or CHANGES message. Raises ProtocolError where it is none."""
    row_bytes = [record_type(table).itemsize for table in tables]
    found = []
    at, size, memory = 0, payload.size, payload.ctypes.data
    data: Any = payload
    for _ in range(num_sections):
        if at + SECTION_BYTES > size:
            raise ProtocolError(f"{num_sections} sections do not fit a payload of {size} bytes")
        table, block, num_rows, num_deleted, origin, total, checksum, is_last = _SECTION.unpack_from(data, at)
        at += SECTION_BYTES
        if not 0 <= table < len(tables) or not 0 <= block < tables[table].num_blocks:
            raise ProtocolError(f"a section names block {block} of table {table}")
        num_bytes = num_rows * row_bytes[table] + 8 * num_deleted
        if num_rows < 0 or num_deleted < 0 or at + num_bytes > size:
            raise ProtocolError(f"a section of table {tables[table].name!r}, block {block} is cut short")
        found.append(
            Section(
                table, block, num_rows, num_deleted, origin, total, unsigned(checksum), bool(is_last), payload,
                memory + at, num_bytes,
            )
        )  # fmt: skip
        at += -(-num_bytes // 8) * 8
    return found


def signed(value: int) -> int:
    """A 64-bit pattern as int64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """A 64-bit pattern as uint64: checksums are sums modulo 2^64."""
    return value & _MASK64
