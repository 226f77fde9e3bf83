"""The dense reduction gives every rank the same bits, whichever way it takes and whoever sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels.dense_reduce import DenseReducer, sum_reference


def _round(outs: np.ndarray, ins: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[list[np.ndarray]]]:
    """Addresses of send and receive sections of all ranks; both ends share memory, as an ideal transport would."""
    world_size = len(outs)
    assert (outs == ins.T).all()
    boxes = [[np.zeros(max(1, outs[a][b]), np.uint8) for b in range(world_size)] for a in range(world_size)]
    send = [np.array([box.ctypes.data for box in boxes[rank]], np.int64) for rank in range(world_size)]
    recv = [
        np.array([boxes[peer][rank].ctypes.data for peer in range(world_size)], np.int64) for rank in range(world_size)
    ]
    return send, recv, boxes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_elements", [0, 1, 15, 64, 1000, 5003])
def test_direct_and_sliced_give_the_bits_of_the_reference(world_size: int, num_elements: int) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    # Magnitudes differ by 2^20, so another order of addition would show.
    flats = [torch.randn(num_elements, generator=generator) * 2.0 ** (10 * (rank % 3)) for rank in range(world_size)]
    expected = sum_reference(flats)
    for limit in (1 << 30, 0):
        copies = [flat.clone() for flat in flats]
        reducers = [DenseReducer(num_elements, r, world_size, sliced_from_bytes=limit) for r in range(world_size)]
        assert reducers[0].is_sliced == (limit == 0 and world_size > 2 and num_elements > 0)
        send, recv, _boxes = _round(np.stack([r.out_bytes for r in reducers]), np.stack([r.in_bytes for r in reducers]))
        for reducer, flat, addresses in zip(reducers, copies, send):
            reducer.write(flat, addresses)
        for reducer, flat, addresses in zip(reducers, copies, recv):
            reducer.read(flat, addresses)
        if reducers[0].is_sliced:
            send, recv, _boxes = _round(
                np.stack([r.gather_out_bytes for r in reducers]), np.stack([r.gather_in_bytes for r in reducers])
            )
            for reducer, flat, addresses in zip(reducers, copies, send):
                reducer.gather_write(flat, addresses)
            for reducer, flat, addresses in zip(reducers, copies, recv):
                reducer.gather_read(flat, addresses)
        for flat in copies:
            assert torch.equal(flat.view(torch.int32), expected.view(torch.int32))
