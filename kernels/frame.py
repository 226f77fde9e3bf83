"""What travels in an exchange: the fixed-size header (PROTOCOLS S1) and the frame around sections (S10).

A header says who speaks, about which exchange, and how many bytes follow per peer and section. A frame wraps the
sections of one message: a 64-byte prefix, each section at a multiple of 64 bytes, an 8-byte trailer. Native code writes
and checks both; the functions that end in ``_reference`` are the readable definition. All fields are little-endian.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from shoal.kernels.transport import name_ranks

#: Changes when the layout or meaning of anything in this file does.
PROTOCOL_VERSION = 1
HEADER_MAGIC = 0x4C414F48_53000000 | PROTOCOL_VERSION
FRAME_MAGIC = 0x4C484F53
TRAILER_MAGIC = 0x5245544C414F4853
PREFIX_BYTES = 64
TRAILER_BYTES = 8
HEADER_BYTES = 512
DETAIL_BYTES = 256
#: Sections whose sizes a header can announce.
SECTIONS_MAX = 8
#: No section may be announced longer than this; anything above is a broken header.
SECTION_BYTES_MAX = 1 << 40
#: Free float64 values of a header, summed over ranks in rank order.
NUMBERS_MAX = 4


class Kind(enum.IntEnum):
    """What an exchange is for; collectives and bytes are counted by it."""

    BATCH = 1
    IDS = 2
    VALUES = 3
    GRADIENTS = 4
    DENSE = 5
    DECIDE = 6
    CLOSE = 7
    DETAILS = 8
    EVALUATE = 9
    STATE = 10
    BARRIER = 11
    RELAY = 12
    STATISTICS = 13
    NORM = 14
    AGREE = 15
    CHANGED = 16


class Status(enum.IntEnum):
    """How a rank fares; other than OK it is seen by all ranks before any owner applies (S10)."""

    OK = 0
    BAD_ID = 1
    DATA = 2
    CAPACITY = 3
    NON_FINITE = 4
    INTERNAL = 5


class Flag(enum.IntFlag):
    """Wishes of a rank; all ranks act on the OR of the W headers of one exchange (S3)."""

    STOP = 1
    DRAIN = 2
    CONTROLLER_LOST = 4
    CHECKPOINT = 8
    NON_FINITE = 16
    INTERRUPT = 32
    END_OF_DATA = 64
    EVALUATE = 128
    PAUSE = 256
    #: A view change is being prepared: snapshots follow each other as fast as they complete.
    HASTE = 512
    #: The view of the epoch in the control word takes over after this step (V4).
    CUTOVER = 1024
    #: This rank's batch is not there yet: all ranks repeat the header, so that silence is never mistaken for waiting.
    WAIT = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What all ranks of an epoch must agree on, and this rank's number in it."""

    #: 64-bit hash of the run's name and creation.
    run: int
    epoch: int
    rank: int
    world_size: int
    #: Hash of everything in the step plan that ranks must share.
    plan_hash: int = 0
    num_tables: int = 0


#: The header. Fields before ``rank`` must be equal on all ranks. 512 bytes, no padding.
HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("run", "<u8"),
        ("epoch", "<i8"),
        ("world_size", "<i8"),
        ("plan_hash", "<u8"),
        ("num_tables", "<i8"),
        ("kind", "<i8"),
        ("step", "<i8"),
        ("micro_batch", "<i8"),
        ("num_sections", "<i8"),
        ("sequence", "<i8"),
        ("rank", "<i8"),
        ("applied", "<i8"),
        ("acked", "<i8"),
        ("flags", "<u8"),
        ("control", "<i8"),
        ("status", "<i8"),
        ("denominator", "<f8"),
        ("section_bytes", "<i8", (SECTIONS_MAX,)),
        ("numbers", "<f8", (NUMBERS_MAX,)),
        ("reserved", "<i8", (2,)),
        ("detail", f"S{DETAIL_BYTES}"),
    ]
)
AGREED_FIELDS = HEADER_DTYPE.names[: HEADER_DTYPE.names.index("rank")]  # type: ignore[index, union-attr]
SECTIONS_OFFSET = HEADER_DTYPE.fields["section_bytes"][1]  # type: ignore[index]

