"""Validation of a KeyedJaggedTensor built by hand. The classes trust their inputs; call this where you do not.

TorchRec's function of the same name, plus what users hit there: a ``length_per_key`` that disagrees with the lengths.
"""
# TorchRec's `typing` spellings stay: its tests compare annotations literally.
# ruff: noqa: UP006, UP035, UP045

import logging
from typing import List, Optional

import torch

from shoal.kernels.errors import DataError
from shoal.kernels.keyed_jagged_tensor import KeyedJaggedTensor
from shoal.kernels.tables import EmbeddingBagConfig

logger = logging.getLogger(__name__)


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Optional[List[EmbeddingBagConfig]] = None) -> bool:
    """Check that lengths, offsets, keys, strides and weights fit together.

    Returns: whether all ids are inside the tables of ``configs`` that read them (True without configs); features that
        are not are logged. Raises DataError, a ValueError, that says what does not fit. Reads the device.
    """
    lengths, offsets, num_values = kjt.lengths_or_none(), kjt.offsets_or_none(), kjt.values().size(0)
    if lengths is None and offsets is None:
        raise DataError("a KeyedJaggedTensor needs lengths or offsets and has neither")
    if lengths is not None and int(lengths.sum()) != num_values:
        raise DataError(f"the sum of lengths, {int(lengths.sum())}, is not the number of values, {num_values}")
    if lengths is not None and lengths.numel() and int(lengths.min()) < 0:
        raise DataError(f"lengths have a negative element, {int(lengths.min())}")
    if offsets is not None:
        _check_offsets(offsets, lengths, num_values)
    _check_keys(kjt)
    weights = kjt.weights_or_none()
    if weights is not None and weights.size(0) != num_values:
        raise DataError(f"there are {weights.size(0)} weights for {num_values} values")
    _check_length_per_key(kjt)
    return configs is None or _is_in_range(kjt, configs)


def _check_offsets(offsets: torch.Tensor, lengths: Optional[torch.Tensor], num_values: int) -> None:
    if offsets.numel() == 0:
        raise DataError("offsets are empty; without bags they are [0]")
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_values:
        raise DataError(
            f"offsets run from {int(offsets[0])} to {int(offsets[-1])}; they must run from 0 to the number of values, "
            f"{num_values}"
        )
    if lengths is not None and not torch.equal(torch.diff(offsets), lengths.view(-1).to(offsets.dtype)):
        raise DataError(f"offsets ({offsets.numel()}) are not the cumulative sum of lengths ({lengths.numel()})")


def _check_keys(kjt: KeyedJaggedTensor) -> None:
    keys, num_bags = kjt.keys(), kjt.lengths().numel()
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise DataError(f"keys must be unique; {twice} occur more than once")
    if not keys:
        if num_bags:
            raise DataError(f"there are no keys for {num_bags} bags")
    elif kjt.variable_stride_per_key():
        strides = kjt.stride_per_key()
        if len(strides) != len(keys) or sum(strides) != num_bags:
            raise DataError(f"keys {keys} have strides {strides}, which do not add up to {num_bags} bags")
    elif num_bags % len(keys) or num_bags != len(keys) * kjt.stride():
        raise DataError(f"{num_bags} bags are not {len(keys)} keys x stride {kjt.stride()}; the keys are {keys}")


def _check_length_per_key(kjt: KeyedJaggedTensor) -> None:
    given = kjt.length_per_key_or_none()
    if given is None or not kjt.keys():
        return
    counts = [int(chunk.sum()) for chunk in torch.split(kjt.lengths().view(-1), kjt.stride_per_key())]
    if list(given) != counts:
        raise DataError(f"length_per_key is {list(given)} but the lengths of keys {kjt.keys()} sum to {counts}")


def _is_in_range(kjt: KeyedJaggedTensor, configs: List[EmbeddingBagConfig]) -> bool:
    is_valid = True
    features = kjt.to_dict()
    for config in configs:
        for name in config.feature_names:
            values = features[name].values() if name in features else torch.empty(0)
            if values.numel() == 0:
                continue
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= config.num_embeddings:
                is_valid = False
                logger.warning(
                    "feature=%s table=%s ids=[%d, %d] allowed=[0, %d]",
                    name,
                    config.name,
                    low,
                    high,
                    config.num_embeddings - 1,
                )
    return is_valid
