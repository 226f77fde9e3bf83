"""A training batch: what the feed hands to the step.

Shape letters: B rows, K sparse features, N ids.
"""

from __future__ import annotations

import dataclasses

import torch

from shoal.kernels.jagged import KeyedJaggedTensor


@dataclasses.dataclass
class Batch:
    """One rank's slice of a global batch. Dtypes never depend on the data, also not for 0 rows. Never written to."""

    #: float32 [B, number of dense columns].
    dense_features: torch.Tensor
    #: int64 ids, int64 offsets [K * B + 1], float32 weights if any feature is weighted; stride B.
    sparse_features: KeyedJaggedTensor
    #: float32 [B].
    labels: torch.Tensor
    #: Sample weights, float32 [B], or None: 1 each.
    weights: torch.Tensor | None = None
    #: Columns handed on, int64 [B] each.
    extras: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    #: Position in the epoch of the first row (rows dropped by policy leave gaps).
    position: int = 0
    #: How often a policy was applied in this batch, e.g. {"user_id: nulls": 3}; only what is not 0.
    counters: dict[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def slice(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) as a batch of its own (sparse features are copied, the rest are views)."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(stop, start)
        return Batch(
            dense_features=self.dense_features[start:stop],
            sparse_features=slice_rows(self.sparse_features, start, stop),
            labels=self.labels[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            extras={name: column[start:stop] for name, column in self.extras.items()},
            position=self.position + start,
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for asynchronous copies to a GPU."""
        return dataclasses.replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=None if self.weights is None else self.weights.pin_memory(),
            extras={name: column.pin_memory() for name, column in self.extras.items()},
        )


def slice_rows(features: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    """Rows [start, stop) of every feature of a KeyedJaggedTensor with one stride; O(ids kept), no loop over keys."""
    keys = features.keys()
    stride = features.stride()
    offsets = features.offsets().to(torch.int64)
    begins = offsets[:-1].view(len(keys), stride)[:, start:stop].reshape(-1)
    ends = offsets[1:].view(len(keys), stride)[:, start:stop].reshape(-1)
    lengths = ends - begins
    new_offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=new_offsets[1:])
    # Position i of the slice belongs to bag b with new_offsets[b] <= i; it moves by begins[b] - new_offsets[b].
    moves = torch.repeat_interleave(begins - new_offsets[:-1], lengths)
    index = moves + torch.arange(moves.numel())
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values()[index],
        weights=None if weights is None else weights[index],
        offsets=new_offsets,
        stride=stop - start,
    )
