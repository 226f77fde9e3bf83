"""Packing of messages and the buffers that hold them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.transport import ByteBuffer, name_ranks, pack, padded


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.data())
def test_messages_lie_back_to_back_with_ones_own_last(sizes: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(sizes) - 1))
    packing = pack(np.array(sizes, np.int64), rank)
    wire = padded(np.array(sizes, np.int64)).tolist()
    order = [r for r in range(len(sizes)) if r != rank] + [rank]
    at = 0
    for r in order:
        assert packing.offsets[r] == at and at % 64 == 0
        at += wire[r]
    assert packing.num_total == at and packing.num_wire == at - wire[rank]
    assert packing.splits == [0 if r == rank else wire[r] for r in range(len(sizes))]


def test_buffers_are_aligned_and_grow() -> None:
    buffer = ByteBuffer()
    first = buffer.reserve(0)
    assert first % 64 == 0 and first != 0
    assert buffer.reserve(10) == first
    assert buffer.reserve(10_000_000) % 64 == 0
    assert buffer.tensor.numel() >= 10_000_000


def test_ranks_are_listed_up_to_a_limit() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 2]) == "ranks 2, 5"
    assert name_ranks(range(20)).endswith("15 and 4 more")
