"""What a table's rows cost on the wire in one flow or the other (DESIGN 4). Pure.

rows = U * (value + gradient) + U * i; pooled = P * (value + gradient) + U * i + 4 * N + 4 * P (+ 8 * N weighted): U
unique ids, N ids, P partial sums, ``value`` and ``gradient`` the bytes of an encoded row, i the bytes of an id.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.kernels.spec import Flow, WireCodecs, encoded_bytes

#: An id in the ids exchange: int64, the upper bound (declared ranges that fit travel as int32).
ID_BYTES = 8


class FlowCounts(NamedTuple):
    """Of one table in one step, or a sum over ranks and steps."""

    num_unique: float
    num_ids: float
    #: Non-empty (bag, row block) pairs; (bag, owner) pairs where partial sums are made per owner.
    num_sums: float


def flow_bytes(
    flow: Flow, counts: FlowCounts, embedding_dim: int, wire: WireCodecs, *, is_weighted: bool = False
) -> float:
    """Bytes both ways, if no row were the asking rank's own; ``wire``: its codecs, not its flow."""
    both_ways = encoded_bytes(wire.values, embedding_dim) + encoded_bytes(wire.gradients, embedding_dim)
    ids = counts.num_unique * ID_BYTES
    if flow is Flow.ROWS:
        return counts.num_unique * both_ways + ids
    weights = 8 * counts.num_ids if is_weighted else 0.0
    return counts.num_sums * both_ways + ids + 4 * counts.num_ids + 4 * counts.num_sums + weights
