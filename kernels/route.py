"""Readable references of routing: which unique rows a batch needs, in which order, from whom; and the ids message.

The native code (csrc/core/step/route.cpp, wire.cpp) must equal these functions; ``plan.Lookup`` is what runs.
Legend: W world size, B batch size, N ids of a batch, U unique rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from shoal.kernels.spec import FeatureSpec, IdPolicy, TableSpec

_DENSE = 0xFFFFFFFF
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class RouteReference:
    """What routing finds, in plain Python values."""

    #: Per table its unique ids (as uint64) in order of first occurrence over its features in plan order.
    unique: list[list[int]]
    #: Per feature, for each of its ids the index into its table's ``unique``; -1 where the id was dropped.
    inverse: list[list[int]]
    #: Per rank the rows asked of it, (table, id), in wire order: table, then first occurrence.
    asked: list[list[tuple[int, int]]]
    #: (feature, value, index into the batch's values) of the first bad id under policy ERROR, in feature order.
    bad: tuple[int, int, int] | None
    num_dropped: int
    num_remapped: int


def mix_id_reference(bits: int) -> int:
    """MurmurHash3's 64-bit finaliser of a uint64."""
    bits ^= bits >> 33
    bits = bits * 0xFF51AFD7ED558CCD & _MASK
    bits ^= bits >> 33
    bits = bits * 0xC4CEB9FE1A85EC53 & _MASK
    return bits ^ bits >> 33


def owner_reference(bits: int, owners: Sequence[int]) -> int:
    """Owner of the row block of an id: the top bits of its mixed hash number the block."""
    return int(owners[mix_id_reference(bits) * len(owners) >> 64])


def apply_policy_reference(bits: int, num_embeddings: int, policy: IdPolicy) -> int | None:
    """The id that is looked up in the place of ``bits``, or None if it is dropped (ERROR drops it as well)."""
    if num_embeddings == 0 or bits < num_embeddings:
        return bits
    if policy is IdPolicy.HASH:
        return mix_id_reference(bits) % num_embeddings
    return num_embeddings - 1 if policy is IdPolicy.OOV else None


def route_reference(
    values: np.ndarray,
    offsets: np.ndarray,
    key_columns: np.ndarray,
    batch_size: int,
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    placement: Sequence[np.ndarray],
    world_size: int,
) -> RouteReference:
    """Route one batch. ``values`` int [N], ``offsets`` int [K * B + 1], ``key_columns`` int [F] (-1: absent)."""
    numbers: list[dict[int, int]] = [{} for _ in tables]
    inverse: list[list[int]] = []
    bad = None
    num_dropped = num_remapped = 0
    for f, feature in enumerate(features):
        table, column = tables[feature.table], int(key_columns[f])
        first, last = (0, 0) if column < 0 else (int(offsets[(column + i) * batch_size]) for i in (0, 1))
        places = []
        for position in range(first, last):
            bits = int(values[position]) & _MASK
            row = apply_policy_reference(bits, table.num_embeddings, feature.policy)
            if row is None:
                num_dropped += 1
                if feature.policy is IdPolicy.ERROR and bad is None:
                    bad = (f, int(values[position]), position)
                places.append(-1)
                continue
            num_remapped += row != bits
            places.append(numbers[feature.table].setdefault(row, len(numbers[feature.table])))
        inverse.append(places)
    unique = [list(number) for number in numbers]
    asked: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for t, ids in enumerate(unique):
        for row in ids:
            asked[owner_reference(row, placement[t])].append((t, row))
    return RouteReference(unique, inverse, asked, bad, num_dropped, num_remapped)


def encode_ids_reference(asked: Sequence[tuple[int, int]], tables: Sequence[TableSpec]) -> bytes:
    """The ids section of one owner (PROTOCOLS S10), from (table, id) pairs in wire order. No ids: no bytes."""
    if not asked:
        return b""
    per_table: list[list[int]] = [[] for _ in tables]
    for table, row in asked:
        per_table[table].append(row)
    present = [t for t, ids in enumerate(per_table) if ids]
    if 2 * len(present) >= len(tables):
        counts = [_DENSE] + [len(ids) for ids in per_table]
    else:
        counts = [len(present)] + [x for t in present for x in (t, len(per_table[t]))]
    out = bytearray(np.array(counts, dtype="<u4").tobytes())
    out += bytes(-len(out) % 8)
    for t in present:
        is_wide = not 0 < tables[t].num_embeddings <= 1 << 31
        out += np.array(per_table[t], dtype=np.uint64).astype("<u8" if is_wide else "<i4").tobytes()
        out += bytes(-len(out) % 8)
    return bytes(out)
