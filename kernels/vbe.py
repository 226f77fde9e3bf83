"""Variable stride per key (VBE): turning a KeyedJaggedTensor whose keys differ in bags into one of a single stride.

Pure torch. Shape letters: F keys, B samples, N values.
"""

from __future__ import annotations

import weakref

import torch

from shoal.kernels.errors import DataError
from shoal.kernels.jagged_ops import pick_segments
from shoal.kernels.keyed_jagged_tensor import KeyedJaggedTensor

#: Expanded batches of VBE batches that are alive, each with the versions of the tensors it was made of.
_expanded: weakref.WeakKeyDictionary[KeyedJaggedTensor, tuple[tuple[int, int], KeyedJaggedTensor]] = (
    weakref.WeakKeyDictionary()
)


def expand_inverse_indices(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch a VBE KeyedJaggedTensor stands for: sample b of key f gets a copy of bag ``inverse[f, b]``.

    Pooled outputs and gradients of the result equal those of looking up the bags once and expanding afterwards.
    Returns ``kjt`` itself when it has a single stride, and one object per ``kjt`` otherwise, so that a session and the
    collections it serves speak of the same batch. DataError where keys differ in bags and there are no inverse
    indices, or where they lack a key.
    """
    if not kjt.variable_stride_per_key():
        return kjt
    versions = (kjt.values()._version, kjt.lengths()._version)
    found = _expanded.get(kjt)
    if found is None or found[0] != versions:
        found = _expanded[kjt] = (versions, _expand(kjt))
    return found[1]


def _expand(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    inverse_indices = kjt.inverse_indices_or_none()
    if inverse_indices is None:
        return _with_single_stride(kjt)
    row_of_key = {key: row for row, key in enumerate(inverse_indices[0])}
    values, weights, lengths = [], [], []
    for key, jagged in kjt.to_dict().items():
        if key not in row_of_key:
            raise DataError(f"the inverse indices have no row for key {key!r}; they have {inverse_indices[0]}")
        picks = inverse_indices[1][row_of_key[key]]
        picked_values, picked_weights = pick_segments(
            jagged.lengths(), picks, jagged.values(), jagged.weights_or_none()
        )
        values.append(picked_values)
        lengths.append(jagged.lengths()[picks])
        if picked_weights is not None:
            weights.append(picked_weights)
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.cat(values) if values else kjt.values(),
        weights=torch.cat(weights) if weights else None,
        lengths=torch.cat(lengths) if lengths else kjt.lengths(),
        stride=int(inverse_indices[1].shape[-1]),
    )


def pad_strides(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same values under one stride: keys with fewer bags get empty ones at the end. For sequence lookups."""
    if not kjt.variable_stride_per_key():
        return kjt
    strides = kjt.stride_per_key()
    stride = max(strides, default=0)
    padded = kjt.lengths().new_zeros((len(strides), stride))
    for row, lengths in enumerate(torch.split(kjt.lengths(), strides)):
        padded[row, : len(lengths)] = lengths
    return KeyedJaggedTensor(
        keys=kjt.keys(), values=kjt.values(), weights=kjt.weights_or_none(), lengths=padded.view(-1), stride=stride
    )


def _with_single_stride(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    strides = kjt.stride_per_key()
    if any(stride != strides[0] for stride in strides):
        raise DataError(
            f"keys {kjt.keys()} have {strides} bags and no inverse indices say which sample uses which bag; "
            "pass inverse_indices or equal numbers of bags"
        )
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=kjt.values(),
        weights=kjt.weights_or_none(),
        lengths=kjt.lengths(),
        stride=strides[0] if strides else 0,
    )
