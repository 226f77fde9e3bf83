"""StepPlan and Lookup: the embedding side of one training step, all tables in one native call per phase.

Legend: W world size, T tables, F features (lookups), K keys (columns) of a batch, B batch size, N ids of a batch.

A ``StepPlan`` is built once per view: what every rank must agree on (tables, features, placement) and the memory of one
rank (its row store). A ``Lookup`` is one round of lookups of one batch. Its life, in order::

    result = lookup.route(...)            # ids -> unique rows per owner; bad ids by policy
    lookup.write_ids(send)                # -> ids exchange
    lookup.resolve(recv, recv_bytes)      # owner: ids -> rows; training reserves rows that are missing
    lookup.write_rows(send)               # -> values exchange
    lookup.pool(recv, outputs)            # rows -> pooled bags and sequences
    lookup.segment_sum(grads, send)       # -> gradients exchange
    plan.apply([lookup, ...], [recv, ...], step, lrs)
    plan.write_statistics(send)       # only with plan.shares_statistics: -> statistics exchange
    plan.apply_shared(recv, step, lrs)

Tables of the pooled flow (``WireCodecs.flow``) take the same calls: partial sums of bags follow the rows, gradients of
bags those of rows, and what ids the bags hold follows the ids.

Rows that this rank owns itself never enter a message (0 bytes to self): they are read from and written to the store in
place. Addresses are plain integers; ``send`` and ``recv`` are int64 arrays of one address per rank.

Guarantees (DESIGN 1, PROTOCOLS S5, S10): results are bit-identical for every placement and thread count. A row's
gradient is summed per source rank over its positions in order (table's features in plan order, then position; rows with
more than 512 positions in segments of 512), then over (lookup, source rank), then the optimizer runs once.

Python costs a constant number of native calls per phase, whatever the number of tables.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.kernels import _core
from shoal.kernels.column_blocks import check_tables
from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.outputs import StepMemory
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, Flow, IdPolicy, PoolingType, TableSpec, WireCodecs

_POOLING = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
_WORLD_SIZE_MAX = 65_535


class RouteResult(NamedTuple):
    """What ``Lookup.route`` found. With ``status`` != 0 the rank stays in the exchanges and reports the status."""

    #: 0: fine; 1: an id outside a static table whose feature's policy is ERROR.
    status: int
    #: Index of the feature in the plan, the id, and its index in the batch's values; -1 when status is 0.
    bad_feature: int
    bad_value: int
    bad_position: int
    #: Ids dropped (policy DROP, and ERROR), ids replaced (HASH, OOV).
    num_dropped: int
    num_remapped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """One output tensor: the pooled features of a collection side by side, or one sequence feature."""

    collection: int
    #: Indices of the plan's features, in column order.
    features: tuple[int, ...]
    #: Columns: sum of the widths of the features.
    width: int
    is_sequence: bool


def plan_outputs(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> list[OutputSpec]:
    """Output tensors in order: by collection; within one its pooled features as one tensor, then each sequence.

    The column blocks of a feature that reads a cut table are side by side in its output.
    """
    outputs = []
    for collection in sorted({feature.collection for feature in features}):
        members = [f for f, feature in enumerate(features) if feature.collection == collection]
        pooled = [f for f in members if features[f].pooling is not PoolingType.NONE]
        groups = [(tuple(pooled), False)] if pooled else []
        sequences = [f for f in members if features[f].pooling is PoolingType.NONE]
        groups += [(block, True) for block in _column_runs(tables, features, sequences)]
        for group, is_sequence in groups:
            width = sum(tables[features[f].table].embedding_dim for f in group)
            outputs.append(OutputSpec(collection=collection, features=group, width=width, is_sequence=is_sequence))
    return outputs


def _column_runs(
    tables: Sequence[TableSpec], features: Sequence[FeatureSpec], sequences: Sequence[int]
) -> list[tuple[int, ...]]:
    """``sequences`` cut before each that reads column 0 of its logical table: one run per output."""
    runs: list[tuple[int, ...]] = []
    for f in sequences:
        if tables[features[f].table].first_column == 0:
            runs.append((f,))
        else:
            runs[-1] += (f,)
    return runs


def _leaders(tables: Sequence[TableSpec]) -> list[int]:
    """Per table: index of the first column block of its logical table where it is another one; else -1."""
    firsts = {spec.logical_name: t for t, spec in reversed(list(enumerate(tables)))}
    return [-1 if firsts[spec.logical_name] == t else firsts[spec.logical_name] for t, spec in enumerate(tables)]


class StepPlan:
    """The tables, features and placement of one view, and this rank's part of the work.

    Args:
        store: this rank's rows; must know ``tables`` in the same order and own the blocks placed on ``rank``.
        tables: every table of the run.
        features: every lookup; features of one table are numbered in this order.
        placement: per table the owner of each row block, uint16 [num_blocks].
        num_threads: of the native kernels, at most the store's; never changes results.
        hosts: the number of each rank's host, where gradients are summed host by host (``row_exchange``); else empty.
        mirrored: tables (indices) whose values every rank keeps (data parallel): they are read here, and owners send
            all ranks what an update changes. Static and uncut; num_embeddings x embedding_dim float32 on every rank.
        codecs: wire formats and flow of each table; rows as fp32 unless given. What a codec rounds it rounds for rows
            of this rank, too. The pooled flow needs pooled features and no mirror. Its sections go straight to owners
            on other hosts also with ``hosts``: nobody else asks for the same partial sums.

    Raises ConfigError when sizes, ranks or indices do not fit together.
    """

    def __init__(
        self,
        store: RowStore,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        placement: Sequence[np.ndarray],
        *,
        rank: int,
        world_size: int,
        num_threads: int = 1,
        hosts: Sequence[int] = (),
        mirrored: Sequence[int] = (),
        codecs: Sequence[WireCodecs] | None = None,
    ) -> None:
        _check_plan(tables, features, placement, rank, world_size, num_threads)
        _check_mirrored(tables, mirrored)
        self.store = store
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.placement = tuple(np.ascontiguousarray(owners, dtype=np.uint16) for owners in placement)
        self.rank = rank
        self.world_size = world_size
        self.hosts = tuple(hosts)
        self.mirrored = tuple(sorted(mirrored))
        self._has_told = False
        self._held: Any = None
        self.outputs = tuple(plan_outputs(tables, features))
        self.codecs = tuple(codecs) if codecs is not None else (WireCodecs(),) * len(self.tables)
        _check_flows(self.tables, self.features, self.codecs, self.mirrored)
        self.has_pooled_flow = any(wire.flow is not Flow.ROWS for wire in self.codecs)
        self.hash = self._hash()
        self.native = _core.StepPlan(store.native, rank, world_size, num_threads, list(self.hosts))
        for spec, owners, leader, wire in zip(self.tables, self.placement, _leaders(tables), self.codecs, strict=True):
            self.native.add_table(owners.tolist(), leader, spec.shares_statistic, *map(int, wire))
        if self.mirrored:
            self.native.mirror(list(self.mirrored))
        place = {f: (o, column) for o, output in enumerate(self.outputs) for f, column in self._columns(output)}
        for output in self.outputs:
            self.native.add_output(output.width)
        for f, feature in enumerate(self.features):
            self.native.add_feature(
                feature.table, _POOLING[feature.pooling], feature.is_weighted, int(feature.policy), *place[f]
            )
        #: Whether each step's ``apply`` is followed by one more exchange and ``apply_shared`` (S7); equal on all ranks.
        self.shares_statistics = any(spec.shares_statistic for spec in self.tables)
        self._statistics = _core.SharedStatistics(self.native) if self.shares_statistics else None
        #: int64 [W]: bytes of that exchange to and from each rank; known after ``apply``.
        self.statistic_bytes_out = self.statistic_bytes_in = np.zeros(world_size, dtype=np.int64)

    def _columns(self, output: OutputSpec) -> list[tuple[int, int]]:
        column, columns = 0, []
        for f in output.features:
            columns.append((f, column))
            column += self.tables[self.features[f].table].embedding_dim
        return columns

    def _hash(self) -> int:
        """uint64 of all that ranks must agree on: tables, features, codecs, placement and the world size."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.world_size, self.hosts, self.mirrored, self.tables, self.features, self.codecs):
            digest.update(repr(part).encode())
        for owners in self.placement:
            digest.update(owners.astype("<u2").tobytes())
        return int.from_bytes(digest.digest(), "little")

    def mirror_bytes(self) -> int:
        """Bytes that this rank has to tell every other one of rows of mirrored tables that changed here; all that there
        are, the first time."""
        if not self.mirrored:
            return 0
        if not self._has_told:
            self.native.touch_mirrors()
            self._has_told = True
        return self.native.mirror_bytes()

    def write_mirrors(self, destinations: np.ndarray) -> None:
        """Write what ``mirror_bytes`` counted for every rank (int64 [W] addresses); it counts as told."""
        self.native.write_mirrors(destinations)

    def read_mirrors(self, sources: np.ndarray, source_bytes: np.ndarray) -> None:
        """Take over what other ranks changed. Raises ProtocolError naming the rank for a section that cannot be."""
        try:
            self.native.read_mirrors(sources, source_bytes)
        except _core.ProtocolViolation as error:
            raise ProtocolError(str(error)) from None

    def new_lookup(self) -> Lookup:
        """A reusable lookup with memory of its own; several may be in flight."""
        return Lookup(self)

    def apply(self, lookups: Sequence[Lookup], sources: Sequence[np.ndarray], step: int, lrs: np.ndarray) -> None:
        """Owner: sum each row's gradients in (lookup, source rank) order and run its optimizer once.

        Tables that share a statistic between their column blocks (S7) are not updated yet: with ``shares_statistics``
        the exchange of ``statistic_bytes_out`` and ``statistic_bytes_in`` follows, then ``apply_shared``.

        Args:
            lookups: in micro-batch order; each has had ``segment_sum``.
            sources: per lookup, int64 [W] addresses of the received gradient sections.
            step: number of the global step, from 1.
            lrs: float32 [T] learning rates of this step.
        """
        _check_sources(lookups, sources)
        self._check_rates(lrs)
        natives, addresses = [lookup.native for lookup in lookups], _addresses(sources)
        self.native.apply(natives, addresses, step, lrs)
        if self._statistics is not None:
            self.statistic_bytes_out, self.statistic_bytes_in = self._statistics.collect(natives, addresses)
        self.discard(lookups)

    def hold(self, lookups: Sequence[Lookup], sources: Sequence[np.ndarray]) -> list[float]:
        """Owner: sum each row's gradients as ``apply`` does, and keep the sums until ``apply_held``.

        Returns the sum of their squares in units of 2^-64 as four whole numbers below 2^32, the lowest first: sums of
        these over ranks are exact, so the norm does not depend on the placement: ``squares_of`` is their total. What is
        held is overwritten by the next call, applied or not.
        """
        _check_sources(lookups, sources)
        if self._held is None:
            self._held = _core.HeldGradients(self.native)
        return self._held.collect(self.native, [lookup.native for lookup in lookups], _addresses(sources))

    def apply_held(self, lookups: Sequence[Lookup], scale: float, step: int, lrs: np.ndarray) -> None:
        """Owner: run the optimizer on the gradients held, times ``scale`` (finite). Arguments as of ``apply``."""
        if self._held is None:
            raise ValueError("no gradients are held: hold comes first")
        if not math.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")
        self._check_rates(lrs)
        if scale != 1.0:
            self._held.scale(scale)
        self._held.apply(self.native, step, lrs)
        if self._statistics is not None:
            self.statistic_bytes_out, self.statistic_bytes_in = self._statistics.collect_held(self._held)
        self.discard(lookups)

    def _check_rates(self, lrs: np.ndarray) -> None:
        if lrs.dtype != np.float32 or lrs.shape != (len(self.tables),):
            raise ValueError(f"lrs must be float32 [{len(self.tables)}], not {lrs.dtype} {lrs.shape}")

    def write_statistics(self, destinations: np.ndarray) -> None:
        """Write the sums of squares of this rank's columns of each updated row to the addresses, int64 [W]."""
        assert self._statistics is not None
        self._statistics.write(destinations)

    def apply_shared(self, sources: np.ndarray, step: int, lrs: np.ndarray) -> None:
        """Owner: update the rows that ``apply`` left out, with the sums of squares received at ``sources``, int64 [W].

        Raises ProtocolError naming the rank, before any of these rows changes, for sums of other rows than its own.
        """
        assert self._statistics is not None
        try:
            self._statistics.apply(sources, step, lrs)
        except _core.ProtocolViolation as error:
            raise ProtocolError(str(error)) from None

    def discard(self, lookups: Sequence[Lookup]) -> None:
        """End the lookups of a skipped step or an evaluation: nothing changes, the batch's tensors are let go."""
        for lookup in lookups:
            lookup.release()


