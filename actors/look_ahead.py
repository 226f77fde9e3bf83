"""Steps that are opened while an earlier one is under way: two rounds a step instead of four.

With overlap the header of step s + 2 rides in the gradients of s, and the ids of s + 1 in the values of s; the pipeline
is filled by the header of s + 1 in the ids of a step that was opened on its own. Invariants:

1. Whether a round carries something depends on headers that all ranks have, on the step and on the run's settings only
   (S3): all ranks decide alike.
2. A step is opened early only when every rank had its batch and no error. Otherwise that header counts for nothing, and
   the step opens on its own when its turn comes: errors and late batches are met there, under the step's own number.
3. Owners look up rows of a step after the step before it, and what follows that (snapshot, cut), is done. So tables see
   the same calls in the same order with overlap and without, and nothing of a later step has to be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shoal.kernels.exchange import Exchange, Headers
from shoal.kernels.frame import HEADER_BYTES, Flag, Kind, Status
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import Lookup
from shoal.kernels.row_exchange import HeldIds, Rider, RowExchange
from shoal.kernels.transport import ByteBuffer

NO_FLAGS = Flag(0)
#: Steps that may be open beyond the present one.
DEPTH = 2


@dataclasses.dataclass(frozen=True)
class StepInput:
    """What a rank has to say when a step is opened."""

    kjt: KeyedJaggedTensor
    #: Sum of this rank's sample weights.
    loss_weight: float = 0.0
    #: This rank's wishes; all ranks see them (S3).
    flags: Flag = NO_FLAGS
    control: int = 0
    #: This rank cannot take part properly (its feed failed): all ranks raise because of it.
    error: BaseException | None = None


class LookAhead(Protocol):
    """What later steps need of the loop."""

    def may_follow(self, step: int, flags: Flag) -> bool:
        """Whether the step after ``step``, whose headers said ``flags``, may be opened before ``step`` is done."""
        ...

    def offer(self, step: int) -> StepInput | None:
        """This rank's input of a later step; None while it is not there. The same one until the step begins."""
        ...


@dataclasses.dataclass
class Routed:
    """A batch whose ids have been brought in order of their owners."""

    given: StepInput
    lookup: Lookup
    #: Indices of the collections that take part.
    collections: frozenset[int]
    status: Status
    detail: str
    #: Ids dropped and ids replaced by a policy.
    counts: tuple[int, int]

    def fields(self) -> dict[str, Any]:
        """The header's fields that say how this rank fares."""
        return {
            "denominator": self.given.loss_weight,
            "numbers": (self.given.kjt.stride(),),
            "status": self.status,
            "detail": self.detail,
        }


@dataclasses.dataclass
class OpenStep:
    """A step whose header all ranks have agreed on."""

    routed: Routed
    headers: Headers
    #: Newest snapshot that every rank had acknowledged, as of this header.
    protected: int
    #: Of a step that was opened early: what peers ask of this rank's rows.
    ids: HeldIds | None = None


class _HeaderRider:
    """The header of a later step."""

    def __init__(self, early: EarlySteps, step: int) -> None:
        self._early, self._step = early, step
        self._routed = early.route_ahead(step)
        world_size = early.exchange.identity.world_size
        self.out_bytes = self.in_bytes = np.full(world_size, HEADER_BYTES, np.int64)
        self._sections = np.zeros((early.rows.num_sections, world_size), np.int64)

    def write(self, addresses: np.ndarray) -> None:
        routed, fields = self._routed, {"flags": Flag.WAIT}
        if routed is not None:
            self._sections[0] = routed.lookup.id_bytes()
            fields = {"flags": routed.given.flags, "control": routed.given.control, **routed.fields()}
        self._early.exchange.write_header(addresses, Kind.BATCH, self._step, self._sections, **fields)

    def read(self, addresses: np.ndarray) -> None:
        exchange = self._early.exchange
        headers = exchange.read_header(addresses, Kind.BATCH, self._step, len(self._sections))
        if Flag.WAIT in headers.flags or headers.statuses.any():
            return
        assert self._routed is not None, "a rank without its batch says WAIT"
        self._early.accept(self._step, self._routed, headers)


class EarlySteps:
    """The steps of a session beyond the present one.

    Args:
        route: brings a step's input in order; None when it cannot, which shows again once the step opens on its own.
        release: takes back the lookup of a step that will not be.
    """

    def __init__(
        self,
        exchange: Exchange,
        rows: RowExchange,
        route: Callable[[StepInput], Routed | None],
        release: Callable[[Lookup], None],
    ) -> None:
        self.exchange, self.rows = exchange, rows
        self._route, self._release = route, release
        self._source: LookAhead | None = None
        self._step, self._flags = -1, NO_FLAGS
        self._routed: dict[int, Routed] = {}
        self._open: dict[int, OpenStep] = {}
        # Ids of a step are kept until it is done, while those of the next one come.
        self._memories = (ByteBuffer(), ByteBuffer())

    @property
    def is_possible(self) -> bool:
        """Whether the rounds of this view can carry anything: rows that go by way of carriers, or another transport
        than the ids, cannot."""
        return self.rows.can_carry and not self.exchange.has_payload_transport

    def is_open(self, step: int) -> bool:
        """Whether ``step`` was opened early; the same on all ranks."""
        return step in self._open

    def enter(self, step: int, flags: Flag, source: LookAhead | None) -> None:
        """``step`` begins, all ranks know its ``flags``; without ``source`` nothing is opened behind it."""
        self._step, self._flags = step, flags
        self._source = source if self.is_possible else None

    def take_routed(self, step: int, kjt: KeyedJaggedTensor) -> Routed | None:
        """What an early header of ``step`` was made of, if it counted for nothing."""
        assert not self._open, f"steps {sorted(self._open)} are open already"
        routed = self._routed.pop(step, None)
        if routed is not None and routed.given.kjt is not kjt:
            self._release(routed.lookup)
            return None
        return routed

    def take(self, step: int) -> OpenStep:
        """``step``, which was opened early, begins."""
        return self._open.pop(step)

    def rider(self, kind: Kind) -> Rider | None:
        """What rides in a round of the present step."""
        if self._source is None:
            return None
        if kind is Kind.VALUES:
            following = self._open.get(self._step + 1)
            return None if following is None or following.ids is None or following.ids.is_here else following.ids
        step = self._next()
        return None if step is None else _HeaderRider(self, step)

    def _next(self) -> int | None:
        """The step whose header is due; None when the pipeline is full, or must run empty."""
        assert self._source is not None
        flags = self._flags
        for step in range(self._step + 1, self._step + 1 + DEPTH):
            if not self._source.may_follow(step - 1, flags):
                return None
            if step not in self._open:
                return step
            flags = self._open[step].headers.flags
        return None

    def route_ahead(self, step: int) -> Routed | None:
        """The batch of a later step, routed once; None while it is not there."""
        assert self._source is not None
        if step not in self._routed and (given := self._source.offer(step)) is not None:
            routed = self._route(given)
            if routed is not None:
                self._routed[step] = routed
        return self._routed.get(step)

    def accept(self, step: int, routed: Routed, headers: Headers) -> None:
        """All ranks have agreed to the header of ``step``."""
        del self._routed[step]
        ids = HeldIds(routed.lookup, headers.section_bytes[0], self._memories[step % len(self._memories)])
        self._open[step] = OpenStep(routed, headers, self.exchange.protected, ids)

    def discard(self) -> None:
        """Forget all later steps: the view is left."""
        for routed in (*self._routed.values(), *(opened.routed for opened in self._open.values())):
            self._release(routed.lookup)
        self._routed, self._open, self._source = {}, {}, None
