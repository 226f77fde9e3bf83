"""The dense replica: parameters and gradients as views of two flat buffers, and the dense optimizer over them.

Every rank holds the same dense parameters. Their gradients are summed over ranks in rank order over one flat buffer
whose layout is fixed by the model's parameter order (not DDP: it rebuilds its buckets, so a joiner would differ). One
flat parameter also makes the optimizer one fused loop instead of one call per tensor; element-wise optimizers give the
same numbers either way.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.kernels.errors import CheckpointMismatchError, ConfigError

#: A function from parameters to an optimizer, for users who bring their own.
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclasses.dataclass(frozen=True)
class DenseSnapshot:
    """The dense state at a boundary, in memory: copies of the tensors, keyed as their owner names them."""

    parameters: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]
    #: Per optimizer parameter: slot -> copy of a tensor, or a plain number.
    optimizer: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseOptimizerSpec:
    """A dense optimizer by name (sgd, adagrad, adam, adamw) with torch's own keyword arguments."""

    kind: str = "adagrad"
    lr: float = 0.01
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over ``parameters``; ConfigError names an unknown kind or option."""
        if self.kind not in _OPTIMIZERS:
            raise ConfigError(f"dense optimizer {self.kind!r} is unknown; use one of {', '.join(sorted(_OPTIMIZERS))}")
        _spare_compiler()
        try:
            return _OPTIMIZERS[self.kind](parameters, lr=self.lr, fused=True, **self.options)  # type: ignore[call-arg]
        except TypeError as error:
            raise ConfigError(f"dense optimizer {self.kind!r}: {error}") from error


class DenseReplica:
    """Dense parameters of ``model`` (all that remain once its collections are attached) on this rank.

    Frozen parameters (``requires_grad=False``) are saved and restored, never changed. Buffers that the model changes in
    forward, such as BatchNorm's running statistics, follow each rank's own slice of the data: a checkpoint holds rank
    0's, and a resumed run starts from those on every rank.

    Args:
        model: its floating point parameters are re-pointed into one flat float32 buffer, in ``named_parameters`` order.
        optimizer: a DenseOptimizerSpec, or a factory called with the model's own parameters (then the optimizer walks
            them one by one; gradients are flat all the same).
    """

    def __init__(self, model: nn.Module, optimizer: DenseOptimizerSpec | OptimizerFactory) -> None:
        self.model = model
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and not p.is_meta]
        for name, parameter in self._named:
            if parameter.dtype != torch.float32:
                raise ConfigError(f"dense parameter {name!r} is {parameter.dtype}; dense parameters are float32")
        total = sum(p.numel() for _, p in self._named)
        self.flat = torch.empty(total)
        self.grad = torch.zeros(total)
        self._ranges: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, parameter in self._named:
            end = offset + parameter.numel()
            self.flat[offset:end] = parameter.detach().reshape(-1)
            parameter.data = self.flat[offset:end].view_as(parameter)
            parameter.grad = self.grad[offset:end].view_as(parameter)
            self._ranges[name] = (offset, end)
            offset = end
        self._flat_parameter: nn.Parameter | None = None
        if total and isinstance(optimizer, DenseOptimizerSpec):
            self._flat_parameter = nn.Parameter(self.flat)
            self._flat_parameter.grad = self.grad
        self._optimizer_spec = optimizer
        self.optimizer = self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.Optimizer | None:
        """A fresh optimizer over the parameters; None where there are none."""
        if self._flat_parameter is not None:
            return self._optimizer_spec.build([self._flat_parameter])  # type: ignore[union-attr]
        return self._optimizer_spec([p for _, p in self._named]) if self._named else None  # type: ignore[operator]

    @property
    def num_parameters(self) -> int:
        return self.flat.numel()

    @property
    def optimizer_kind(self) -> str:
        """Name of the optimizer's class in lower case, "none" without trained parameters."""
        return "none" if self.optimizer is None else type(self.optimizer).__name__.lower()

    @property
    def floating_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that may differ between ranks: see the class."""
        return tuple(name for name, buffer in self.model.named_buffers() if buffer.is_floating_point())

    def zero_grad(self) -> None:
        """Set all gradients to zero in place (their views must survive, so ``set_to_none`` is never used)."""
        self.grad.zero_()

    def rebind_grads(self) -> None:
        """Copy back gradients a model replaced by tensors of its own, so that the flat buffer is complete."""
        for name, parameter in self._named:
            start, end = self._ranges[name]
            grad = parameter.grad
            if grad is None or grad.data_ptr() != self.grad.data_ptr() + 4 * start:
                if grad is not None:
                    self.grad[start:end] = grad.reshape(-1)
                parameter.grad = self.grad[start:end].view_as(parameter)

    def step(self, lr: float) -> None:
        """Apply the optimizer to the (already reduced) gradients. ``lr`` is this step's rate; a factory's optimizer
        keeps its own rates."""
        if self.optimizer is None:
            return
        if self._flat_parameter is None:
            self.optimizer.step()
            return
        self.optimizer.param_groups[0]["lr"] = lr
        with torch.no_grad():  # what the wrappers of ``step`` do, but for hooks, which nobody can add
            inspect.unwrap(type(self.optimizer).step)(self.optimizer)

    def snapshot(self) -> DenseSnapshot:
        """Copies of all that a step changes, at memory speed; ``roll_back`` puts them back bit for bit."""
        parameters = (self.flat.clone(),) if self.num_parameters else ()
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers() if not buffer.is_meta}
        states = tuple(
            {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in self.optimizer.state.get(p, {}).items()}
            for p in self._optimized()
        )
        return DenseSnapshot(parameters, buffers, states)

    def roll_back(self, snapshot: DenseSnapshot) -> None:
        """Undo every step since ``snapshot``, which stays valid."""
        with torch.no_grad():
            for saved in snapshot.parameters:
                self.flat.copy_(saved)
            for name, buffer in self.model.named_buffers():
                if name in snapshot.buffers:
                    buffer.copy_(snapshot.buffers[name])
        for parameter, saved_state in zip(self._optimized(), snapshot.optimizer):
            copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in saved_state.items()}
            self.optimizer.state[parameter] = copies  # type: ignore[union-attr]

    def start_over(self, fresh: nn.Module) -> None:
        """Parameters and buffers as in ``fresh``, another instance of the model, and a new optimizer."""
        values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        with torch.no_grad():
            for name, target in [*((n, p.data) for n, p in self._named), *self.model.named_buffers()]:
                target.copy_(values[name])
        self.optimizer = self._build_optimizer()

    def checksum(self) -> int:
        """Hash of parameters and optimizer state: equal on all ranks that hold the same dense state (V4).

        Buffers are not in it: floating ones may differ between ranks, see the class.
        """
        value = 0
        for tensor in (self.flat, *(slot for _, _, slot in self._optimizer_slots())):
            value = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(), value)
        return value

    def _optimized(self) -> list[nn.Parameter]:
        """The parameters the optimizer keeps state for."""
        if self.optimizer is None:
            return []
        return [self._flat_parameter] if self._flat_parameter is not None else [p for _, p in self._named]

    def state_tensors(self) -> dict[str, Tensor]:
        """Flat names -> copies: ``model.<parameter or buffer>``, ``optimizer.<parameter>.<slot>``; no pickle needed."""
        tensors = {f"model.{name}": p.detach().clone() for name, p in self._named + self._frozen}
        for name, buffer in self.model.named_buffers():
            tensors[f"model.{name}"] = buffer.detach().clone()
        for name, slot, value in self._optimizer_slots():
            tensors[f"optimizer.{name}.{slot}"] = value.detach().clone().contiguous()
        return tensors

    def _optimizer_slots(self) -> Iterable[tuple[str, str, Tensor]]:
        """(parameter, slot, value): slots of a flat state are 1-D pieces of it; its scalars (step) are 0-D."""
        if self.optimizer is None:
            return
        for name, parameter in self._named:
            start, end = self._ranges[name]
            owner = parameter if self._flat_parameter is None else self._flat_parameter
            for slot, value in sorted(self.optimizer.state.get(owner, {}).items()):
                value = value if isinstance(value, Tensor) else torch.tensor(value)
                if self._flat_parameter is not None and value.numel() == self.flat.numel() and value.dim() == 1:
                    value = value[start:end]
                yield name, slot, value

    def load_state_tensors(self, tensors: Mapping[str, Tensor], optimizer_kind: str | None = None) -> None:
        """Inverse of ``state_tensors``. ``optimizer_kind`` is that of the run that wrote them.

        CheckpointMismatchError lists every parameter that is missing or of another shape, or names both optimizers.
        """
        if optimizer_kind is not None and optimizer_kind != self.optimizer_kind:
            raise CheckpointMismatchError(
                f"the checkpoint holds the state of dense optimizer {optimizer_kind!r}, this run uses "
                f"{self.optimizer_kind!r}; use the same one or start a new run"
            )
        problems = []
        targets: dict[str, Tensor] = {f"model.{name}": p.data for name, p in self._named + self._frozen}
        targets |= {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
        for name, target in targets.items():
            found = tensors.get(name)
            if found is None or found.shape != target.shape:
                found_text = "nothing" if found is None else str(tuple(found.shape))
                problems.append(f"{name}: expected {tuple(target.shape)}, found {found_text}")
        if problems:
            raise CheckpointMismatchError("dense state does not fit the model: " + "; ".join(problems))
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(tensors[name])
        self._load_optimizer({n[len("optimizer.") :]: t for n, t in tensors.items() if n.startswith("optimizer.")})

    def _load_optimizer(self, slots: Mapping[str, Tensor]) -> None:
        if self.optimizer is None or not slots:
            return
        for name, parameter in self._named:
            start, end = self._ranges[name]
            owner = parameter if self._flat_parameter is None else self._flat_parameter
            state = self.optimizer.state[owner]
            prefix = name + "."
            for key, value in slots.items():
                if not key.startswith(prefix) or "." in key[len(prefix) :]:
                    continue
                slot = key[len(prefix) :]
                if self._flat_parameter is not None and value.dim() == 1:
                    state.setdefault(slot, torch.zeros_like(self.flat))[start:end] = value
                else:
                    state[slot] = value.clone()


def _spare_compiler() -> None:
    """Keep torch.optim from importing torch's compiler, to tell it what not to compile: nothing is compiled here, and a
    worker process starts in two thirds of the CPU time without (1.6 of 4.5 s; torch 2.13)."""
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is not None:
        function.__dynamo_disable = function
