"""Session: one rank's data plane in one view. It ties the collections of a model to row store, step plan and exchange.

A training step is ``begin`` (route, header, ids, values: every collection's output for the batch is then known),
the model's forward and backward, and ``end`` (row and dense gradients in one round, then apply or skip on all ranks
alike). The number of collectives is a constant: header, ids, values, gradients, one more when the dense gradients
are too large to send whole and one more where column blocks share row-wise optimizer state (S6, S7); each further
lookup of a collection with another KeyedJaggedTensor adds its own header, ids and values, and such models, like any in
its first step, one header before the gradients.

No rank ever skips an exchange: a rank without data takes part with 0 samples, and a rank with an error of its own
sends its status, so that all raise the same error before any owner applies (S10).
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.actors.flow_meter import count_flows
from shoal.actors.look_ahead import NO_FLAGS, EarlySteps, LookAhead, OpenStep, Routed, StepInput
from shoal.actors.phases import PhaseClock
from shoal.actors.sharded import ModelTables
from shoal.kernels import faults
from shoal.kernels.dense_reduce import DenseReducer
from shoal.kernels.errors import ConfigError, DataError, NonFiniteError, PeerError, ProtocolError, ShoalError
from shoal.kernels.exchange import Exchange, Headers, raise_for_status
from shoal.kernels.frame import Flag, Kind, Status
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.plan import Lookup, StepPlan, squares_of
from shoal.kernels.row_exchange import FlatRows, HeldIds, HierarchicalRows, Riders, RowExchange, no_riders
from shoal.kernels.rowstore import RowStore
from shoal.kernels.vbe import expand_inverse_indices


@dataclasses.dataclass(frozen=True)
class StepHead:
    """What all ranks know once the headers of a step are in."""

    step: int
    #: Sum of sample weights over all ranks: the denominator of the loss.
    loss_weight: float
    num_samples: int
    flags: Flag
    #: Largest control word of all ranks: the epoch of a CUTOVER.
    control: int = 0
    #: Newest snapshot that every rank had acknowledged (F3); the same on all ranks.
    protected: int = -1


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """How a step ended on all ranks."""

    is_applied: bool
    #: Ranks whose loss or gradients were not finite. Where only sums over ranks were not: their owners, and all ranks
    #: for the dense gradients.
    non_finite_ranks: tuple[int, ...] = ()
    #: Norm of all gradients before clipping; None without clipping, and where it is not finite.
    grad_norm: float | None = None


@dataclasses.dataclass
class _Round:
    """One lookup of one KeyedJaggedTensor: its native state and the outputs that autograd sees."""

    lookup: Lookup
    kjt: KeyedJaggedTensor
    #: Indices of the collections that take part.
    collections: frozenset[int]
    #: One tensor per output of the plan, as autograd sees it.
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    #: Gradients of ``outputs`` when per-sample weights want theirs, else None: they are in ``outputs[i].grad``.
    grads: list[Tensor] | None = None


@dataclasses.dataclass
class _MicroBatch:
    """A part of the step's batch that the model sees now: leaves of its own, whose gradients lie in the round's."""

    kjt: KeyedJaggedTensor
    outputs: list[Tensor]


class _WeightedLookup(torch.autograd.Function):
    """Joins outputs to per-sample weights that are themselves learned: their gradient is <bag's gradient, row>."""

    @staticmethod
    def forward(ctx: Any, round_: _Round, weights: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.round = round_
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        round_ = ctx.round
        for total, grad in zip(round_.grads, grads):
            total += grad
        return (None, round_.lookup.weight_grad(grads), *(None for _ in grads))


class Session:
    """One rank's data plane.

    Args:
        model_tables: tables, features and collections of the model (its collections are attached here).
        store: the rows this rank owns.
        plan: the step plan of the view.
        exchange: framed collectives of the view.
        rows: the way of rows and their gradients; straight unless given.
        start_timeout_s: patience of the first step, beyond the exchange's own deadline: ranks restore and warm up at
            different speeds.
    """

    def __init__(
        self,
        model_tables: ModelTables,
        store: RowStore,
        plan: StepPlan,
        exchange: Exchange,
        *,
        rows: RowExchange | None = None,
        start_timeout_s: float = 0.0,
    ) -> None:
        self.model_tables = model_tables
        self.store = store
        self.plan = plan
        self.exchange = exchange
        self.rows: RowExchange = rows or FlatRows(exchange, plan)
        self.clock = PhaseClock()
        self._dense_reducer: DenseReducer | None = None
        self._free: list[Lookup] = []
        self._early = EarlySteps(exchange, self.rows, self._route_early, self._release)
        self._rounds: list[_Round] = []
        self._micro: _MicroBatch | None = None
        self._columns: dict[tuple[tuple[str, ...], bool, int | None], tuple[np.ndarray, frozenset[int]]] = {}
        self._step = -1
        self._is_training = False
        #: Further patience of the first step; 0 afterwards.
        self._start_timeout_s = start_timeout_s
        #: Whether ``end`` opens with a header. It must where a rank that fails in forward could meet peers in an extra
        #: lookup's header: frames of unknown size would face it. Equal on all ranks, as lookups are collective.
        self._decides = True
        self._has_extra = False
        #: Since the last ``take_counts``: ids dropped and ids replaced by a policy.
        self._counts = [0, 0]
        for index, (_, module) in enumerate(model_tables.collections):
            module.attach(lambda collection, kjt, index=index: self._lookup(index, kjt))

    def detach(self) -> None:
        """Give the collections back to themselves."""
        for _, module in self.model_tables.collections:
            module.detach()

    def abandon(self) -> None:
        """Forget the lookups of a step that will not end, and of later ones: its view is left."""
        self._discard_rounds()
        self._early.discard()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        kjt: KeyedJaggedTensor,
        *,
        is_training: bool,
        loss_weight: float = 0.0,
        flags: Flag = NO_FLAGS,
        control: int = 0,
        error: BaseException | None = None,
        ahead: LookAhead | None = None,
    ) -> StepHead:
        """Open step ``step`` with this rank's sparse features: after it every collection's output is at hand.

        Args:
            kjt: [num keys x B] bags of this rank's slice of the global batch, B >= 0.
            loss_weight: sum of this rank's sample weights.
            flags, control: this rank's wishes; all ranks see them (S3).
            error: this rank cannot take part properly (its feed failed): all ranks raise because of it.
            ahead: opens later steps while this one is under way; all ranks give one, or none does.

        Raises: the same typed error on every rank if any rank has a bad id or an error, or if ranks disagree.
        """
        self._discard_rounds()
        self._step, self._is_training = step, is_training
        self.clock.start()
        routed = self._early.take_routed(step, kjt) if is_training else None
        if routed is None:
            routed = self._route(StepInput(kjt, loss_weight, error=error))
        self._rounds.append(_Round(routed.lookup, routed.given.kjt, routed.collections))
        kind = Kind.BATCH if is_training else Kind.EVALUATE
        fields = {"flags": flags, "control": control, **routed.fields()}
        sections = self.rows.sections(routed.lookup)
        headers = self._open_header(kind, step, sections, **fields)
        while Flag.WAIT in headers.flags:
            headers = self._open_header(kind, step, sections, **fields)
        if headers.statuses.any():
            self._raise_for_status(headers, routed.given.error)
        self._early.enter(step, headers.flags, ahead if is_training else None)
        return self._take_rows(OpenStep(routed, headers, self.exchange.protected))

    def is_open(self, step: int) -> bool:
        """Whether ``step`` was opened while an earlier one was under way: ``resume`` goes on with it. Equal on all
        ranks."""
        return self._early.is_open(step)

    def resume(self, step: int, ahead: LookAhead | None) -> StepHead:
        """Go on with a step that is open: as ``begin``, with what the rank offered for it (``LookAhead``)."""
        self._discard_rounds()
        self._step, self._is_training = step, True
        self.clock.start()
        opened = self._early.take(step)
        routed = opened.routed
        self._rounds.append(_Round(routed.lookup, routed.given.kjt, routed.collections))
        self._early.enter(step, opened.headers.flags, ahead)
        return self._take_rows(opened)

    def _take_rows(self, opened: OpenStep) -> StepHead:
        """Ids, values and pooling of the step that is open; what all ranks know of it."""
        headers = opened.headers
        self._fetch(opened.routed, headers, self._early.rider, opened.ids)
        return StepHead(
            step=self._step,
            loss_weight=headers.denominator,
            num_samples=int(headers.numbers[0]),
            flags=headers.flags,
            control=int(headers.control.max()),
            protected=opened.protected,
        )

    def wait(self, step: int, *, is_training: bool) -> None:
        """Stand in for ``begin`` while this rank's batch is not there yet: its peers repeat their header (F2)."""
        self._open_header(Kind.BATCH if is_training else Kind.EVALUATE, step, None, flags=Flag.WAIT)

    @property
    def patience_s(self) -> float:
        """How long the other ranks may take to come to the next exchange."""
        return self.exchange.timeout_s + self._start_timeout_s

    def meet(self, step: int, control: int) -> Headers:
        """The view's own first exchange (V4): once it completes anywhere, the view is decided.

        Args:
            step: steps applied on every rank.
            control: hash of the dense state, which must be equal on all ranks.
        """
        headers = self.exchange.header(Kind.BARRIER, step, control=control, timeout_s=self.patience_s)
        if len(set(headers.control.tolist())) > 1:
            raise ProtocolError(f"the dense state differs between ranks at step {step}: {headers.control.tolist()}")
        return headers

    def narrow(self, kjt: KeyedJaggedTensor, start: int, stop: int) -> None:
        """Samples [start, stop) of the step's batch, ``kjt``, are what the model runs on next (a micro-batch).

        The step's rows are there already; gradients of all micro-batches add up in their order, and ``end`` sends them
        once: a step of several micro-batches is one batch, tables included.
        """
        round_ = self._rounds[0]
        weights = round_.kjt.weights_or_none()
        if weights is not None and weights.requires_grad:
            raise ConfigError("per-sample weights that are learned need train.gradient_accumulation_steps 1")
        if round_.grads is None:
            round_.outputs = [output.detach() for output in round_.outputs]
            round_.grads = [torch.zeros_like(output) for output in round_.outputs]
        parts = []
        for spec, output, grad in zip(self.plan.outputs, round_.outputs, round_.grads):
            first, last = start, stop
            if spec.is_sequence:
                first, last = self._positions(round_.kjt, self.plan.features[spec.features[0]].name, start, stop)
            part = output[first:last].requires_grad_(True)
            part.grad = grad[first:last]
            parts.append(part)
        self._micro = _MicroBatch(kjt, parts)

    @staticmethod
    def _positions(kjt: KeyedJaggedTensor, feature: str, start: int, stop: int) -> tuple[int, int]:
        """Where the ids of samples [start, stop) of a feature lie among the feature's."""
        keys = kjt.keys()
        if feature not in keys:
            return 0, 0  # of a collection that takes no part
        first = keys.index(feature) * kjt.stride()
        begin, *bounds = (int(kjt.offsets()[first + sample]) for sample in (0, start, stop))
        return bounds[0] - begin, bounds[1] - begin

    def _lookup(self, collection: int, kjt: KeyedJaggedTensor) -> list[Tensor]:
        """Called by an attached collection's forward: the prepared outputs, or a lookup of its own."""
        if self._micro is not None:
            if self._micro.kjt is not kjt or collection not in self._rounds[0].collections:
                raise ConfigError(
                    "a model that computes its KeyedJaggedTensor cannot run on micro-batches: its rows are looked up "
                    "once per step, from the batch; set train.gradient_accumulation_steps to 1"
                )
            return self._of_collection(self._micro.outputs, collection)
        for round_ in self._rounds:
            if round_.kjt is kjt and collection in round_.collections:
                return self._of_collection(round_.outputs, collection)
        self._run_lookup(kjt, collection)
        return self._of_collection(self._rounds[-1].outputs, collection)

    def _of_collection(self, outputs: Sequence[Tensor], collection: int) -> list[Tensor]:
        return [t for spec, t in zip(self.plan.outputs, outputs) if spec.collection == collection]

    def _run_lookup(self, kjt: KeyedJaggedTensor, collection: int) -> None:
        """Route, header, ids, values and pooling of one more KeyedJaggedTensor, for one collection."""
        sequence = len(self._rounds)
        routed = self._route(StepInput(kjt), collection)
        self._rounds.append(_Round(routed.lookup, kjt, routed.collections))
        headers = self.exchange.header(
            Kind.BATCH,
            self._step,
            micro_batch=sequence,
            sections=self.rows.sections(routed.lookup),
            **routed.fields(),
        )
        if headers.statuses.any():
            self._raise_for_status(headers, None)
        self._fetch(routed, headers, no_riders, None)

    def _route(self, given: StepInput, collection: int | None = None) -> Routed:
        """Bring the ids of a KeyedJaggedTensor in order of their owners, for one collection, or (None) for all."""
        kjt, error = given.kjt, given.error
        if collection is None:
            try:
                kjt = expand_inverse_indices(kjt)
            except DataError as problem:
                # This rank takes part without samples and its error is raised on all ranks.
                error = error or problem
                kjt = KeyedJaggedTensor(keys=kjt.keys(), values=kjt.values()[:0], lengths=kjt.lengths()[:0], stride=0)
        lookup = self._free.pop() if self._free else self.plan.new_lookup()
        columns, collections = self._key_columns(kjt, collection)
        status, detail = Status.OK, ""
        if error is not None:
            status, detail = Status.DATA, f"{type(error).__name__}: {error}"
        route = lookup.route(
            kjt.values(),
            kjt.offsets(),
            kjt.weights_or_none(),
            columns,
            kjt.stride(),
            training=self._is_training,
        )
        if route.status and error is None:
            status, detail = Status.BAD_ID, self._describe_bad_id(route)
        self.clock.mark("route")
        given = dataclasses.replace(given, kjt=kjt, error=error)
        return Routed(given, lookup, collections, status, detail, (route.num_dropped, route.num_remapped))

    def _route_early(self, given: StepInput) -> Routed | None:
        """The same for a later step; None when it cannot be: that is said once the step begins."""
        try:
            return self._route(given)
        except Exception:  # it comes again where it belongs
            return None

    def _fetch(self, routed: Routed, headers: Headers, riders: Riders, ids: HeldIds | None) -> None:
        """Ids, values and pooling of the newest round; riders of its exchanges go with them."""
        if self._is_training:
            for index, count in enumerate(routed.counts):
                self._counts[index] += count
        faults.reach("step.header_done")
        sources = self.rows.fetch(routed.lookup, self._step, headers, self.clock.mark, riders, ids)
        faults.reach("step.values_done")
        self._pool_outputs(self._rounds[-1], sources)
        self.clock.mark("pool")

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent so far in this view: (to ranks of its host, to other hosts)."""
        local = [self.rows.local] if isinstance(self.rows, HierarchicalRows) else []
        counts = [count for exchange in (self.exchange, *local) for count in exchange.counts.values()]
        across = sum(count.bytes_sent_across_hosts for count in counts)
        return sum(count.bytes_sent for count in counts) - across, across

    def flow_counts(self) -> list[float]:
        """What the byte rule of flows needs to know of the open step (``flow_meter``)."""
        return count_flows(self.plan, [round_.lookup for round_ in self._rounds])

    def take_counts(self) -> tuple[int, int]:
        """(ids dropped, ids replaced) by policies on this rank in training since the last call."""
        dropped, remapped = self._counts
        self._counts = [0, 0]
        return dropped, remapped

    def _open_header(self, kind: Kind, step: int, sections: np.ndarray | None, **fields: Any) -> Headers:
        """The opening header of a step; ranks that wait for their batch announce nothing."""
        if sections is None:
            sections = np.zeros((self.rows.num_sections, self.exchange.identity.world_size), dtype=np.int64)
        timeout_s = self.exchange.timeout_s + self._start_timeout_s
        return self.exchange.header(kind, step, sections=sections, timeout_s=timeout_s, **fields)

    def _pool_outputs(self, round_: _Round, sources: np.ndarray) -> None:
        """Pool the received rows into tensors that autograd starts from."""
        outputs = round_.lookup.new_outputs()
        round_.lookup.pool(sources, outputs)
        weights = round_.kjt.weights_or_none()
        if self._is_training and weights is not None and weights.requires_grad and torch.is_grad_enabled():
            round_.grads = [torch.zeros_like(output) for output in outputs]
            outputs = list(_WeightedLookup.apply(round_, weights, *outputs))
        elif self._is_training:
            for output in outputs:
                output.requires_grad_(True)
        round_.outputs = outputs

    def end(
        self,
        *,
        dense_grad: Tensor | None,
        error: BaseException | None = None,
        learning_rates: np.ndarray,
        is_finite: bool = True,
        clip_norm: float | None = None,
    ) -> StepEnd:
        """Close a training step: exchange row and dense gradients, then apply on all ranks, or skip on all.

        Args:
            dense_grad: float32 [n], this rank's summed dense gradients; replaced by the sum over ranks.
            error: this rank failed in forward or backward; every rank raises because of it.
            is_finite: whether this rank's losses were finite.
            learning_rates: float32 [num tables] of this step.
            clip_norm: scale all gradients, dense and of rows, so that their global norm is at most this.

        Returns: whether the step was applied, and whose numbers were not finite: a rank's own loss and gradients, the
            dense gradients summed over ranks, and with ``clip_norm`` the sums of rows and the norm (2^31 or more counts
            as not finite). Without it, finite gradients of a row whose sum over positions or ranks leaves the range of
            float32 are applied: only the row's owner can see that, and no exchange is left to tell the others.
        """
        self.clock.start()
        self._micro = None
        if self._decides:
            self._decide(error)
        grads = [self._grads_of(round_) for round_ in self._rounds]
        if is_finite and error is None:
            is_finite = _all_finite([g for flat in grads for g in flat] + ([] if dense_grad is None else [dense_grad]))
        status = Status.INTERNAL if error is not None else Status.OK if is_finite else Status.NON_FINITE
        reducer = self._reducer(dense_grad)
        self.clock.mark("rest")
        lookups = [round_.lookup for round_ in self._rounds]
        timeout_s = self.exchange.timeout_s + self._start_timeout_s
        self.rows.collect(lookups, grads, self._step, timeout_s)
        out, in_ = (list(sizes) for sizes in zip(*map(self.rows.gradient_bytes, lookups)))
        out.append(reducer.out_bytes)
        in_.append(reducer.in_bytes)
        rider = self._early.rider(Kind.GRADIENTS)
        if rider is not None:
            out.append(rider.out_bytes)
            in_.append(rider.in_bytes)
        exchange = self.exchange.round(Kind.GRADIENTS, self._step, np.stack(out), np.stack(in_))
        for lookup, flat, addresses in zip(lookups, grads, exchange.send_addresses):
            self.rows.write_gradients(lookup, flat, addresses)
        self.clock.mark("segment_sum")
        if dense_grad is not None:
            reducer.write(dense_grad, exchange.send_addresses[len(lookups)])
        if rider is not None:
            rider.write(exchange.send_addresses[-1])
        faults.reach("step.before_gradients")
        sources = exchange.run(status, timeout_s)
        if rider is not None:
            rider.read(sources[-1])
        faults.reach("step.gradients_done")
        self.clock.mark("B")
        bad = tuple(int(rank) for rank in np.nonzero(exchange.statuses == Status.NON_FINITE)[0])
        if len(bad) < np.count_nonzero(exchange.statuses):
            self._settle(exchange.statuses, status, error)
        if dense_grad is not None:
            self._reduce_dense(reducer, dense_grad, sources[len(lookups)])
            # All ranks hold the same sums, so they see the same without asking each other.
            if not bad and not _all_finite([dense_grad]):
                bad = tuple(range(self.exchange.identity.world_size))
        self._decides = self._has_extra = self._has_extra or len(self._rounds) > 1
        self._start_timeout_s = 0.0
        grad_norm, scale = None, 1.0
        if clip_norm is not None and not bad:
            grad_norm, scale, bad = self._clip(lookups, list(sources[: len(lookups)]), dense_grad, clip_norm)
        if bad:
            self._discard_rounds()
            self.exchange.applied = self._step
            return StepEnd(is_applied=False, non_finite_ranks=bad)
        if clip_norm is None:
            self.plan.apply(lookups, list(sources[: len(lookups)]), self._step + 1, learning_rates)
        else:
            self.plan.apply_held(lookups, scale, self._step + 1, learning_rates)
        if self.plan.shares_statistics:
            self._apply_shared(learning_rates)
        faults.reach("step.rows_applied")
        self._free.extend(lookups)
        self._rounds = []
        self.exchange.applied = self._step
        self.clock.mark("apply")
        return StepEnd(is_applied=True, grad_norm=grad_norm)

    def _clip(
        self, lookups: Sequence[Lookup], sources: Sequence[np.ndarray], dense_grad: Tensor | None, clip_norm: float
    ) -> tuple[float | None, float, tuple[int, ...]]:
        """(global norm of the summed gradients, factor for all of them, ()), the same on all ranks (S4); scales the
        dense ones. A row counts once, at its owner; the dense gradients are rank 0's, which all ranks have.

        (None, 1, owners) where the norm is not finite because of the rows of these owners, or of all together.
        """
        squares = self.plan.hold(lookups, sources)
        has_dense = dense_grad is not None and self.exchange.identity.rank == 0
        headers = self.exchange.header(
            Kind.NORM,
            self._step,
            numbers=squares,
            denominator=float(dense_grad.double().square().sum()) if has_dense else 0.0,  # type: ignore[union-attr]
            timeout_s=self.exchange.timeout_s + self._start_timeout_s,
        )
        norm = math.sqrt(squares_of(headers.numbers) + headers.denominator)
        if not math.isfinite(norm):
            by_owner = [math.isfinite(squares_of(numbers)) for numbers in headers.raw["numbers"]]
            owners = tuple(rank for rank, is_finite in enumerate(by_owner) if not is_finite)
            return None, 1.0, owners or tuple(range(len(by_owner)))
        # As torch.nn.utils.clip_grad_norm_ has it.
        scale = min(1.0, clip_norm / (norm + 1e-6))
        if dense_grad is not None and scale < 1.0:
            dense_grad.mul_(scale)
        return norm, scale, ()

    def _apply_shared(self, learning_rates: np.ndarray) -> None:
        """Owners of the column blocks of a row bring their sums of squares together, then update it (S7)."""
        plan = self.plan
        exchange = self.exchange.round(
            Kind.STATISTICS, self._step, plan.statistic_bytes_out[None, :], plan.statistic_bytes_in[None, :]
        )
        plan.write_statistics(exchange.send_addresses[0])
        sources = exchange.run(timeout_s=self.exchange.timeout_s + self._start_timeout_s)
        plan.apply_shared(sources[0], self._step + 1, learning_rates)

    def _decide(self, error: BaseException | None) -> None:
        """One header that says whether every rank's model got through its step; raises on all ranks if one did not."""
        status = Status.OK if error is None else Status.INTERNAL
        try:
            headers = self.exchange.header(
                Kind.DECIDE,
                self._step,
                status=status,
                detail="" if error is None else f"{type(error).__name__}: {error}",
                timeout_s=self.exchange.timeout_s + self._start_timeout_s,
            )
        except ShoalError as problem:
            if error is None:
                raise
            # The peers are in a lookup that this rank did not reach, so they cannot be told: the controller is.
            self._discard_rounds()
            agreed = PeerError(
                f"step {self._step} was not applied on any rank. rank {self.exchange.identity.rank}: "
                f"{type(error).__name__}: {error} ({problem})"
            )
            agreed.is_origin = True
            raise agreed from error
        if headers.statuses.any():
            self._raise_for_status(headers, error)
        self.clock.mark("B")

    def close(self, step: int, timeout_s: float | None = None) -> None:
        """Header-only closing exchange: after it every step up to ``step`` is committed on all ranks (S2)."""
        self._discard_rounds()
        self.exchange.close_step(step, timeout_s=timeout_s)

    def gather_bytes(self, step: int, payload: bytes) -> list[bytes] | None:
        """Send ``payload`` to rank 0, in one header and one round; returns all payloads there, None elsewhere."""
        world, rank = self.exchange.identity.world_size, self.exchange.identity.rank
        out = np.zeros((1, world), dtype=np.int64)
        if rank != 0:
            out[0, 0] = len(payload)
        headers = self.exchange.header(Kind.STATE, step, sections=out)
        round_ = self.exchange.round(Kind.STATE, step, out, headers.section_bytes)
        if rank != 0 and payload:
            ctypes.memmove(int(round_.send_addresses[0, 0]), payload, len(payload))
        sources = round_.run()
        if rank != 0:
            return None
        sizes = headers.section_bytes[0]
        return [payload if r == 0 else ctypes.string_at(int(sources[0, r]), int(sizes[r])) for r in range(world)]

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _discard_rounds(self) -> None:
        self._micro = None
        if self._rounds:
            for round_ in self._rounds:
                self._release(round_.lookup)
            self._rounds = []

    def _release(self, lookup: Lookup) -> None:
        self.plan.discard([lookup])
        self._free.append(lookup)

    def _key_columns(self, kjt: KeyedJaggedTensor, collection: int | None) -> tuple[np.ndarray, frozenset[int]]:
        """(int32 [num features]: each feature's column of ``kjt``, -1 where it takes no part; collections that do).

        With ``collection`` None every collection takes part whose features (and weights) are all there: a model may
        compute the KeyedJaggedTensor of another one from the batch. Raises KeyError naming what a collection misses.
        """
        has_weights = kjt.weights_or_none() is not None
        cache_key = (tuple(kjt.keys()), has_weights, collection)
        found = self._columns.get(cache_key)
        if found is None:
            features = self.model_tables.features
            position = {name: index for index, name in enumerate(kjt.keys())}
            missing = {f.collection for f in features if f.name not in position}
            if collection is None:
                missing |= {f.collection for f in features if f.is_weighted and not has_weights}
            elif collection in missing:
                names = sorted({f.name for f in features if f.collection == collection} - set(position))
                raise KeyError(f"the KeyedJaggedTensor lacks features {names}; it has {sorted(position)}")
            wanted = {f.collection for f in features} - missing if collection is None else {collection}
            columns = [position[f.name] if f.collection in wanted else -1 for f in features]
            found = self._columns[cache_key] = (np.array(columns, dtype=np.int32), frozenset(wanted))
        return found

    def _grads_of(self, round_: _Round) -> list[Tensor]:
        """Gradients in the plan's order; zeros for outputs the loss does not depend on."""
        if round_.grads is not None:
            return round_.grads
        return [torch.zeros_like(o) if o.grad is None else o.grad for o in round_.outputs]

    def _reducer(self, dense_grad: Tensor | None) -> DenseReducer:
        size = 0 if dense_grad is None else dense_grad.numel()
        if self._dense_reducer is None or self._dense_reducer.num_elements != size:
            identity = self.exchange.identity
            self._dense_reducer = DenseReducer(size, identity.rank, identity.world_size)
        return self._dense_reducer

    def _reduce_dense(self, reducer: DenseReducer, dense_grad: Tensor, sources: np.ndarray) -> None:
        """Sum the received dense gradients in rank order; large ones in slices that a second round brings together."""
        reducer.read(dense_grad, sources)
        if reducer.is_sliced:
            gather = self.exchange.round(
                Kind.DENSE, self._step, reducer.gather_out_bytes[None, :], reducer.gather_in_bytes[None, :]
            )
            reducer.gather_write(dense_grad, gather.send_addresses[0])
            reducer.gather_read(dense_grad, gather.run()[0])
        self.clock.mark("B")

    def _describe_bad_id(self, route) -> str:  # type: ignore[no-untyped-def]
        feature = self.model_tables.features[route.bad_feature]
        table = self.model_tables.tables[feature.table]
        return (
            f"feature {feature.name!r} has id {route.bad_value} at value {route.bad_position} of its batch, outside "
            f"table {table.logical_name!r} [0, {table.num_embeddings}); fix the data or set its policy to hash, oov or "
            "drop"
        )

    def _raise_for_status(self, headers: Headers, error: BaseException | None) -> None:
        """Raise the error of the lowest rank that has one: the same on all ranks; ``error`` is this rank's own."""
        self._discard_rounds()
        try:
            raise_for_status(headers.statuses, headers.details, self._step)
        except ShoalError as agreed:
            agreed.is_origin = bool(headers.statuses[self.exchange.identity.rank])
            raise agreed from error

    def _settle(self, statuses: np.ndarray, status: Status, error: BaseException | None) -> None:
        """Tell all ranks what went wrong in a rank's model, and raise the same error on all."""
        self._discard_rounds()
        detail = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            self.exchange.settle(self._step, statuses, status, detail)
        except ShoalError as agreed:
            agreed.is_origin = error is not None
            raise agreed from error


def non_finite_error(step: int, ranks: Sequence[int], skipped: int) -> NonFiniteError:
    """The error of a run whose budget of skipped steps is used up."""
    return NonFiniteError(
        f"loss or gradients of step {step} are not finite on ranks {list(ranks)}; {skipped} steps were skipped already "
        "(train.max_skipped_steps). Lower the learning rate or check the inputs"
    )


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all values are finite: a sum finds nearly every case, only a suspicious one is looked at in full."""
    for tensor in tensors:
        if tensor.numel() and not torch.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
            return False
    return True
