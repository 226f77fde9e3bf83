"""Functions on lengths, offsets and segments that the jagged classes are made of. Pure torch, no custom operators.

All of them compile with TorchScript, because TorchRec's classes do and users script modules that hold them; hence the
``typing`` spellings and the plain loops.

Shape letters: N values, S segments, P picked segments, B bags, L longest bag.
"""
# TorchScript and TorchRec's schema test compare annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP035, UP045

from typing import List, Optional, Tuple

import torch


def cumulative_sums(counts: List[int]) -> List[int]:
    """``[0, c0, c0 + c1, ...]``: one element longer than ``counts``."""
    sums = [0] * (len(counts) + 1)
    for i in range(len(counts)):
        sums[i + 1] = sums[i] + counts[i]
    return sums


def offsets_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets [S + 1] of segments with ``lengths`` [S], in the dtype of ``lengths``."""
    lengths = lengths.reshape(-1)
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0).to(lengths.dtype)])


def check_integer(tensor: Optional[torch.Tensor], name: str) -> None:
    """Assert that ``tensor`` is None, empty, or of an integer dtype."""
    if tensor is None:
        return
    if tensor.numel() == 0:
        return
    assert tensor.dtype in [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], (
        "{} must be of integer type, but got {}".format(name, tensor.dtype)  # noqa: UP032 (TorchScript)
    )


def pick_slices(tensor: torch.Tensor, offsets: List[int], indices: List[int]) -> torch.Tensor:
    """Concatenate ``tensor[offsets[i] : offsets[i + 1]]`` for i in ``indices``; indices may repeat or be empty.

    The slice bounds are host integers, so this costs no device synchronisation.
    """
    pieces: List[torch.Tensor] = []
    for i in indices:
        pieces.append(tensor[offsets[i] : offsets[i + 1]])
    if len(pieces) == 0:
        return tensor[0:0]
    return torch.cat(pieces)


def segment_positions(lengths: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Positions [sum of picked lengths] of the values of segments ``indices`` [P] among segments of ``lengths`` [S]."""
    lengths = lengths.reshape(-1).long()
    indices = indices.long()
    starts = torch.cumsum(lengths, 0) - lengths
    picked_lengths = lengths[indices]
    picked_starts = torch.cumsum(picked_lengths, 0) - picked_lengths
    shift = torch.repeat_interleave(starts[indices] - picked_starts, picked_lengths)
    return shift + torch.arange(shift.numel(), device=shift.device)


def pick_segments(
    lengths: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, weights: Optional[torch.Tensor]
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The values (and weights) of segments ``indices`` [P], concatenated, from segments of ``lengths`` [S]."""
    positions = segment_positions(lengths, indices)
    picked_weights: Optional[torch.Tensor] = None
    if weights is not None:
        picked_weights = weights[positions]
    return values[positions], picked_weights


def padded_dense(
    values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, width: int, padding_value: float
) -> torch.Tensor:
    """Values [N, ...] as [B, width, ...]: bags cut at ``width`` or filled up with ``padding_value``."""
    columns = torch.arange(width, device=values.device)
    is_present = columns.unsqueeze(0) < lengths.unsqueeze(1)
    if values.numel() == 0:
        shape = [lengths.numel(), width] + list(values.shape[1:])  # noqa: RUF005 (TorchScript)
        return values.new_full(shape, padding_value)
    positions = offsets[:-1].long().unsqueeze(1) + columns.unsqueeze(0)
    rows = values[torch.clamp(positions, max=values.size(0) - 1)]
    for _ in range(values.dim() - 1):
        is_present = is_present.unsqueeze(-1)
    return torch.where(is_present, rows, torch.full_like(rows, padding_value))


def sums_by_split(counts: List[int], splits: List[int]) -> List[int]:
    """Sums of consecutive runs of ``counts``; run i is ``splits[i]`` long."""
    sums: List[int] = []
    start = 0
    for split in splits:
        total = 0
        for i in range(start, start + split):
            total += counts[i]
        sums.append(total)
        start += split
    return sums


def lengths_per_key(lengths: torch.Tensor, stride_per_key: List[int]) -> List[int]:
    """Number of values of each key, given the bag lengths of all keys one after the other; one device read."""
    if len(stride_per_key) == 0:
        return []
    sums: List[torch.Tensor] = []
    for chunk in torch.split(lengths, stride_per_key):
        sums.append(torch.sum(chunk).view(1))
    totals: List[int] = torch.cat(sums).tolist()
    return totals


def rows_string(values: torch.Tensor) -> str:
    """``[a, b]`` for a vector, ``[[a, b], [c, d]]`` for a matrix; ValueError for more dimensions."""
    if values.dim() == 1:
        return "[" + ", ".join([str(value) for value in values.tolist()]) + "]"
    if values.dim() == 2:
        return "[" + ", ".join([rows_string(row) for row in values]) + "]"
    raise ValueError(f"values have {values.dim()} dimensions; only 1 or 2 can be printed")


def bags_string(values: torch.Tensor, offsets: List[int], start: int, end: int) -> str:
    """Bags ``start .. end - 1`` printed as a list of lists."""
    if values.dim() > 2:
        raise ValueError(f"values have {values.dim()} dimensions; only 1 or 2 can be printed")
    return "[" + ", ".join([rows_string(values[offsets[i] : offsets[i + 1]]) for i in range(start, end)]) + "]"


def regroup_ranks(
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: Optional[torch.Tensor],
    stride_per_rank: List[int],
    recat: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    """Received (rank, key) blocks in the order ``recat``: (key, rank). Same number of bags for every key of a rank.

    With equal strides ``recat`` orders blocks of ``stride`` bags; with unequal ones it orders single bags.
    """
    stride = stride_per_rank[0]
    is_uniform = True
    for other in stride_per_rank:
        is_uniform = is_uniform and other == stride
    lengths = lengths.reshape(-1)
    if is_uniform:
        if stride == 0:
            return lengths, values, weights
        blocks = lengths.view(-1, stride)
        values, weights = pick_segments(blocks.sum(dim=1), recat, values, weights)
        return blocks[recat.long()].reshape(-1), values, weights
    values, weights = pick_segments(lengths, recat, values, weights)
    return lengths[recat.long()], values, weights


def regroup_ranks_variable(
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: Optional[torch.Tensor],
    strides: torch.Tensor,
    recat: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    """Like ``regroup_ranks`` with ``strides`` [ranks * keys], the number of bags of every (rank, key) block."""
    ends = torch.cumsum(strides.long(), 0)
    bounds = offsets_from_lengths(lengths)
    values_per_block = bounds[ends] - bounds[ends - strides.long()]
    values, weights = pick_segments(values_per_block, recat, values, weights)
    picked_lengths, _ = pick_segments(strides, recat, lengths, None)
    return picked_lengths, values, weights