class Lookup:
    """One round of lookups; see the module's docstring for the order of calls."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.native = plan.native.new_lookup()
        # Tensors whose memory the native side reads between calls.
        self._batch: tuple[torch.Tensor, ...] = ()
        self._grads: tuple[torch.Tensor, ...] = ()
        self._memories = [StepMemory() for _ in plan.outputs]
        self._sums = np.zeros(plan.world_size, np.int64)
        self.batch_size = 0

    def route(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        key_columns: np.ndarray,
        batch_size: int,
        *,
        training: bool = True,
    ) -> RouteResult:
        """Take a batch: deduplicate the ids of every table over all features that read it.

        Args:
            values: [N] int64 or int32 ids, feature-major as in a KeyedJaggedTensor. Any bit pattern is an id.
            offsets: [K * B + 1] int64 or int32.
            weights: [N] float32 per-sample weights; needed when a feature of the plan is weighted.
            key_columns: int32 [F] the column of each feature of the plan, -1 where the batch lacks it (empty bags).
            batch_size: B, may be 0.
            training: whether rows that are missing will be created; evaluation reads their initial values.

        The tensors are read, never written, and kept alive until ``apply`` or ``discard``. Raises ValueError for
        dtypes, devices or offsets that cannot be.
        """
        values = _cpu_integers("values", values)
        offsets = _cpu_integers("offsets", offsets)
        if batch_size == 0 or offsets.numel() == 0:
            offsets = torch.zeros(1, dtype=torch.int64)
            batch_size = 0
        if weights is not None:
            if weights.numel() != values.numel():
                raise ValueError(f"{weights.numel()} weights for {values.numel()} ids")
            weights = weights.detach().to(dtype=torch.float32, device="cpu").contiguous()
        self._batch = (values, offsets) if weights is None else (values, offsets, weights)
        self.batch_size = batch_size
        return RouteResult(
            *self.native.route(
                values.data_ptr(),
                values.dtype == torch.int64,
                values.numel(),
                offsets.data_ptr(),
                offsets.dtype == torch.int64,
                offsets.numel(),
                0 if weights is None else weights.data_ptr(),
                key_columns,
                batch_size,
                training,
            )
        )

    def id_bytes(self) -> np.ndarray:
        """int64 [W] bytes of the ids section for each owner; 0 for this rank."""
        return self.native.id_bytes()

    def write_ids(self, destinations: np.ndarray) -> None:
        """Write each owner's ids section (layout: PROTOCOLS S10) to its address."""
        self.native.write_ids(destinations)

    def straight_id_bytes(self) -> np.ndarray:
        """int64 [W] bytes of a second ids section, for owners on other hosts where the plan has ``hosts``: that of the
        pooled tables, which the first one is then without."""
        return self.native.straight_id_bytes()

    def write_straight_ids(self, destinations: np.ndarray) -> None:
        """Write those sections."""
        self.native.write_straight_ids(destinations)

    def resolve(
        self,
        sources: np.ndarray,
        source_bytes: np.ndarray,
        straight: np.ndarray | None = None,
        straight_bytes: np.ndarray | None = None,
    ) -> None:
        """Owner: read the sections of all ranks and find their rows; in training, reserve those that are missing.

        ``straight``: the second sections, where there are any.

        Raises ProtocolError naming the rank for counts that do not fit the bytes, unknown tables, ids outside a static
        table and ids of blocks that this rank does not own; no row has been touched then.
        """
        try:
            if straight is None or straight_bytes is None:
                self.native.resolve(sources, source_bytes)
            else:
                self.native.resolve_with_straight(sources, source_bytes, straight, straight_bytes)
        except _core.ProtocolViolation as error:
            raise ProtocolError(str(error)) from None

    def row_bytes_out(self) -> np.ndarray:
        """int64 [W] bytes of rows that this rank serves to each rank."""
        return self.native.row_bytes_out()

    def row_bytes_in(self) -> np.ndarray:
        """int64 [W] bytes of rows that this rank asks of each rank."""
        return self.native.row_bytes_in()

    def grad_bytes_out(self) -> np.ndarray:
        """int64 [W] bytes of gradients that this rank sends to each owner."""
        return self.native.grad_bytes_out()

    def grad_bytes_in(self) -> np.ndarray:
        """int64 [W] bytes of gradients that each rank sends this owner."""
        return self.native.grad_bytes_in()

    def sum_bytes_in(self) -> np.ndarray:
        """int64 [W] bytes of partial sums that come straight from owners whose rows a carrier brings."""
        return self.native.sum_bytes_in()

    def bag_grad_bytes_out(self) -> np.ndarray:
        """int64 [W] bytes of gradients of bags that go straight to such owners."""
        return self.native.bag_grad_bytes_out()

    def place_sums(self, addresses: np.ndarray) -> None:
        """Where ``sum_bytes_in`` of each owner have arrived, int64 [W]; before ``pool``."""
        self._sums = addresses

    def write_rows(self, destinations: np.ndarray) -> None:
        """Owner: gather the rows each rank asked for, in its order, in wire format."""
        self.native.write_rows(destinations)

    def new_outputs(self) -> list[torch.Tensor]:
        """Uninitialised float32 tensors for ``pool``: [B, width] per pooled output, [N_f, D] per sequence."""
        counts = self.native.feature_counts() if any(output.is_sequence for output in self.plan.outputs) else None
        return [
            memory.take(
                (self.batch_size if counts is None or not o.is_sequence else int(counts[o.features[0]]), o.width)
            )
            for memory, o in zip(self._memories, self.plan.outputs)
        ]

    def pool(self, sources: np.ndarray, outputs: Sequence[torch.Tensor]) -> None:
        """Pool received and local rows into ``outputs`` (contiguous float32, shapes of ``new_outputs``).

        SUM adds weight * row in position order; MEAN divides that by the number of ids of the bag that were kept; an
        empty bag is 0; a dropped id of a sequence is a row of zeros.
        """
        self.native.pool(sources, self._sums, [tensor.data_ptr() for tensor in outputs])

    def segment_sum(self, grads: Sequence[torch.Tensor], destinations: np.ndarray) -> None:
        """Sum the gradients of each unique row; write those of other ranks' rows to their sections.

        ``grads`` match ``outputs``; they must not change until ``apply``, which sums those of local rows.
        """
        self._grads = tuple(_cpu_floats(grad) for grad in grads)
        self.native.segment_sum([grad.data_ptr() for grad in self._grads], destinations)

    def write_sums(self, destinations: np.ndarray) -> None:
        """After ``segment_sum``: write the sums for further ranks; here and there a destination of 0 is left out."""
        self.native.write_sums(destinations)

    def write_straight_grads(self, destinations: np.ndarray) -> None:
        """After ``segment_sum``: write ``bag_grad_bytes_out`` for each owner to its address."""
        self.native.write_straight_grads(destinations)

    def weight_grad(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradient of the per-sample weights, float32 [N]: <bag's gradient, row>, over the count for MEAN.

        0 for ids of unweighted features and dropped ids. Call after ``pool`` and before ``apply``. A column read by
        several weighted features receives the sum. Raises ConfigError for tables of the pooled flow, whose rows are not
        here.
        """
        for feature in self.plan.features:
            if feature.is_weighted and self.plan.codecs[feature.table].flow is not Flow.ROWS:
                raise ConfigError(
                    f"table {self.plan.tables[feature.table].name!r}: learned per-sample weights need flow rows"
                )
        kept = [_cpu_floats(grad) for grad in grads]
        out = torch.zeros(self._batch[0].numel(), dtype=torch.float32)
        self.native.weight_grad([grad.data_ptr() for grad in kept], out.data_ptr())
        return out

    def flow_counts(self) -> np.ndarray:
        """int64 [T, 4] of the batch: unique rows, ids kept, and the partial sums that the pooled flow would take:
        one per (bag, row block), one per (bag, owner). Between ``route`` and the next; costs one pass over the ids."""
        return self.native.flow_counts().reshape(-1, 4)

    def release(self) -> None:
        """Let go of the batch's tensors."""
        self._batch = self._grads = ()

    def counters(self) -> dict[str, int | np.ndarray]:
        """Figures of the last route and resolve.

        num_ids, num_unique, num_dropped, num_remapped (once per row or id, whatever the number of column blocks),
        id_bytes, row_bytes (sent to other ranks), scratch_bytes; and int64 [T] table_unique (unique rows asked for)
        and table_served (rows served, per source rank).
        """
        return self.native.counters()


def squares_of(numbers: Sequence[float]) -> float:
    """Sum of the squares of the gradients that all ranks hold: of their ``hold`` results, summed over ranks.

    Infinity where a row is not finite, or where the sum is 2^62 or more.
    """
    total = sum(int(number) << (32 * index) for index, number in enumerate(numbers))
    return total / 2**64 if total < 2**126 else math.inf


def _check_sources(lookups: Sequence[Lookup], sources: Sequence[np.ndarray]) -> None:
    if len(lookups) != len(sources):
        raise ValueError(f"{len(lookups)} lookups but gradients of {len(sources)}")


def _addresses(sources: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(sources) if len(sources) else np.zeros(0, dtype=np.int64)


def _cpu_integers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be int64 or int32 on the CPU, not {tensor.dtype} on {tensor.device}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _cpu_floats(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(f"gradients must be float32 on the CPU, not {tensor.dtype} on {tensor.device}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _check_flows(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    codecs: Sequence[WireCodecs],
    mirrored: Sequence[int],
) -> None:
    sequences = {feature.table for feature in features if feature.pooling is PoolingType.NONE}
    for t, (table, wire) in enumerate(zip(tables, codecs)):
        if wire.flow is Flow.ROWS:
            continue
        for is_refused, why in (
            (t in sequences, "its rows are read one by one (unpooled)"),
            (t in mirrored, "it is data parallel"),
        ):
            if is_refused:
                raise ConfigError(f"table {table.name!r} needs flow rows: {why}")


def _check_mirrored(tables: Sequence[TableSpec], mirrored: Sequence[int]) -> None:
    for t in mirrored:
        if not tables[t].is_static or tables[t].logical_name != tables[t].name:
            raise ConfigError(
                f"table {tables[t].name!r} cannot be data parallel: every rank keeps it whole, so it must have a fixed "
                "num_embeddings and no column blocks"
            )


def _check_plan(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    placement: Sequence[np.ndarray],
    rank: int,
    world_size: int,
    num_threads: int,
) -> None:
    if not 1 <= world_size <= _WORLD_SIZE_MAX or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: the world size must be in [1, {_WORLD_SIZE_MAX}]")
    if not 1 <= num_threads <= 1024:
        raise ConfigError(f"num_threads is {num_threads}; it must be in [1, 1024]")
    if len(placement) != len(tables):
        raise ConfigError(f"{len(tables)} tables but placements of {len(placement)}")
    for table, owners in zip(tables, placement):
        if len(owners) != table.num_blocks:
            raise ConfigError(f"table {table.name!r}: {table.num_blocks} row blocks but {len(owners)} owners")
        if len(owners) and int(np.max(owners)) >= world_size:
            raise ConfigError(f"table {table.name!r}: a block is placed on rank {int(np.max(owners))} of {world_size}")
    check_tables(tables)
    for feature in features:
        if not 0 <= feature.table < len(tables):
            raise ConfigError(f"feature {feature.name!r}: there is no table {feature.table}")
        is_dynamic = not tables[feature.table].is_static
        if is_dynamic and feature.policy in (IdPolicy.HASH, IdPolicy.OOV):
            raise ConfigError(f"feature {feature.name!r}: policy {feature.policy.name} needs a static table")
        if feature.is_weighted and feature.pooling is PoolingType.NONE:
            raise ConfigError(f"feature {feature.name!r}: a sequence has no per-sample weights")
    _check_column_features(tables, features)


def _check_column_features(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
    """A feature that reads a cut table must read all its column blocks, in order, one after the other."""
    num_blocks_of = Counter(spec.logical_name for spec in tables)
    f = 0
    while f < len(features):
        first = features[f].table
        num_blocks = num_blocks_of[tables[first].logical_name]
        expected = [dataclasses.replace(features[f], table=first + block) for block in range(num_blocks)]
        if tables[first].first_column != 0 or list(features[f : f + num_blocks]) != expected:
            raise ConfigError(
                f"feature {features[f].name!r} does not read the column blocks of table "
                f"{tables[first].logical_name!r} one after the other"
            )
        f += num_blocks


__all__ = ["Lookup", "OutputSpec", "RouteResult", "StepPlan", "plan_outputs"]
