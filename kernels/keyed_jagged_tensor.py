"""KeyedJaggedTensor: the sparse features of a batch, every feature (key) a column of bags. TorchRec's class.

Source of the interface: TorchRec 1.9.2, ``torchrec/sparse/jagged_tensor.py``. The bodies are our own, in plain torch,
and compile with TorchScript and trace with torch.fx, as TorchRec's do.

Layout: key-major. ``lengths`` holds key 0's bags 0..B-1, then key 1's, ...; ``offsets`` has one entry more.
With variable stride per key (VBE) every key has its own number of bags, as a sum over ranks.

Shape letters: F keys, B bags per key (the stride), R ranks, N values.
"""
# TorchScript and TorchRec's schema test compare annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP007, UP032, UP035, UP045, RUF012

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
import torch.fx
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from shoal.kernels.jagged_keys import count_values_per_key, split_by_key, stride_of
from shoal.kernels.jagged_ops import (
    bags_string,
    check_integer,
    cumulative_sums,
    offsets_from_lengths,
    pick_slices,
    regroup_ranks,
    regroup_ranks_variable,
    sums_by_split,
)
from shoal.kernels.jagged_tensor import JaggedTensor, JaggedTensorMeta, tensors_equal


class KeyedJaggedTensor(metaclass=JaggedTensorMeta):
    """F keys of bags, optionally weighted. What is derived from the tensors is computed when asked for and kept.

    Args:
        keys: names, in the order of the bags.
        values: [N, ...]: the bags of key 0, then of key 1, ...
        weights: like ``values``, or None.
        lengths: integer [F * B]; lengths or offsets is required.
        offsets: integer [F * B + 1].
        stride: B; computed from offsets or lengths if not given.
        stride_per_key_per_rank: int [F, R] on the CPU (or nested lists): number of bags of each key from each rank.
        inverse_indices: (keys, int [F, B]): for VBE, the bag of each key that each of the B samples uses.

    The other arguments are caches of the methods of the same name. TorchScript needs them, and needs methods to pass
    all of them: while it compiles a method it does not know the constructor's defaults.
    """

    _fields = ["_values", "_weights", "_lengths", "_offsets", "_stride_per_key_per_rank", "_inverse_indices"]

    def __init__(
        self,
        keys: List[str],
        values: torch.Tensor,
        weights: Optional[torch.Tensor] = None,
        lengths: Optional[torch.Tensor] = None,
        offsets: Optional[torch.Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[Union[torch.IntTensor, List[List[int]]]] = None,
        stride_per_key: Optional[List[int]] = None,
        length_per_key: Optional[List[int]] = None,
        lengths_offset_per_key: Optional[List[int]] = None,
        offset_per_key: Optional[List[int]] = None,
        index_per_key: Optional[Dict[str, int]] = None,
        jt_dict: Optional[Dict[str, JaggedTensor]] = None,
        inverse_indices: Optional[Tuple[List[str], torch.Tensor]] = None,
    ) -> None:
        self._keys: List[str] = keys
        self._values: torch.Tensor = values
        self._weights: Optional[torch.Tensor] = weights
        check_integer(offsets, "offsets")
        check_integer(lengths, "lengths")
        self._lengths: Optional[torch.Tensor] = lengths
        self._offsets: Optional[torch.Tensor] = offsets
        self._stride: Optional[int] = stride
        self._stride_per_key_per_rank: Optional[torch.IntTensor] = (
            torch.tensor(stride_per_key_per_rank, dtype=torch.int32, device="cpu")
            if isinstance(stride_per_key_per_rank, list)
            else stride_per_key_per_rank
        )
        self._stride_per_key: Optional[List[int]] = stride_per_key
        self._length_per_key: Optional[List[int]] = length_per_key
        self._lengths_offset_per_key: Optional[List[int]] = lengths_offset_per_key
        self._offset_per_key: Optional[List[int]] = offset_per_key
        self._index_per_key: Optional[Dict[str, int]] = index_per_key
        self._jt_dict: Optional[Dict[str, JaggedTensor]] = jt_dict
        self._inverse_indices: Optional[Tuple[List[str], torch.Tensor]] = inverse_indices

    # Construction

    @staticmethod
    def from_offsets_sync(
        keys: List[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: Optional[torch.Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[List[List[int]]] = None,
        inverse_indices: Optional[Tuple[List[str], torch.Tensor]] = None,
    ) -> "KeyedJaggedTensor":
        """From offsets; lengths and offsets per key are computed now."""
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            weights=weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: List[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: Optional[torch.Tensor] = None,
        stride: Optional[int] = None,
        stride_per_key_per_rank: Optional[List[List[int]]] = None,
        inverse_indices: Optional[Tuple[List[str], torch.Tensor]] = None,
    ) -> "KeyedJaggedTensor":
        """From lengths; lengths and offsets per key are computed now."""
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            weights=weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Dict[str, JaggedTensor], force_variable_stride: bool = False) -> "KeyedJaggedTensor":
        """From one JaggedTensor per key, in dict order.

        Equal numbers of bags make a plain KeyedJaggedTensor (unless ``force_variable_stride``), unequal ones VBE.
        """
        return _from_jt_dict(jt_dict, force_variable_stride)

    @staticmethod
    def concat(kjt_list: List["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The keys of all inputs; they must agree on stride, weights and VBE (ValueError or AssertionError)."""
        return _concat(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Optional[torch.device] = None,
        values_dtype: Optional[torch.dtype] = None,
        weights_dtype: Optional[torch.dtype] = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No keys and stride 0."""
        keys: List[str] = []
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: Optional[torch.device] = None) -> "KeyedJaggedTensor":
        """Without a device: no keys, same dtypes and stride(s). With one: uninitialised tensors of the shapes there."""
        if device is None:
            return _empty_like_stride(kjt)
        return _empty_like_on_device(kjt, device)

    # Reading

    def sync(self) -> "KeyedJaggedTensor":
        """Compute lengths and offsets per key; returns self."""
        self.length_per_key()
        self.offset_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forget lengths and offsets per key; returns self."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of the tensors held now (tensors not yet computed count nothing)."""
        size = self._values.element_size() * self._values.numel()
        for tensor in [self._weights, self._lengths, self._offsets, self._stride_per_key_per_rank]:
            if tensor is not None:
                size += tensor.element_size() * tensor.numel()
        return size

    def keys(self) -> List[str]:
        """Names, in the order of the bags."""
        return self._keys

    def values(self) -> torch.Tensor:
        """[N, ...]."""
        return self._values

    def weights(self) -> torch.Tensor:
        """Weights like the values; AssertionError without weights."""
        weights = self._weights
        assert weights is not None, "This (Keyed)JaggedTensor doesn't have weights."
        return weights

    def weights_or_none(self) -> Optional[torch.Tensor]:
        """The weights, or None."""
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Integer [F * B]; computed from the offsets at the first call."""
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None, "Must provide lengths or offsets"
            lengths = torch.diff(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Optional[torch.Tensor]:
        """The lengths if they are known already."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Integer [F * B + 1]; computed from the lengths at the first call."""
        offsets = self._offsets
        if offsets is None:
            lengths = self._lengths
            assert lengths is not None, "Must provide lengths or offsets"
            offsets = offsets_from_lengths(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Optional[torch.Tensor]:
        """The offsets if they are known already."""
        return self._offsets

    def stride(self) -> int:
        """Number of samples B. For VBE: that of the inverse indices if there are any, else of the longest key."""
        stride = self._stride
        if stride is None:
            stride = stride_of(
                self._keys, self._lengths, self._offsets, self._stride_per_key_per_rank, self._inverse_indices
            )
            self._stride = stride
        return stride

    def stride_per_key(self) -> List[int]:
        """Number of bags of each key."""
        strides = self._stride_per_key
        if strides is None:
            per_rank = self._stride_per_key_per_rank
            if per_rank is None:
                strides = [self.stride()] * len(self._keys)
            elif per_rank.dim() != 2:
                # What is left of the strides after a permutation to no keys at all.
                empty: List[int] = []
                strides = empty
            else:
                sums: List[int] = per_rank.sum(dim=1).tolist()
                strides = sums
            self._stride_per_key = strides
        return strides

    def stride_per_key_per_rank(self) -> List[List[int]]:
        """Number of bags of each key from each rank; empty unless VBE."""
        per_rank = self._stride_per_key_per_rank
        if per_rank is None:
            nothing: List[List[int]] = []
            return nothing
        strides: List[List[int]] = per_rank.tolist()
        return strides

    def variable_stride_per_key(self) -> bool:
        """Whether keys may have different numbers of bags (VBE)."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> Tuple[List[str], torch.Tensor]:
        """(keys, int [F, B]); AssertionError without inverse indices."""
        inverse_indices = self._inverse_indices
        assert inverse_indices is not None, "This KJT doesn't have inverse indices."
        return inverse_indices

    def inverse_indices_or_none(self) -> Optional[Tuple[List[str], torch.Tensor]]:
        """The inverse indices, or None."""
        return self._inverse_indices

    def _key_indices(self) -> Dict[str, int]:
        indices = self._index_per_key
        if indices is None:
            indices = {key: i for i, key in enumerate(self._keys)}
            self._index_per_key = indices
        return indices

    def index_per_key(self) -> Dict[str, int]:
        """Position of each key."""
        return self._key_indices()

    def length_per_key(self) -> List[int]:
        """Number of values of each key; one read of the device at the first call."""
        length_per_key = self._length_per_key
        if length_per_key is None:
            length_per_key = count_values_per_key(
                self._keys,
                self.stride(),
                self.stride_per_key(),
                self.variable_stride_per_key(),
                self._lengths,
                self._offsets,
                self._values,
            )
            self._length_per_key = length_per_key
        return length_per_key

    def length_per_key_or_none(self) -> Optional[List[int]]:
        """The lengths per key if they are known already."""
        return self._length_per_key

    def offset_per_key(self) -> List[int]:
        """First value of each key, and the end of the last."""
        offset_per_key = self._offset_per_key
        if offset_per_key is None:
            offset_per_key = cumulative_sums(self.length_per_key())
            self._offset_per_key = offset_per_key
        return offset_per_key

    def offset_per_key_or_none(self) -> Optional[List[int]]:
        """The offsets per key if they are known already."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> List[int]:
        """First bag of each key, and the end of the last."""
        offsets = self._lengths_offset_per_key
        if offsets is None:
            offsets = cumulative_sums(self.stride_per_key())
            self._lengths_offset_per_key = offsets
        return offsets

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of ``key`` with lengths only, views. KeyError naming the keys there are."""
        indices = self._key_indices()
        if key not in indices:
            raise KeyError("no key '{}'; the keys are {}".format(key, self._keys))
        index = indices[key]
        offsets = self.offset_per_key()
        start = offsets[index]
        end = offsets[index + 1] if index + 1 < len(offsets) else start
        bags = self.lengths_offset_per_key()
        weights = self._weights
        return JaggedTensor(
            values=self._values[start:end],
            weights=None if weights is None else weights[start:end],
            lengths=self.lengths().view(-1)[bags[index] : bags[index + 1]],
            offsets=None,
        )

    def to_dict(self, compute_offsets: bool = True) -> Dict[str, JaggedTensor]:
        """All keys as JaggedTensors with their own offsets from 0; kept and returned again by later calls."""
        jt_dict = self._jt_dict
        if jt_dict is None:
            jt_dict = split_by_key(
                self._keys,
                self.stride(),
                self.stride_per_key(),
                self.variable_stride_per_key(),
                self.length_per_key(),
                self._values,
                self.lengths(),
                self._weights,
                compute_offsets,
            )
            self._jt_dict = jt_dict
        return jt_dict

    # Rearranging

    def split(self, segments: List[int]) -> List["KeyedJaggedTensor"]:
        """Consecutive runs of keys, ``segments[i]`` keys each, as views.

        A run of all keys is self; a run of no keys is empty and keeps the stride.
        """
        offsets = self.offset_per_key()
        bags = self.lengths_offset_per_key()
        lengths = self.lengths().view(-1)
        weights = self._weights
        per_rank = self._stride_per_key_per_rank
        splits: List[KeyedJaggedTensor] = []
        start = 0
        for segment in segments:
            end = start + segment
            if segment == len(self._keys):
                splits.append(self)
            else:
                # As in TorchRec, an empty run has int32 lengths and no offset at all, whatever the dtypes of ours.
                is_empty = segment == 0
                nothing = torch.empty(0, dtype=torch.int32, device=self.device())
                splits.append(
                    KeyedJaggedTensor(
                        keys=self._keys[start:end],
                        values=self._values[offsets[start] : offsets[end]],
                        weights=None if weights is None else weights[offsets[start] : offsets[end]],
                        lengths=nothing if is_empty else lengths[bags[start] : bags[end]],
                        offsets=nothing if is_empty else None,
                        stride=self._stride,
                        stride_per_key_per_rank=None if per_rank is None else per_rank[start:end, :],
                        stride_per_key=None,
                        length_per_key=None if is_empty else self.length_per_key()[start:end],
                        lengths_offset_per_key=None,
                        offset_per_key=None,
                        index_per_key=None,
                        jt_dict=None,
                        inverse_indices=None,
                    )
                )
            start = end
        return splits

    def permute(self, indices: List[int], indices_tensor: Optional[torch.Tensor] = None) -> "KeyedJaggedTensor":
        """The keys at ``indices``, which may repeat or leave out keys. Drops the inverse indices.

        ``indices_tensor`` is the same on the device, to save a copy.
        """
        length_per_key = self.length_per_key()
        offset_per_key = self.offset_per_key()
        strides = self._stride_per_key
        per_rank = self._stride_per_key_per_rank
        if self.variable_stride_per_key():
            lengths = pick_slices(self.lengths(), self.lengths_offset_per_key(), indices)
        else:
            if indices_tensor is None:
                indices_tensor = torch.tensor(indices, dtype=torch.long, device=self.device())
            by_key = self.lengths().view(len(self._keys), self.stride())
            lengths = torch.index_select(by_key, 0, indices_tensor.long()).view(-1)
        weights = self._weights
        return KeyedJaggedTensor(
            keys=[self._keys[i] for i in indices],
            values=pick_slices(self._values, offset_per_key, indices),
            weights=None if weights is None else pick_slices(weights, offset_per_key, indices),
            lengths=lengths,
            offsets=None,
            stride=self._stride,
            stride_per_key_per_rank=None if per_rank is None else per_rank[indices, :],
            stride_per_key=None if strides is None else [strides[i] for i in indices],
            length_per_key=[length_per_key[i] for i in indices] if len(indices) > 0 else None,
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=None,
        )

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The same with one-dimensional lengths. Drops the inverse indices."""
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self.lengths().view(-1),
            offsets=None,
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            stride_per_key=None,
            length_per_key=self.length_per_key(),
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=None,
        )

    # Moving

    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Copy the tensors of ``kjt`` into ours, in place, and take over what it knows per key; returns self."""
        self._stride_per_key_per_rank = kjt._stride_per_key_per_rank
        self._stride_per_key = kjt._stride_per_key
        self._length_per_key = kjt._length_per_key
        self._lengths_offset_per_key = kjt._lengths_offset_per_key
        self._offset_per_key = kjt._offset_per_key
        self._index_per_key = kjt._index_per_key
        self._jt_dict = None
        self._values.copy_(kjt._values, non_blocking=non_blocking)
        weights, new_weights = self._weights, kjt._weights
        if weights is not None and new_weights is not None:
            weights.copy_(new_weights, non_blocking=non_blocking)
        lengths, new_lengths = self._lengths, kjt._lengths
        if lengths is not None and new_lengths is not None:
            lengths.copy_(new_lengths, non_blocking=non_blocking)
        offsets, new_offsets = self._offsets, kjt._offsets
        if offsets is not None and new_offsets is not None:
            offsets.copy_(new_offsets, non_blocking=non_blocking)
        inverse, new_inverse = self._inverse_indices, kjt._inverse_indices
        if inverse is not None and new_inverse is not None:
            self._inverse_indices = (new_inverse[0], inverse[1].copy_(new_inverse[1], non_blocking=non_blocking))
        return self

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: Optional[torch.dtype] = None
    ) -> "KeyedJaggedTensor":
        """A copy on ``device``; ``dtype`` applies to the weights only."""
        weights = self._weights
        if weights is not None:
            weights = weights.to(device=device, non_blocking=non_blocking)
            if dtype is not None:
                weights = weights.to(dtype)
        lengths = self._lengths
        offsets = self._offsets
        inverse = self._inverse_indices
        if inverse is not None:
            inverse = (inverse[0], inverse[1].to(device, non_blocking=non_blocking))
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values.to(device, non_blocking=non_blocking),
            weights=weights,
            lengths=lengths.to(device, non_blocking=non_blocking) if lengths is not None else None,
            offsets=offsets.to(device, non_blocking=non_blocking) if offsets is not None else None,
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            stride_per_key=self._stride_per_key,
            length_per_key=self._length_per_key,
            lengths_offset_per_key=self._lengths_offset_per_key,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
            jt_dict=None,
            inverse_indices=inverse,
        )

    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked host memory."""
        weights = self._weights
        lengths = self._lengths
        offsets = self._offsets
        inverse = self._inverse_indices
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values.pin_memory(),
            weights=weights.pin_memory() if weights is not None else None,
            lengths=lengths.pin_memory() if lengths is not None else None,
            offsets=offsets.pin_memory() if offsets is not None else None,
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            stride_per_key=self._stride_per_key,
            length_per_key=self._length_per_key,
            lengths_offset_per_key=self._lengths_offset_per_key,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
            jt_dict=None,
            inverse_indices=(inverse[0], inverse[1].pin_memory()) if inverse is not None else None,
        )

    @torch.jit.unused
    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the caching allocator that a CUDA ``stream`` uses these tensors."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets):
            if tensor is not None:
                tensor.record_stream(stream)

    @torch.jit.unused
    def clear_storage(self) -> int:
        """Free the memory of all tensors while the object lives on; returns the bytes freed."""
        size = 0
        for tensor in (self._values, self._lengths, self._offsets, self._weights):
            if tensor is not None:
                size += tensor.element_size() * tensor.numel()
                tensor.untyped_storage().resize_(0)
        return size

    @torch.jit.unused
    def __str__(self) -> str:
        if len(self._keys) == 0 or (self._offsets is None and self._lengths is None):
            return "KeyedJaggedTensor()\n"
        bounds = self.offsets().tolist()
        bags = cumulative_sums(self.stride_per_key())
        lines: List[str] = []
        for i, key in enumerate(self._keys):
            text = bags_string(self._values, bounds, bags[i], bags[i + 1])
            if self._weights is not None:
                weights = bags_string(self._weights, bounds, bags[i], bags[i + 1])
                text = '{\n        "values": ' + text + ',\n        "weights": ' + weights + "\n    }"
            lines.append(f'    "{key}": {text}')
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"

    # Exchanging among ranks

    def dist_labels(self) -> List[str]:
        """Names of ``dist_tensors``, in order."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: List[int]) -> List[List[int]]:
        """Elements of each of ``dist_tensors`` per destination; ``key_splits`` are the keys per destination."""
        values_per_split = sums_by_split(self.length_per_key(), key_splits)
        splits = [sums_by_split(self.stride_per_key(), key_splits), values_per_split]
        if self.variable_stride_per_key():
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(values_per_split)
        return splits

    def dist_tensors(self) -> List[torch.Tensor]:
        """What an exchange has to send: lengths, values, strides if VBE, weights if any."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key()).to(self.device()))
        weights = self._weights
        if weights is not None:
            tensors.append(weights)
        return tensors

    @staticmethod
    def dist_init(
        keys: List[str],
        tensors: List[torch.Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Optional[torch.Tensor],
        stride_per_rank: Optional[List[int]],
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """From ``dist_tensors`` received of ``num_workers`` ranks, rank-major; ``recat`` makes them key-major."""
        assert len(tensors) in [2, 3, 4]
        lengths = tensors[0]
        values = tensors[1]
        num_unweighted = 3 if variable_stride_per_key else 2
        weights = tensors[-1] if len(tensors) > num_unweighted else None
        if not variable_stride_per_key:
            assert stride_per_rank is not None
            if recat is not None:
                lengths, values, weights = regroup_ranks(lengths, values, weights, stride_per_rank, recat)
            return KeyedJaggedTensor(
                keys=keys, values=values, weights=weights, lengths=lengths, stride=sum(stride_per_rank)
            ).sync()
        strides = tensors[2]
        per_rank = strides.view(num_workers, len(keys)).T.cpu()
        if recat is not None:
            lengths, values, weights = regroup_ranks_variable(lengths, values, weights, strides, recat)
        if per_rank.numel() == 0:
            per_rank = torch.zeros((len(keys), 1), device="cpu", dtype=torch.int64)
        if stagger > 1:
            per_rank = per_rank[:, torch.arange(num_workers).view(stagger, -1).T.reshape(-1)]
        return KeyedJaggedTensor(
            keys=keys, values=values, weights=weights, lengths=lengths, stride_per_key_per_rank=per_rank
        ).sync()


def _from_jt_dict(jt_dict: Dict[str, JaggedTensor], force_variable_stride: bool) -> KeyedJaggedTensor:
    values: List[torch.Tensor] = []
    lengths: List[torch.Tensor] = []
    weights: List[torch.Tensor] = []
    strides: List[int] = []
    for jt in jt_dict.values():
        values.append(jt.values())
        lengths.append(jt.lengths())
        strides.append(len(jt.lengths()))
        weight = jt.weights_or_none()
        if weight is not None:
            weights.append(weight)
    if len(weights) > 0 and len(weights) != len(values):
        raise ValueError("Can't merge weighted and unweighted JaggedTensors")
    is_uniform = not force_variable_stride
    for stride in strides:
        is_uniform = is_uniform and stride == strides[0]
    per_rank: Optional[torch.Tensor] = None
    if not is_uniform:
        per_rank = torch.tensor(strides, dtype=torch.int32, device="cpu").reshape(-1, 1)
    return KeyedJaggedTensor(
        keys=list(jt_dict.keys()),
        values=torch.cat(values),
        weights=torch.cat(weights) if len(weights) > 0 else None,
        lengths=torch.cat(lengths),
        stride=strides[0] if is_uniform else None,
        stride_per_key_per_rank=per_rank,
    ).sync()


@torch.fx.wrap
def _concat(kjt_list: List[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if len(kjt_list) == 0:
        raise ValueError("Can't concat empty KJT list")
    is_weighted = kjt_list[0].weights_or_none() is not None
    is_variable = kjt_list[0].variable_stride_per_key()
    has_inverse = kjt_list[0].inverse_indices_or_none() is not None
    keys: List[str] = []
    values: List[torch.Tensor] = []
    weights: List[torch.Tensor] = []
    lengths: List[torch.Tensor] = []
    strides: List[List[int]] = []
    length_per_key: List[int] = []
    has_length_per_key = True
    inverse_keys: List[str] = []
    inverse_tensors: List[torch.Tensor] = []
    for kjt in kjt_list:
        if is_weighted != (kjt.weights_or_none() is not None):
            raise ValueError("Can't merge weighted KJT with unweighted KJT")
        assert is_variable == kjt.variable_stride_per_key(), "variable stride per key must be consistent for all KJTs"
        assert has_inverse == (kjt.inverse_indices_or_none() is not None), (
            "inverse indices must be consistent for all KJTs"
        )
        assert is_variable or kjt.stride() == kjt_list[0].stride(), "strides must be consistent for all KJTs"
        keys += kjt.keys()
        values.append(kjt.values())
        lengths.append(kjt.lengths())
        if is_weighted:
            weights.append(kjt.weights())
        if is_variable:
            strides += kjt.stride_per_key_per_rank()
        if has_inverse:
            inverse_keys += kjt.inverse_indices()[0]
            inverse_tensors.append(kjt.inverse_indices()[1])
        counts = kjt.length_per_key_or_none()
        if counts is None:
            has_length_per_key = False
        else:
            length_per_key += counts
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values, dim=0),
        weights=torch.cat(weights, dim=0) if is_weighted else None,
        lengths=torch.cat(lengths, dim=0),
        stride=None if is_variable else kjt_list[0].stride(),
        stride_per_key_per_rank=strides if is_variable else None,
        length_per_key=length_per_key if has_length_per_key else None,
        inverse_indices=(inverse_keys, torch.cat(inverse_tensors)) if has_inverse else None,
    )


@torch.fx.wrap
def _empty_like_stride(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    keys: List[str] = []
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.empty(0, device=kjt.device(), dtype=kjt.values().dtype),
        weights=None if weights is None else torch.empty(0, device=kjt.device(), dtype=weights.dtype),
        lengths=torch.empty(0, device=kjt.device(), dtype=kjt.lengths().dtype),
        stride=None if kjt.variable_stride_per_key() else kjt.stride(),
        stride_per_key_per_rank=kjt._stride_per_key_per_rank,
    )


@torch.fx.wrap
def _empty_like_on_device(kjt: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    weights = kjt.weights_or_none()
    lengths = kjt.lengths_or_none()
    offsets = kjt.offsets_or_none()
    inverse = kjt.inverse_indices_or_none()
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.empty_like(kjt.values(), device=device),
        weights=None if weights is None else torch.empty_like(weights, device=device),
        lengths=None if lengths is None else torch.empty_like(lengths, device=device),
        offsets=None if offsets is None else torch.empty_like(offsets, device=device),
        stride=None if kjt.variable_stride_per_key() else kjt.stride(),
        stride_per_key_per_rank=kjt._stride_per_key_per_rank,
        stride_per_key=kjt._stride_per_key,
        length_per_key=kjt._length_per_key,
        offset_per_key=kjt._offset_per_key,
        inverse_indices=None if inverse is None else (inverse[0], torch.empty_like(inverse[1], device=device)),
    )


@torch.fx.wrap
def kjt_is_equal(kjt_1: "KeyedJaggedTensor", kjt_2: "KeyedJaggedTensor") -> bool:
    """Whether two KeyedJaggedTensors have the same keys in the same order, values, weights, bags and stride."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    return (
        kjt_1.keys() == kjt_2.keys()
        and tensors_equal(kjt_1.values(), kjt_2.values())
        and tensors_equal(kjt_1.weights_or_none(), kjt_2.weights_or_none())
        and tensors_equal(kjt_1.lengths(), kjt_2.lengths())
        and tensors_equal(kjt_1.offsets(), kjt_2.offsets())
        and kjt_1.length_per_key() == kjt_2.length_per_key()
        and kjt_1.offset_per_key() == kjt_2.offset_per_key()
        and kjt_1.stride() == kjt_2.stride()
    )


def _flatten(kjt: KeyedJaggedTensor) -> Tuple[List[Optional[torch.Tensor]], List[str]]:
    tensors = [getattr(kjt, field) for field in KeyedJaggedTensor._fields[:-1]]
    inverse = kjt.inverse_indices_or_none()
    return [*tensors, None if inverse is None else inverse[1]], kjt.keys()


def _flatten_with_keys(kjt: KeyedJaggedTensor) -> Tuple[List[Tuple[Any, Optional[torch.Tensor]]], List[str]]:
    tensors, keys = _flatten(kjt)
    return [(GetAttrKey(field), tensor) for field, tensor in zip(KeyedJaggedTensor._fields, tensors)], keys


def _unflatten(tensors: List[Any], keys: List[str]) -> KeyedJaggedTensor:
    num_fields = len(KeyedJaggedTensor._fields)
    if len(tensors) > num_fields:
        raise ValueError(f"Too many values provided for KeyedJaggedTensor: {len(tensors)} vs {num_fields}")
    # Older programs recorded fewer fields; the missing ones are the optional last ones.
    tensors = [*tensors, *[None] * (num_fields - len(tensors))]
    inverse = None if tensors[5] is None else (keys, tensors[5])
    return KeyedJaggedTensor(keys, *tensors[:4], stride_per_key_per_rank=tensors[4], inverse_indices=inverse)


register_pytree_node(
    KeyedJaggedTensor,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="shoal.kernels.jagged.KeyedJaggedTensor",
)
register_pytree_flatten_spec(KeyedJaggedTensor, lambda kjt, spec: _flatten(kjt)[0])