#: The prefix of a frame, as csrc/shm/frame.h has it.
PREFIX_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("kind", "<u2"),
        ("num_sections", "<u2"),
        ("epoch", "<u4"),
        ("status", "<i4"),
        ("step", "<i8"),
        ("applied", "<i8"),
        ("section_bytes", "<i8"),
        ("plan_hash", "<u8"),
        ("sections_hash", "<u8"),
        ("sender", "<u4"),
        ("sequence", "<u4"),
    ]
)
#: Names of the faults that ``frame_check`` reports, in its order.
FRAME_FIELDS = (
    "magic",
    "epoch",
    "step",
    "kind",
    "plan_hash",
    "sender",
    "sequence",
    "num_sections",
    "section_bytes",
    "sections_hash",
    "trailer",
)
assert HEADER_DTYPE.itemsize == HEADER_BYTES and PREFIX_DTYPE.itemsize == PREFIX_BYTES


def encode_detail(text: str) -> bytes:
    """UTF-8 of at most DETAIL_BYTES bytes, cut at a character."""
    return text.encode()[:DETAIL_BYTES].decode(errors="ignore").encode().rstrip(b"\0")


def layout_reference(sections_SW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [S, W] of each section in its frame, frame sizes [W]) for section sizes [S, W]."""
    num_sections, world_size = sections_SW.shape
    offsets = np.zeros_like(sections_SW)
    sizes = np.zeros(world_size, np.int64)
    for rank in range(world_size):
        at = PREFIX_BYTES
        for section in range(num_sections):
            offsets[section, rank] = at
            at += -(-int(sections_SW[section, rank]) // 64) * 64
        sizes[rank] = at + TRAILER_BYTES
    return offsets, sizes


def sections_hash_reference(sizes: list[int]) -> int:
    """Hash of the section sizes of one frame, in order."""
    mask = (1 << 64) - 1
    value = 0x9E3779B97F4A7C15
    for size in sizes:
        value = (value ^ size) * 0xFF51AFD7ED558CCD & mask
        value ^= value >> 33
    return value


def frame_reference(common: np.ndarray, sections: list[bytes]) -> bytes:
    """One whole frame around ``sections``; ``common`` is a PREFIX_DTYPE scalar with the exchange's own fields set."""
    prefix = common.copy()
    prefix["num_sections"] = len(sections)
    prefix["section_bytes"] = sum(map(len, sections))
    prefix["sections_hash"] = sections_hash_reference([len(section) for section in sections])
    body = b"".join(section + bytes(-len(section) % 64) for section in sections)
    trailer = TRAILER_MAGIC ^ (int(prefix["sequence"]) << 16)
    return prefix.tobytes() + body + trailer.to_bytes(8, "little")


def describe_disagreement(raw: np.ndarray) -> str:
    """Which ranks differ in which field first, judged against the value that most ranks (the lowest, if tied) hold."""
    for field in AGREED_FIELDS:
        values, counts = np.unique(raw[field], return_counts=True)
        if len(values) == 1:
            continue
        most = set(values[counts == counts.max()].tolist())
        common = next(value for value in raw[field].tolist() if value in most)
        odd = [rank for rank, value in enumerate(raw[field].tolist()) if value != common]
        says = ", ".join(f"rank {rank} says {raw[field][rank]}" for rank in odd[:4])
        return f"{_who_disagrees(odd)} about {field}: {says}, the others say {common}"
    wrong = [rank for rank, value in enumerate(raw["rank"].tolist()) if value != rank]
    return f"{_who_disagrees(wrong)} about rank: {raw['rank'][wrong[:4]].tolist()}"


def _who_disagrees(ranks: list[int]) -> str:
    return f"{name_ranks(ranks)} {'disagrees' if len(ranks) == 1 else 'disagree'}"


def describe_bad_sections(section_bytes_SW: np.ndarray) -> str:
    """Which rank announces a size that cannot be, and all its sizes."""
    is_bad = (section_bytes_SW < 0) | (section_bytes_SW > SECTION_BYTES_MAX)
    sender = int(np.nonzero(is_bad.any(0))[0][0])
    return f"rank {sender} announces section_bytes {section_bytes_SW[:, sender].tolist()}"
