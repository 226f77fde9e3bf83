"""Deterministic sum of a flat float32 buffer over ranks, as sections that ride in exchanges made for something else.

Each element is summed in rank order, ((g0 + g1) + g2) + ..., whoever sums it, so both ways give every rank the same
bits: ``direct`` (every rank sends all of its buffer to all; one section of one round) and ``sliced`` (every rank sends
slice p to rank p, which sums it; a second round brings the sums to all). Direct moves W/2 times the bytes of sliced and
needs no second round, so it is for small buffers. The layout is fixed by the length alone.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.kernels import _shm  # type: ignore[attr-defined]

#: Buffers above this many bytes are reduced in slices unless told otherwise.
SLICED_FROM_BYTES = 1 << 20
#: Slices begin at multiples of this many elements (64 bytes).
_SLICE_ELEMENTS = 16


class DenseReducer:
    """Sums one buffer of ``num_elements`` float32 over ``world_size`` ranks, in place.

    First round: ``out_bytes``, ``in_bytes``, ``write``, ``read``. Where ``is_sliced``, a second round with
    ``gather_out_bytes``, ``gather_in_bytes``, ``gather_write``, ``gather_read``. All sizes are int64 [W], 0 for this
    rank itself; all addresses are int64 [W], those of the sections in ``Round``.
    """

    def __init__(
        self, num_elements: int, rank: int, world_size: int, *, sliced_from_bytes: int = SLICED_FROM_BYTES
    ) -> None:
        self.num_elements, self.rank, self.world_size = num_elements, rank, world_size
        self.is_sliced = world_size > 2 and 4 * num_elements > sliced_from_bytes
        per_rank = -(-num_elements // (world_size * _SLICE_ELEMENTS)) * _SLICE_ELEMENTS
        starts = np.minimum(np.arange(world_size + 1, dtype=np.int64) * per_rank, num_elements)
        #: int64 [W]: first byte and length of each rank's slice.
        self._starts = np.ascontiguousarray(4 * starts[:-1])
        self._lengths = np.ascontiguousarray(4 * np.diff(starts))
        whole = np.full(world_size, 4 * num_elements, np.int64)
        mine = np.full(world_size, self._lengths[rank], np.int64)
        self._whole_starts = np.zeros(world_size, np.int64)
        self._mine_starts = np.full(world_size, self._starts[rank], np.int64)
        self.out_bytes = self._without_self(self._lengths if self.is_sliced else whole)
        self.in_bytes = self._without_self(mine if self.is_sliced else whole)
        self.gather_out_bytes = self._without_self(mine)
        self.gather_in_bytes = self._without_self(self._lengths)

    def write(self, flat: torch.Tensor, addresses: np.ndarray) -> None:
        """Copy this rank's contributions to the first round's send sections."""
        starts = self._starts if self.is_sliced else self._whole_starts
        _shm.scatter_copy(self._address(flat), starts, self.out_bytes, np.ascontiguousarray(addresses))

    def read(self, flat: torch.Tensor, addresses: np.ndarray) -> None:
        """Sum the first round's received sections into ``flat``: all of it, or this rank's slice of it."""
        sources = np.array(addresses, np.int64)
        start, num_bytes = (self._starts[self.rank], self._lengths[self.rank]) if self.is_sliced else (0, flat.nbytes)
        own = self._address(flat) + int(start)
        sources[self.rank] = own
        _shm.sum_in_order(sources, int(num_bytes) // 4, own)

    def gather_write(self, flat: torch.Tensor, addresses: np.ndarray) -> None:
        """Copy this rank's summed slice to the second round's send sections."""
        _shm.scatter_copy(
            self._address(flat), self._mine_starts, self.gather_out_bytes, np.ascontiguousarray(addresses)
        )

    def gather_read(self, flat: torch.Tensor, addresses: np.ndarray) -> None:
        """Copy the other ranks' summed slices into ``flat``."""
        _shm.gather_copy(np.ascontiguousarray(addresses), self.gather_in_bytes, self._starts, self._address(flat))

    def _address(self, flat: torch.Tensor) -> int:
        assert flat.dtype == torch.float32 and flat.is_contiguous() and flat.numel() == self.num_elements
        return flat.data_ptr()

    def _without_self(self, sizes: np.ndarray) -> np.ndarray:
        result = np.array(sizes, np.int64)
        result[self.rank] = 0
        return result


def sum_reference(buffers: list[torch.Tensor]) -> torch.Tensor:
    """The definition: float32 additions in rank order."""
    total = buffers[0].clone()
    for buffer in buffers[1:]:
        total = total + buffer
    return total
