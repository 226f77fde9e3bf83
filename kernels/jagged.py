"""TorchRec's data structures, same names, arguments and meaning: the public face of the jagged modules.

``JaggedTensor``, ``KeyedJaggedTensor`` and ``KeyedTensor`` interoperate with TorchRec's by their parts (keys, values,
lengths, weights), not by inheritance: TorchRec is not needed to use them.
"""
# ruff: noqa: UP006, UP035

from typing import Dict

import torch

from shoal.kernels.jagged_tensor import JaggedTensor, jt_is_equal
from shoal.kernels.keyed_jagged_tensor import KeyedJaggedTensor, kjt_is_equal
from shoal.kernels.keyed_tensor import (
    KeyedTensor,
    _fbgemm_permute_pooled_embs,
    _kt_regroup_arguments,
    _regroup_keyed_tensors,
    permute_multi_embedding,
    regroup_kts,
)

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "_fbgemm_permute_pooled_embs",
    "_kt_regroup_arguments",
    "_regroup_keyed_tensors",
    "jt_is_equal",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
]


class ComputeKJTToJTDict(torch.nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module, for traced models."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> Dict[str, JaggedTensor]:
        """One JaggedTensor per key."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(torch.nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module, for traced models."""

    def forward(self, jt_dict: Dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """A KeyedJaggedTensor with the keys in dict order."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
