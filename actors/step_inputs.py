"""What a rank has to say about the step to come: its batch, and the wishes for its header.

Where steps overlap a batch is taken from the feed up to two steps early and stays here until its step begins, and a
wish goes into the next header that is written, which names a later step than the one under way.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.actors.look_ahead import NO_FLAGS, StepInput
from shoal.kernels.batch import Batch
from shoal.kernels.frame import Flag

#: Flags after which everything goes on as before.
_PASSING = Flag.HASTE


@dataclasses.dataclass
class Taken:
    """This rank's input of a step that has not begun."""

    batch: Batch
    error: BaseException | None
    weights: Tensor
    flags: Flag = NO_FLAGS
    control: int = 0
    #: Those of ``flags`` that somebody asked for, whatever the view.
    requested: Flag = NO_FLAGS

    @property
    def loss_weight(self) -> float:
        return float(self.weights.sum(dtype=torch.float64))


class StepInputs:
    """Batches taken early, and wishes that are not in a header yet. A ``LookAhead``.

    Args:
        take: this rank's batch of a step, or an empty one and what went wrong.
        is_ready: whether ``take`` would return at once.
        is_boundary: whether something happens that all ranks must meet for once so many steps are applied.
    """

    def __init__(
        self,
        take: Callable[[int], tuple[Batch, BaseException | None]],
        is_ready: Callable[[int], bool],
        is_boundary: Callable[[int], bool],
    ) -> None:
        self._take, self._is_ready, self._is_boundary = take, is_ready, is_boundary
        self._taken: dict[int, Taken] = {}
        self._wishes, self._control = NO_FLAGS, 0
        self._requested = NO_FLAGS
        self._lock = threading.Lock()

    def request(self, flags: Flag) -> None:
        """Raise ``flags`` in the next header. Thread-safe."""
        with self._lock:
            self._requested |= flags

    def wish(self, flags: Flag, control: int) -> None:
        """The same with a control word, for this view only."""
        self._wishes |= flags
        self._control = control or self._control

    def resume(self, step: int) -> Taken:
        """What was offered for ``step``, whose header all ranks have."""
        return self._taken.pop(step)

    def begin(self, step: int) -> Taken:
        """The input of ``step``, with all wishes, for a header that is written now."""
        taken = self._taken.pop(step, None) or self._make(step)
        self._add_wishes(taken)
        return taken

    def forget(self) -> None:
        """The view has changed: batches are other ones, and what was wished for it is void. Requests are not."""
        for taken in self._taken.values():
            self.request(taken.requested)
        self._taken = {}
        self._wishes, self._control = NO_FLAGS, 0

    def may_follow(self, step: int, flags: Flag) -> bool:
        """Not beyond what all ranks have announced, nor beyond what follows ``step`` anyway: there they must meet."""
        return not flags & ~_PASSING and not self._is_boundary(step + 1)

    def offer(self, step: int) -> StepInput | None:
        taken = self._taken.get(step)
        if taken is None:
            if not self._is_ready(step):
                return None
            taken = self._taken[step] = self._make(step)
        self._add_wishes(taken)
        return StepInput(taken.batch.sparse_features, taken.loss_weight, taken.flags, taken.control, taken.error)

    def _make(self, step: int) -> Taken:
        batch, error = self._take(step)
        return Taken(batch, error, torch.ones(len(batch)) if batch.weights is None else batch.weights)

    def _add_wishes(self, taken: Taken) -> None:
        with self._lock:
            requested, self._requested = self._requested, NO_FLAGS
        taken.requested |= requested
        taken.flags |= requested | self._wishes
        taken.control = self._control or taken.control
        self._wishes, self._control = NO_FLAGS, 0
