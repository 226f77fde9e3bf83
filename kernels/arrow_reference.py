"""The readable oracle of ``kernels.arrow``: one Python value at a time, nothing shared with the native code."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from shoal.kernels.schema import Schema, SparseColumn

if TYPE_CHECKING:
    import pyarrow as pa

_MASK = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)


def _rotl(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _MASK


def _round(accumulator: int, lane: int) -> int:
    return _rotl((accumulator + lane * _P2) & _MASK, 31) * _P1 & _MASK


def xxh64_reference(data: bytes, seed: int = 0) -> int:
    """XXH64 as its specification tells it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    at, n = 0, len(data)
    if n >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed & _MASK, (seed - _P1) & _MASK]
        while at + 32 <= n:
            lanes = [_round(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at))]
            at += 32
        h = sum(_rotl(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18))) & _MASK
        for lane in lanes:
            h = ((h ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        h = (seed + _P5) & _MASK
    h = (h + n) & _MASK
    while at + 8 <= n:
        h = (_rotl(h ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= n:
        h = (_rotl(h ^ (struct.unpack_from("<I", data, at)[0] * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        h = _rotl(h ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    h = (h ^ (h >> 33)) * _P2 & _MASK
    h = (h ^ (h >> 29)) * _P3 & _MASK
    return h ^ (h >> 32)


def id_reference(value: Any) -> int:
    """A value as an id: strings and binaries hashed, integers as their 64-bit pattern, signed."""
    if isinstance(value, str):
        value = value.encode()
    word = xxh64_reference(value) if isinstance(value, bytes) else int(value)
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def bags_reference(table: pa.Table, feature: SparseColumn) -> tuple[list[list[int]], list[list[float]]]:
    """Per row the ids and weights of a feature after its null policy (not ``error``) and ``max_length``."""
    rows = table.column(feature.source).to_pylist()
    weight_rows = table.column(feature.weights_column).to_pylist() if feature.weights_column else [None] * len(rows)
    bags: list[list[int]] = []
    weights: list[list[float]] = []
    for row, weight_row in zip(rows, weight_rows):
        if row is None:
            is_oov = feature.null_policy == "oov"
            bags.append([feature.oov_id] if is_oov else [])
            weights.append([1.0] if is_oov else [])
            continue
        ids = row if isinstance(row, list) else [row]
        own = weight_row if isinstance(weight_row, list) else [weight_row]
        pairs = list(zip(ids, own if feature.weights_column else [1.0] * len(ids)))
        if feature.null_policy == "drop":
            pairs = [pair for pair in pairs if pair[0] is not None]
        pairs = pairs[: feature.max_length]
        bags.append([feature.oov_id if i is None else id_reference(i) for i, _ in pairs])
        weights.append([w for _, w in pairs])
    return bags, weights


def dense_reference(table: pa.Table, schema: Schema) -> list[list[float]]:
    """Dense rows, missing values as 0."""
    columns = [table.column(name).to_pylist() for name in schema.dense]

    def number(value: Any) -> float:
        return float(value) if value is not None and math.isfinite(value) else 0.0

    return [[number(column[row]) for column in columns] for row in range(table.num_rows)]
