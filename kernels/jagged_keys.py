"""What a keyed jagged tensor derives from its tensors: stride, values per key, one JaggedTensor per key.

Plain functions, so that the class stays readable; all compile with TorchScript.

Shape letters: F keys, B bags per key (the stride), N values.
"""
# TorchScript compares annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP032, UP035, UP045

from typing import Dict, List, Optional, Tuple

import torch

from shoal.kernels.jagged_ops import lengths_per_key, offsets_from_lengths
from shoal.kernels.jagged_tensor import JaggedTensor


def stride_of(
    keys: List[str],
    lengths: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    stride_per_key_per_rank: Optional[torch.Tensor],
    inverse_indices: Optional[Tuple[List[str], torch.Tensor]],
) -> int:
    if len(keys) == 0:
        return 0
    if stride_per_key_per_rank is not None and stride_per_key_per_rank.numel() > 0:
        if inverse_indices is not None and inverse_indices[1].numel() > 0:
            return inverse_indices[1].shape[-1]
        return int(stride_per_key_per_rank.sum(dim=1).max().item())
    if offsets is not None and offsets.numel() > 0:
        return (offsets.numel() - 1) // len(keys)
    if lengths is not None:
        return lengths.numel() // len(keys)
    return 0


def lengths_matrix(lengths: torch.Tensor, keys: List[str], stride: int) -> torch.Tensor:
    """Lengths as [F, B]; ValueError naming keys, stride and count where they do not fit."""
    if lengths.numel() != len(keys) * stride:
        raise ValueError(
            "lengths has {} elements, which is not {} keys x stride {}; the keys are {}".format(
                lengths.numel(), len(keys), stride, keys
            )
        )
    return lengths.view(len(keys), stride)


def count_values_per_key(
    keys: List[str],
    stride: int,
    stride_per_key: List[int],
    is_variable: bool,
    lengths: Optional[torch.Tensor],
    offsets: Optional[torch.Tensor],
    values: torch.Tensor,
) -> List[int]:
    counts: List[int] = []
    if len(keys) == 0:
        return counts
    if values.is_meta:
        # A meta tensor has no lengths to read: spread the values evenly.
        counts = [values.numel() // len(keys)] * len(keys)
        counts[0] += values.numel() % len(keys)
        return counts
    if lengths is None:
        if offsets is None or offsets.numel() == 0:
            return counts
        lengths = torch.diff(offsets)
    if is_variable:
        return lengths_per_key(lengths, stride_per_key)
    if lengths.numel() == 0:
        return [0] * len(keys)
    sums: List[int] = torch.sum(lengths_matrix(lengths, keys, stride), dim=1).tolist()
    return sums


def split_by_key(
    keys: List[str],
    stride: int,
    stride_per_key: List[int],
    is_variable: bool,
    length_per_key: List[int],
    values: torch.Tensor,
    lengths: torch.Tensor,
    weights: Optional[torch.Tensor],
    compute_offsets: bool,
) -> Dict[str, JaggedTensor]:
    jt_dict: Dict[str, JaggedTensor] = {}
    if len(length_per_key) == 0:
        return jt_dict
    values_by_key = torch.split(values, length_per_key)
    weights_by_key = torch.split(weights, length_per_key) if weights is not None else values_by_key
    if is_variable:
        lengths_by_key = list(torch.split(lengths, stride_per_key))
    elif lengths.numel() == 0:
        lengths_by_key = [torch.zeros(0, dtype=lengths.dtype, device=lengths.device) for _ in keys]
    else:
        lengths_by_key = list(torch.unbind(lengths_matrix(lengths, keys, stride), dim=0))
    if is_variable or lengths.numel() == 0:
        # Offsets [0] of an integer batch of no bags, as in TorchRec 1.9.2; floats only occur with no bags at all.
        is_integer = not lengths.is_floating_point()
        offsets_by_key = [offsets_from_lengths(one) if is_integer else one for one in lengths_by_key]
    else:
        by_key = lengths.view(len(keys), stride)
        cumulative = torch.cumsum(by_key, dim=1).to(lengths.dtype)
        offsets_by_key = list(torch.unbind(torch.cat([by_key.new_zeros((len(keys), 1)), cumulative], dim=1), dim=0))
    for i, key in enumerate(keys):
        jt_dict[key] = JaggedTensor(
            values=values_by_key[i],
            weights=weights_by_key[i] if weights is not None else None,
            lengths=lengths_by_key[i],
            offsets=offsets_by_key[i] if compute_offsets else None,
        )
    return jt_dict
