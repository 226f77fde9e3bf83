"""JaggedTensor: values of bags of different lengths, one after the other. TorchRec's class, same names and order.

Source of the interface: TorchRec 1.9.2, ``torchrec/sparse/jagged_tensor.py``. The bodies are our own, in plain torch,
and compile with TorchScript and trace with torch.fx, as TorchRec's do.

Shape letters: B bags, N values, L longest bag.
"""
# TorchScript and TorchRec's schema test compare annotations literally, so the `typing` spellings stay.
# ruff: noqa: UP006, UP035, UP045

import abc
from typing import Any, List, Optional, Tuple

import torch
import torch.fx
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from shoal.kernels.jagged_ops import bags_string, check_integer, offsets_from_lengths, padded_dense


class JaggedTensorMeta(abc.ABCMeta, torch.fx._symbolic_trace.ProxyableClassMeta):
    """Lets torch.fx record the construction of a jagged class from proxies as one node."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # torch's own __call__ logs a warning in every process that constructs one outside of a trace (torch 2.13).
        if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)


@torch.fx.wrap
def _present_mask(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Bool [B, L]: which elements of a padded matrix lie within their row's length."""
    return torch.arange(values.size(1), device=values.device).unsqueeze(0) < lengths.unsqueeze(-1)


@torch.fx.wrap
def _masked_or_none(tensor: Optional[torch.Tensor], mask: torch.Tensor) -> Optional[torch.Tensor]:
    return tensor[mask] if tensor is not None else None


