"""Recovery: which step a run goes back to after a failure, and who gives what to whom (PROTOCOLS F4). Pure.

Invariants, asserted by number in the test:
1. The target is the highest step at which every row block and the dense state have a living supplier; the newest
   durable checkpoint if that is higher, or if there is no such step (no checkpoint: step 0, initial values).
2. The target is never below an earlier attempt's, except to a checkpoint when copies are lost.
3. Every block has one owner, who can bring it to the target itself, or receives it in exactly one shipment from a
   worker that can, or (checkpoint, partial) reads it from storage.
4. Nothing moves whose owner survives with its rows.
5. The metric bins of every worker that contributed to the target reach exactly one member: the worker itself, else
   its replacement, else rank 0.
6. Deciding again from the same arguments gives the same decision.

A worker's ``aux`` entries and its own bins are *raw*: what each worker counted by itself up to that snapshot. Bins that
an earlier attempt has handed over stay with their holder under their origin's name until a higher snapshot is
protected; so attempts can be repeated without counting twice.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Holdings, RecoveryPlan, Shipment, View
from shoal.kernels.spec import TableSpec
from shoal.platform.membership import Candidate, ViewSpec, failover_view, plan_view


class RecoveryMode(enum.Enum):
    """What a run keeps against the loss of a worker (run.failure.recovery)."""

    #: Copies of every row block on a buddy.
    REPLICATED = "replicated"
    #: Checkpoints only: a lost owner takes the run back to the newest one.
    CHECKPOINT = "checkpoint"
    #: Lost rows come from the newest checkpoint, all others stay at the newest common snapshot.
    PARTIAL = "partial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryDecision:
    """The view to go on in, how to come there, and what it costs."""

    view: View
    plan: RecoveryPlan
    reason: str
    #: Epoch of the newest decided view that this starts from.
    base_epoch: int
    #: Steps that have to be done again: the most any survivor had applied, less the target.
    redone_steps: int
    #: Rows that go back to older values (partial recovery), as far as the last reports tell; an upper bound.
    rows_lost: int = 0


def newest_view(holdings: Iterable[Holdings], journalled: View | None) -> View | None:
    """The newest view that a survivor or the journal knows to be decided (V4: one rank's evidence is enough)."""
    views = [held.view for held in holdings if held.view is not None]
    views += [journalled] if journalled is not None else []
    return max(views, key=lambda view: view.epoch, default=None)


def plan_recovery(
    holdings: Mapping[str, Holdings],
    base: View,
    members: Sequence[Candidate],
    tables: Sequence[TableSpec],
    spec: ViewSpec,
    *,
    epoch: int,
    mode: RecoveryMode,
    durable_step: int | None,
    make_restore: Callable[[str, BlockSet], Any],
    floor: int | None = None,
    replaced: Mapping[str, str] | None = None,
    rows_reported: Mapping[str, int] | None = None,
) -> RecoveryDecision:
    """Decide the target and the way there.

    Args:
        holdings: worker id -> what it can bring, for every living, parked worker; also of those that are to leave.
        base: the newest decided view (``newest_view``).
        members: workers of the new view: those of ``base`` that live and stay, and joiners. Who has no holdings brings
            nothing.
        epoch: number of the new view, never used before.
        durable_step: steps applied at the newest checkpoint that counts (K2); None: there is none.
        make_restore: (worker id, its blocks to read) -> what that worker reads of the checkpoint at ``durable_step``.
        floor: target of an earlier attempt of this recovery; None: this is the first.
        replaced: joiner -> the lost member of ``base`` whose rank it takes (F9).
        rows_reported: worker id -> rows it last said to own, to estimate what a partial recovery loses.
    """
    supply = _Supply(holdings)
    blocks = [(table.name, block) for table in tables for block in range(table.num_blocks)]
    target = supply.full_target(blocks, floor)
    applied = max((held.applied for held in holdings.values()), default=0)
    durable = durable_step or 0
    partial = None
    if mode is RecoveryMode.PARTIAL and target is None:
        partial = supply.partial_target([key for key in blocks if supply.is_owner_alive(base, *key)], floor)
    step = target if target is not None else partial
    if step is None or durable > step:
        why = _why_checkpoint(supply, blocks, step, durable_step, floor)
        return _from_checkpoint(
            base, members, tables, spec, epoch, durable_step, make_restore, replaced, why, max(0, applied - durable)
        )
    view_plan = failover_view(
        base,
        epoch,
        members,
        tables,
        spec,
        holders=lambda table, block: supply.holders(step, table, block),
        replaced=replaced,
    )
    view = view_plan.view
    lost = BlockSet.of(_by_table(key for key in blocks if not supply.holders(step, *key)))
    restores = {} if durable_step is None else _restores(view, lost, make_restore)
    shipments = supply.shipments(step, view, lost, {old: new for new, old in (replaced or {}).items()})
    reason = f"step {step}: {view_plan.reason}"
    if lost:
        where = "their initial values" if durable_step is None else f"the checkpoint of step {durable_step}"
        reason += f"; {len(lost)} row blocks without a living copy come from {where}"
    plan = RecoveryPlan(
        step=step, from_checkpoint=False, shipments=shipments, restores=restores, lost_blocks=lost, reason=reason
    )
    return RecoveryDecision(
        view=view,
        plan=plan,
        reason=reason,
        base_epoch=base.epoch,
        redone_steps=max(0, applied - step),
        rows_lost=_rows_lost(base, lost, tables, rows_reported or {}),
    )


class _Supply:
    """Which living worker can bring what, at which step."""

    def __init__(self, holdings: Mapping[str, Holdings]) -> None:
        self._holdings = dict(sorted(holdings.items()))
        #: Step -> (table, block) -> workers.
        self._holders: dict[int, dict[tuple[str, int], list[str]]] = {}
        self._dense: dict[int, list[str]] = {}
        for worker, held in self._holdings.items():
            for step in held.snapshots:
                self._dense.setdefault(step, []).append(worker)
                self._add(step, worker, held.owned)
            for copies in held.copies:
                for step in copies.steps:
                    self._add(step, worker, copies.blocks)

    def _add(self, step: int, worker: str, blocks: BlockSet) -> None:
        for key in blocks:
            workers = self._holders.setdefault(step, {}).setdefault(key, [])
            if worker not in workers:
                workers.append(worker)

    def holders(self, step: int, table: str, block: int) -> Sequence[str]:
        return self._holders.get(step, {}).get((table, block), ())

    def has_dense(self, step: int, worker: str) -> bool:
        return worker in self._dense.get(step, ())

    def is_owner_alive(self, base: View, table: str, block: int) -> bool:
        return base.members[base.placement[table][block]].worker_id in self._holdings

    def full_target(self, blocks: Sequence[tuple[str, int]], floor: int | None) -> int | None:
        """The highest step, not below ``floor``, at which somebody brings each of ``blocks`` and the dense state."""
        steps = (step for step in self._dense if floor is None or step >= floor)
        return max((step for step in steps if all(self.holders(step, *key) for key in blocks)), default=None)

    #: In a partial recovery only the blocks of living owners count.
    partial_target = full_target

    def missing(self, step: int, blocks: Sequence[tuple[str, int]]) -> int:
        return sum(not self.holders(step, *key) for key in blocks)

    @property
    def steps(self) -> list[int]:
        return sorted(self._dense)

    def shipments(
        self, step: int, view: View, lost: BlockSet, replacement_of: Mapping[str, str]
    ) -> tuple[Shipment, ...]:
        """What each member of ``view`` needs and cannot bring itself; one shipment for a pair of workers."""
        blocks: dict[tuple[str, str], list[tuple[str, int]]] = {}
        num_sent: dict[str, int] = {}
        for member in view.members:
            for table, block in view.owned_by(member.rank) - lost:
                able = self.holders(step, table, block)
                if member.worker_id in able:
                    continue
                source = min(able, key=lambda worker: (num_sent.get(worker, 0), worker))
                num_sent[source] = num_sent.get(source, 0) + 1
                blocks.setdefault((source, member.worker_id), []).append((table, block))
        dense = self._dense_pairs(step, view, set(blocks))
        aux = self._aux_pairs(step, view, replacement_of)
        return tuple(
            Shipment(
                source=source,
                target=target,
                blocks=BlockSet.of(_by_table(blocks.get((source, target), ()))),
                has_dense=(source, target) in dense,
                aux_of=tuple(sorted(aux.get((source, target), ()))),
            )
            for source, target in sorted(blocks.keys() | dense | aux.keys())
        )

    def _dense_pairs(self, step: int, view: View, pairs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """(source, target) of the dense state: from who sends rows anyway, else spread over who has it."""
        chosen: set[tuple[str, str]] = set()
        num_sent = dict.fromkeys(self._dense[step], 0)
        for member in view.members:
            if member.worker_id in num_sent:
                continue
            near = [source for source in num_sent if (source, member.worker_id) in pairs]
            source = min(near or num_sent, key=lambda worker: (num_sent[worker], worker))
            num_sent[source] += 1
            chosen.add((source, member.worker_id))
        return chosen

    def _aux_pairs(self, step: int, view: View, replacement_of: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
        """(source, target) -> workers whose bins travel; source and target may be the same worker."""
        keepers = {member.worker_id for member in view.members if self.has_dense(step, member.worker_id)}
        holders: dict[str, list[str]] = {}
        for worker, held in self._holdings.items():
            own = [worker] if step in held.snapshots else []
            for origin in own + [other for other, steps in held.aux.items() if step in steps]:
                holders.setdefault(origin, []).append(worker)
        pairs: dict[tuple[str, str], list[str]] = {}
        members = {member.worker_id for member in view.members}
        for origin, able in sorted(holders.items()):
            if origin in keepers:
                continue
            # A living member that fell behind its own buddy takes its own bins back.
            heir = origin if origin in members else replacement_of.get(origin)
            target = heir if heir in members and heir is not None else view.members[0].worker_id
            source = target if target in able else able[0]
            pairs.setdefault((source, target), []).append(origin)
        return pairs


def _from_checkpoint(
    base: View,
    members: Sequence[Candidate],
    tables: Sequence[TableSpec],
    spec: ViewSpec,
    epoch: int,
    durable_step: int | None,
    make_restore: Callable[[str, BlockSet], Any],
    replaced: Mapping[str, str] | None,
    why: str,
    redone_steps: int,
) -> RecoveryDecision:
    view = plan_view(base, epoch, members, tables, spec, replaced=replaced).view
    everything = BlockSet.of({table.name: range(table.num_blocks) for table in tables})
    restores = {} if durable_step is None else _restores(view, everything, make_restore, is_for_all=True)
    plan = RecoveryPlan(step=durable_step or 0, from_checkpoint=True, restores=restores, reason=why)
    return RecoveryDecision(view=view, plan=plan, reason=why, base_epoch=base.epoch, redone_steps=redone_steps)


def _restores(
    view: View, blocks: BlockSet, make_restore: Callable[[str, BlockSet], Any], *, is_for_all: bool = False
) -> dict[str, Any]:
    mine = {member.worker_id: view.owned_by(member.rank) & blocks for member in view.members}
    return {worker: make_restore(worker, owned) for worker, owned in mine.items() if owned or is_for_all}


def _why_checkpoint(
    supply: _Supply,
    blocks: Sequence[tuple[str, int]],
    step: int | None,
    durable_step: int | None,
    floor: int | None,
) -> str:
    goal = "step 0, initial values: there is no checkpoint" if durable_step is None else f"checkpoint {durable_step}"
    if step is not None:
        return f"{goal}: it is newer than what the workers share (step {step})"
    usable = [held for held in supply.steps if floor is None or held >= floor]
    if not usable:
        beyond = "" if floor is None else f" of step {floor}, the target of an earlier attempt, or later"
        return f"{goal}: no survivor has a snapshot{beyond}"
    best = min(usable, key=lambda held: (supply.missing(held, blocks), -held))
    return f"{goal}: owner and copy of {supply.missing(best, blocks)} row blocks are lost (step {best} has the others)"


def _by_table(keys: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for table, block in keys:
        grouped.setdefault(table, []).append(block)
    return grouped


def _rows_lost(base: View, lost: BlockSet, tables: Sequence[TableSpec], rows_reported: Mapping[str, int]) -> int:
    """Upper bound on the rows in ``lost``: the size of static tables, and what their owners last reported."""
    sizes = {table.name: (table.num_embeddings, table.num_blocks) for table in tables}
    by_owner: dict[str, int] = {}
    for table, block in lost:
        owner = base.members[base.placement[table][block]].worker_id
        size, num_blocks = sizes[table]
        rows = -(-size // num_blocks) if size else rows_reported.get(owner, 0)
        by_owner[owner] = by_owner.get(owner, 0) + rows
    return sum(min(rows, rows_reported.get(owner, rows)) for owner, rows in by_owner.items())
