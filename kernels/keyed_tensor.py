"""KeyedTensor: dense tensors side by side, each under a key; the output of pooled embeddings. TorchRec's class.

Source of the interface: TorchRec 1.9.2, ``torchrec/sparse/jagged_tensor.py``. Plain torch; scriptable and traceable.

Shape letters: B batch, D width of one key.
"""
# TorchScript and TorchRec's schema test compare annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP035, UP045

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.fx
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import register_pytree_node

from shoal.kernels.jagged_ops import cumulative_sums, rows_string
from shoal.kernels.jagged_tensor import JaggedTensorMeta


@torch.fx.wrap
def regroup_kts(keyed_tensors: List["KeyedTensor"], groups: List[List[str]]) -> List[torch.Tensor]:
    """One tensor per group: the columns of its keys side by side, taken from whichever KeyedTensor has the key.

    Keys may be left out or used several times. Where two KeyedTensors share a key the last one wins.
    """
    columns: Dict[str, torch.Tensor] = {}
    for keyed_tensor in keyed_tensors:
        for key, tensor in keyed_tensor.to_dict().items():
            columns[key] = tensor
    key_dim = keyed_tensors[0].key_dim()
    return [torch.cat([columns[key] for key in group], dim=key_dim) for group in groups]


#: TorchRec's other names of the same function: there they choose between FBGEMM operators.
permute_multi_embedding = regroup_kts
_regroup_keyed_tensors = regroup_kts
_fbgemm_permute_pooled_embs = regroup_kts


def _kt_regroup_arguments(
    value: torch.Tensor, keys: List[List[str]], key_lengths: List[List[int]], groups: List[List[str]]
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, List[int]]:
    """Arguments of FBGEMM's ``permute_multi_embedding`` operator, for those who call it on the values themselves.

    Returns int32 [copies, 6] (input, output, first column in, first column out, width, next), int32 widths of inputs
    and of outputs, and the latter as a list. ``next`` chains the copies of one key for the backward pass: the first
    names the second, later ones the negative of their successor, the last the negative of the number of copies.
    """
    place: Dict[str, Tuple[int, int, int]] = {}
    for index, (names, widths) in enumerate(zip(keys, key_lengths)):
        offsets = cumulative_sums(widths)
        for position, name in enumerate(names):
            place[name] = (index, offsets[position], widths[position])
    copies: List[List[int]] = []
    out_widths: List[int] = []
    rows_of_key: Dict[str, List[int]] = {}
    for index, group in enumerate(groups):
        column = 0
        for name in group:
            source, start, width = place[name]
            rows_of_key.setdefault(name, []).append(len(copies))
            copies.append([source, index, start, column, width, 0])
            column += width
        out_widths.append(column)
    for rows in rows_of_key.values():
        for row, successor in zip(rows, [*rows[1:], len(copies)]):
            if len(rows) > 1:
                copies[row][5] = successor if row == rows[0] else -successor
    in_widths = [sum(widths) for widths in key_lengths]
    as_tensor = [torch.tensor(t, dtype=torch.int32).to(value.device) for t in (copies, in_widths, out_widths)]
    return as_tensor[0], as_tensor[1], as_tensor[2], out_widths


class KeyedTensor(metaclass=JaggedTensorMeta):
    """Dense tensors of one batch, concatenated along ``key_dim``, each found by its key.

    Args:
        keys: names, in the order of the columns.
        length_per_key: width of each key along ``key_dim``.
        values: [B, sum of widths] for ``key_dim`` 1.
        key_dim: the dimension along which keys lie.
    """

    def __init__(
        self,
        keys: List[str],
        length_per_key: List[int],
        values: torch.Tensor,
        key_dim: int = 1,
        # The caches are arguments so that TorchScript can construct them.
        offset_per_key: Optional[List[int]] = None,
        index_per_key: Optional[Dict[str, int]] = None,
    ) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key: Optional[List[int]] = offset_per_key
        self._index_per_key: Optional[Dict[str, int]] = index_per_key

    @staticmethod
    def from_tensor_list(
        keys: List[str], tensors: List[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Concatenate one tensor per key along ``cat_dim``; widths are their sizes along ``key_dim``."""
        length_per_key = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(
            keys=keys, length_per_key=length_per_key, values=torch.cat(tensors, dim=cat_dim), key_dim=key_dim
        )

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.element_size() * self._values.numel()

    def keys(self) -> List[str]:
        """Names, in column order."""
        return self._keys

    def values(self) -> torch.Tensor:
        """All columns."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which keys lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def offset_per_key(self) -> List[int]:
        """First column of each key, and the end of the last."""
        offsets = self._offset_per_key
        if offsets is None:
            offsets = cumulative_sums(self._length_per_key)
            self._offset_per_key = offsets
        return offsets

    def length_per_key(self) -> List[int]:
        """Width of each key."""
        return self._length_per_key

    def _key_indices(self) -> Dict[str, int]:
        indices = self._index_per_key
        if indices is None:
            indices = {key: i for i, key in enumerate(self._keys)}
            self._index_per_key = indices
        return indices

    def __getitem__(self, key: str) -> torch.Tensor:
        """The columns of ``key``, a view."""
        index = self._key_indices()[key]
        return self._values.narrow(
            dim=self._key_dim, start=self.offset_per_key()[index], length=self._length_per_key[index]
        )

    def to_dict(self) -> Dict[str, torch.Tensor]:
        """Key to columns, views."""
        columns = self._values.split(self._length_per_key, dim=self._key_dim)
        return {key: columns[index] for key, index in self._key_indices().items()}

    @staticmethod
    def regroup(keyed_tensors: List["KeyedTensor"], groups: List[List[str]]) -> List[torch.Tensor]:
        """One tensor per group of keys; see ``regroup_kts``."""
        return regroup_kts(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: List["KeyedTensor"], groups: List[List[str]], keys: List[str]
    ) -> Dict[str, torch.Tensor]:
        """Like ``regroup``, under the names ``keys``, one per group."""
        assert len(groups) == len(keys), "Groups and keys should have same length"
        tensors = regroup_kts(keyed_tensors, groups)
        regrouped: Dict[str, torch.Tensor] = {}
        for i, key in enumerate(keys):
            regrouped[key] = tensors[i]
        return regrouped

    @torch.jit.unused
    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the caching allocator that a CUDA ``stream`` uses the values."""
        self._values.record_stream(stream)

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on ``device``."""
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values.to(device, non_blocking=non_blocking),
            key_dim=self._key_dim,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
        )

    @torch.jit.unused
    def __str__(self) -> str:
        if len(self._keys) == 0:
            return "KeyedTensor()\n"
        lines = [f'    "{key}": {rows_string(self[key])}' for key in self._keys]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"


def _flatten(kt: KeyedTensor) -> Tuple[List[torch.Tensor], Tuple[List[str], List[int]]]:
    return [kt._values], (kt._keys, kt._length_per_key)


def _unflatten(tensors: List[Any], context: Tuple[List[str], List[int]]) -> KeyedTensor:
    return KeyedTensor(context[0], context[1], tensors[0])


def _flatten_spec(kt: KeyedTensor, spec: Any) -> List[torch.Tensor]:
    """Flatten in the key order of ``spec``: an exported program may have recorded another order."""
    keys, _ = spec.context
    if keys == kt.keys():
        return [kt.values()]
    return [regroup_kts([kt], [keys])[0]]


register_pytree_node(KeyedTensor, _flatten, _unflatten, serialized_type_name="shoal.kernels.jagged.KeyedTensor")
register_pytree_flatten_spec(KeyedTensor, _flatten_spec)