class JaggedTensor(metaclass=JaggedTensorMeta):
    """B bags of values, optionally weighted. Inputs are trusted, not checked beyond their dtype.

    Args:
        values: [N, ...], the bags one after the other.
        weights: like ``values``, or None.
        lengths: integer [B]; lengths or offsets is required, the other is computed when asked for and kept.
        offsets: integer [B + 1], starting at 0.
    """

    _fields = ["_values", "_weights", "_lengths", "_offsets"]  # noqa: RUF012 (a constant, as in TorchRec)

    def __init__(
        self,
        values: torch.Tensor,
        weights: Optional[torch.Tensor] = None,
        lengths: Optional[torch.Tensor] = None,
        offsets: Optional[torch.Tensor] = None,
    ) -> None:
        self._values: torch.Tensor = values
        self._weights: Optional[torch.Tensor] = weights
        assert offsets is not None or lengths is not None, "Must provide lengths or offsets"
        check_integer(offsets, "offsets")
        check_integer(lengths, "lengths")
        self._lengths: Optional[torch.Tensor] = lengths
        self._offsets: Optional[torch.Tensor] = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Optional[torch.device] = None,
        values_dtype: Optional[torch.dtype] = None,
        weights_dtype: Optional[torch.dtype] = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """No bags at all: values, lengths and offsets of 0 elements."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            offsets=torch.empty(0, dtype=lengths_dtype, device=device),
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            weights=weights,
        )

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: Optional[torch.device] = None) -> "JaggedTensor":
        """Without a device: no bags, same dtypes and device. With one: uninitialised tensors of the shapes there."""
        weights = jt.weights_or_none()
        if device is None:
            return JaggedTensor(
                values=torch.empty(0, device=jt.device(), dtype=jt.values().dtype),
                weights=None if weights is None else torch.empty(0, device=jt.device(), dtype=weights.dtype),
                lengths=torch.empty(0, device=jt.device(), dtype=jt.lengths().dtype),
            )
        lengths = jt.lengths_or_none()
        offsets = jt.offsets_or_none()
        return JaggedTensor(
            values=torch.empty_like(jt.values(), device=device),
            weights=None if weights is None else torch.empty_like(weights, device=device),
            lengths=None if lengths is None else torch.empty_like(lengths, device=device),
            offsets=None if offsets is None else torch.empty_like(offsets, device=device),
        )

    @staticmethod
    def from_dense_lengths(
        values: torch.Tensor, lengths: torch.Tensor, weights: Optional[torch.Tensor] = None
    ) -> "JaggedTensor":
        """From a padded matrix [B, L]: row b contributes its first ``lengths[b]`` elements."""
        mask = _present_mask(values, lengths)
        return JaggedTensor(values=values[mask], weights=_masked_or_none(weights, mask), lengths=lengths)

    @staticmethod
    def from_dense(values: List[torch.Tensor], weights: Optional[List[torch.Tensor]] = None) -> "JaggedTensor":
        """From one tensor per bag; lengths are int32."""
        all_values = torch.cat(values, dim=0)
        lengths = torch.tensor([value.size(0) for value in values], dtype=torch.int32, device=all_values.device)
        all_weights = torch.cat(weights, dim=0) if weights is not None else None
        return JaggedTensor(values=all_values, weights=all_weights, lengths=lengths)

    def size_in_bytes(self) -> int:
        """Bytes of the tensors held now (a length or offset tensor not yet computed counts nothing)."""
        size = self._values.element_size() * self._values.numel()
        for tensor in [self._weights, self._lengths, self._offsets]:
            if tensor is not None:
                size += tensor.element_size() * tensor.numel()
        return size

    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Copy the tensors of ``jt`` into ours, in place; returns self."""
        self._values.copy_(jt._values, non_blocking=non_blocking)
        weights, jt_weights = self._weights, jt._weights
        if weights is not None and jt_weights is not None:
            weights.copy_(jt_weights, non_blocking=non_blocking)
        lengths, jt_lengths = self._lengths, jt._lengths
        if lengths is not None and jt_lengths is not None:
            lengths.copy_(jt_lengths, non_blocking=non_blocking)
        offsets, jt_offsets = self._offsets, jt._offsets
        if offsets is not None and jt_offsets is not None:
            offsets.copy_(jt_offsets, non_blocking=non_blocking)
        return self

    def to_dense(self) -> List[torch.Tensor]:
        """One tensor per bag, views of the values."""
        bounds: List[int] = self.offsets().tolist()
        return [self._values[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]

    def to_dense_weights(self) -> Optional[List[torch.Tensor]]:
        """One tensor of weights per bag, or None without weights."""
        weights = self._weights
        if weights is None:
            return None
        bounds: List[int] = self.offsets().tolist()
        return [weights[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]

    def to_padded_dense(self, desired_length: Optional[int] = None, padding_value: float = 0.0) -> torch.Tensor:
        """[B, L, ...] with L the longest bag or ``desired_length``; longer bags are cut, shorter ones padded."""
        return padded_dense(
            self._values, self.lengths(), self.offsets(), self._dense_width(desired_length), padding_value
        )

    def to_padded_dense_weights(
        self, desired_length: Optional[int] = None, padding_value: float = 0.0
    ) -> Optional[torch.Tensor]:
        """Like ``to_padded_dense``, for the weights; None without weights."""
        weights = self._weights
        if weights is None:
            return None
        return padded_dense(weights, self.lengths(), self.offsets(), self._dense_width(desired_length), padding_value)

    def _dense_width(self, desired_length: Optional[int]) -> int:
        if desired_length is not None:
            return desired_length
        lengths = self.lengths()
        return int(torch.max(lengths).item()) if lengths.numel() > 0 else 0

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def lengths(self) -> torch.Tensor:
        """Integer [B]; computed from the offsets at the first call."""
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            lengths = torch.diff(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Optional[torch.Tensor]:
        """The lengths if they are known already."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Integer [B + 1]; computed from the lengths at the first call."""
        offsets = self._offsets
        if offsets is None:
            lengths = self._lengths
            assert lengths is not None
            offsets = offsets_from_lengths(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Optional[torch.Tensor]:
        """The offsets if they are known already."""
        return self._offsets

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

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """A copy on ``device``."""
        weights = self._weights
        lengths = self._lengths
        offsets = self._offsets
        return JaggedTensor(
            values=self._values.to(device, non_blocking=non_blocking),
            weights=weights.to(device, non_blocking=non_blocking) if weights is not None else None,
            lengths=lengths.to(device, non_blocking=non_blocking) if lengths is not None else None,
            offsets=offsets.to(device, non_blocking=non_blocking) if offsets is not None else None,
        )

    @torch.jit.unused
    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the caching allocator that a CUDA ``stream`` uses these tensors."""
        for tensor in (self._values, self._weights, self._lengths, self._offsets):
            if tensor is not None:
                tensor.record_stream(stream)

    @torch.jit.unused
    def __str__(self) -> str:
        bounds = self.offsets().tolist()
        values = bags_string(self._values, bounds, 0, len(bounds) - 1)
        if self._weights is None:
            return "JaggedTensor({\n    " + values + "\n})\n"
        weights = bags_string(self._weights, bounds, 0, len(bounds) - 1)
        return 'JaggedTensor({\n    "values": ' + values + ',\n    "weights": ' + weights + "\n})\n"


def tensors_equal(left: Optional[torch.Tensor], right: Optional[torch.Tensor]) -> bool:
    """Whether both are None, or of one shape and close."""
    if left is None or right is None:
        return left is None and right is None
    return left.size() == right.size() and bool(torch.allclose(left, right))


@torch.fx.wrap
def jt_is_equal(jt_1: "JaggedTensor", jt_2: "JaggedTensor") -> bool:
    """Whether two JaggedTensors have equal values, weights and bags, however they were built."""
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return (
        tensors_equal(jt_1.values(), jt_2.values())
        and tensors_equal(jt_1.weights_or_none(), jt_2.weights_or_none())
        and tensors_equal(jt_1.lengths(), jt_2.lengths())
        and tensors_equal(jt_1.offsets(), jt_2.offsets())
    )


def _flatten(jt: JaggedTensor) -> Tuple[List[Optional[torch.Tensor]], None]:
    return [getattr(jt, field) for field in JaggedTensor._fields], None


def _flatten_with_keys(jt: JaggedTensor) -> Tuple[List[Tuple[Any, Optional[torch.Tensor]]], None]:
    return [(GetAttrKey(field), getattr(jt, field)) for field in JaggedTensor._fields], None


def _unflatten(tensors: List[Any], context: None) -> JaggedTensor:
    return JaggedTensor(*tensors)


register_pytree_node(
    JaggedTensor,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="shoal.kernels.jagged.JaggedTensor",
)
register_pytree_flatten_spec(JaggedTensor, lambda jt, spec: _flatten(jt)[0])
