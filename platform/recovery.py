"""Recovery: which step a run goes back to after a failure, and who gives what to whom (PROTOCOLS F4). Pure.

Invariants, asserted by number in the test:
1. The target is the highest step at which every row block and the dense state have a living supplier, of those at which
   no metric bins are missing if there is one; the newest durable checkpoint if that is higher, or if there is no such
   step (no checkpoint: step 0, initial values).
2. The target is never below an earlier attempt's, except to a checkpoint when copies are lost.
3. Every block has one owner, who can bring it to the target itself, or receives it in exactly one shipment from a
   worker that can, or (checkpoint, partial) reads it from storage.
4. Nothing moves whose owner survives with its rows.
5. The metric bins of every worker that contributed to the target reach exactly one member: the worker itself, else
   its replacement, else rank 0.
6. Deciding again from the same arguments gives the same decision.

Metric bins are raw (5): a snapshot holds what its worker counted by itself. Bins that an earlier recovery or a leaver
has handed over stay under their origin's name, with their step, until a later snapshot is protected; so a recovery to
that step hands them over again, and however often it is tried each origin counts once.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Holdings, RecoveryPlan, Shipment, View
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.membership import Candidate, ViewPlan, ViewSpec, failover_view, plan_view


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
    make_restore: Callable[[str, BlockSet], Any] | None = None,
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
        make_restore: (worker id, its blocks to read) -> what that worker reads of the checkpoint at ``durable_step``;
            None: whoever executes the plan fills ``restores`` in.
        floor: target of an earlier attempt of this recovery; None: this is the first.
        replaced: joiner -> the lost member of ``base`` whose rank it takes (F9).
        rows_reported: worker id -> rows it last said to own, to estimate what a partial recovery loses.

    Raises: PlanError where the remaining workers cannot hold the tables even without copies, and everything is read
    from a checkpoint.
    """
    blocks = [(table.name, block) for table in tables for block in range(table.num_blocks)]
    case = _Case(
        base=base,
        members=members,
        tables=tables,
        spec=spec,
        epoch=epoch,
        durable_step=durable_step,
        make_restore=make_restore,
        replaced=replaced or {},
        applied=max((held.applied for held in holdings.values()), default=0),
        supply=_Supply(holdings),
        blocks=blocks,
    )
    members_before = [member.worker_id for member in base.members]
    step = case.supply.highest(blocks, floor, members_before)
    if step is None and mode is RecoveryMode.PARTIAL:
        living = [key for key in blocks if base.members[base.placement[key[0]][key[1]]].worker_id in holdings]
        step = case.supply.highest(living, floor, members_before)
    if step is None or (durable_step or 0) > step:
        return _from_checkpoint(case, _why_checkpoint(case, step, floor))
    return _from_memory(case, step, rows_reported or {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """The arguments of one decision, checked and indexed."""

    base: View
    members: Sequence[Candidate]
    tables: Sequence[TableSpec]
    spec: ViewSpec
    epoch: int
    durable_step: int | None
    make_restore: Callable[[str, BlockSet], Any] | None
    replaced: Mapping[str, str]
    #: The most steps any survivor has applied.
    applied: int
    supply: _Supply
    blocks: Sequence[tuple[str, int]]

    @property
    def checkpoint(self) -> str:
        if self.durable_step is None:
            return "the initial values (there is no checkpoint)"
        return f"the checkpoint of step {self.durable_step}"

    def restores(self, view: View, blocks: BlockSet, *, is_for_all: bool) -> dict[str, Any]:
        """Worker id -> what it reads; with ``is_for_all`` also for members without blocks, for the dense state."""
        if self.durable_step is None or self.make_restore is None:
            return {}
        mine = {member.worker_id: view.owned_by(member.rank) & blocks for member in view.members}
        return {worker: self.make_restore(worker, own) for worker, own in mine.items() if own or is_for_all}


def _from_memory(case: _Case, step: int, rows_reported: Mapping[str, int]) -> RecoveryDecision:
    """All come to the snapshot of ``step``; blocks that nobody has come from the checkpoint (partial)."""
    supply = case.supply
    view_plan = failover_view(
        case.base,
        case.epoch,
        case.members,
        case.tables,
        case.spec,
        holders=lambda table, block: supply.holders(step, table, block),
        replaced=case.replaced,
    )
    view = view_plan.view
    lost = BlockSet.of(_by_table(key for key in case.blocks if not supply.holders(step, *key)))
    reason = f"back to the snapshot of step {step}; {view_plan.reason}"
    if lost:
        reason += f"; {len(lost)} row blocks that nobody has come from {case.checkpoint}"
    origins = supply.origins(step)
    unknown = [member.worker_id for member in case.base.members if member.worker_id not in origins]
    if unknown:
        reason += f"; metrics counted by {', '.join(unknown)} since the last evaluation are lost"
    plan = RecoveryPlan(
        step=step,
        from_checkpoint=False,
        shipments=supply.shipments(step, view, origins, {old: new for new, old in case.replaced.items()}),
        restores=case.restores(view, lost, is_for_all=False),
        lost_blocks=lost,
        reason=reason,
    )
    return RecoveryDecision(
        view=view,
        plan=plan,
        reason=reason,
        base_epoch=case.base.epoch,
        redone_steps=max(0, case.applied - step),
        rows_lost=_rows_lost(case.base, lost, case.tables, rows_reported),
    )


def _from_checkpoint(case: _Case, why: str) -> RecoveryDecision:
    """All read the newest checkpoint, or start from the initial values; placed evenly, since everything moves."""
    plan_of = _placed_anew(case)
    everything = BlockSet.of({table.name: range(table.num_blocks) for table in case.tables})
    step = case.durable_step or 0
    reason = f"back to {case.checkpoint}: {why}; {plan_of.reason}"
    restores = case.restores(plan_of.view, everything, is_for_all=True)
    return RecoveryDecision(
        view=plan_of.view,
        plan=RecoveryPlan(step=step, from_checkpoint=True, restores=restores, reason=reason),
        reason=reason,
        base_epoch=case.base.epoch,
        redone_steps=max(0, case.applied - step),
    )


def _placed_anew(case: _Case) -> ViewPlan:
    """An even view; without copies where memory does not hold them (F5: degraded, and said so)."""

    def plan(spec: ViewSpec) -> ViewPlan:
        return plan_view(case.base, case.epoch, case.members, case.tables, spec, replaced=case.replaced)

    try:
        return plan(case.spec)
    except PlanError as error:
        bare = plan(dataclasses.replace(case.spec, replicate=False))
        return dataclasses.replace(bare, reason=f"{bare.reason}; without copies: {error}")


def _why_checkpoint(case: _Case, step: int | None, floor: int | None) -> str:
    if step is not None:
        return f"it is newer than what the workers share (step {step})"
    usable = [held for held in case.supply.steps if floor is None or held >= floor]
    if not usable:
        beyond = "" if floor is None else f" of step {floor}, the target of an earlier attempt, or later"
        return f"no survivor has a snapshot{beyond}"
    missing = {held: sum(not case.supply.holders(held, *key) for key in case.blocks) for held in usable}
    best = min(usable, key=lambda held: (missing[held], -held))
    return f"nobody left has {missing[best]} of {len(case.blocks)} row blocks at step {best}"


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

    def origins(self, step: int) -> list[str]:
        """Workers whose metric bins at ``step`` somebody can bring, themselves or others."""
        kept = {w for held in self._holdings.values() for w, steps in held.aux.items() if step in steps}
        return sorted(kept.union(self._dense.get(step, ())))

    def highest(self, blocks: Sequence[tuple[str, int]], floor: int | None, counters: Collection[str]) -> int | None:
        """The highest step, not below ``floor``, at which somebody brings each of ``blocks`` and the dense state.

        A step at which all of ``counters`` have their metric bins goes before a higher one at which some are missing: a
        rank without rows may not have been copied when the rows of the others were.
        """
        steps = [step for step in self._dense if floor is None or step >= floor]
        steps = [step for step in steps if all(self.holders(step, *key) for key in blocks)]
        whole = [step for step in steps if set(counters) <= set(self.origins(step))]
        return max(whole or steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps at which somebody has the dense state."""
        return sorted(self._dense)

    def shipments(
        self, step: int, view: View, origins: Sequence[str], replacement_of: Mapping[str, str]
    ) -> tuple[Shipment, ...]:
        """What each member of ``view`` needs and cannot bring itself; one shipment for a pair of workers. Blocks that
        nobody has are in none."""
        blocks: dict[tuple[str, str], list[tuple[str, int]]] = {}
        num_sent: dict[str, int] = {}
        ids = [member.worker_id for member in view.members]
        for table, owners in view.placement.items():
            for block, owner in enumerate(owners):
                able = self.holders(step, table, block)
                if not able or ids[owner] in able:
                    continue
                source = min(able, key=lambda worker: (num_sent.get(worker, 0), worker))
                num_sent[source] = num_sent.get(source, 0) + 1
                blocks.setdefault((source, ids[owner]), []).append((table, block))
        dense = self._dense_pairs(step, view, set(blocks))
        aux = self._aux_pairs(step, view, origins, replacement_of)
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

    def _aux_pairs(
        self, step: int, view: View, origins: Sequence[str], replacement_of: Mapping[str, str]
    ) -> dict[tuple[str, str], list[str]]:
        """(source, target) -> workers whose bins travel. Both may be the same worker: it then adds what it holds for
        another to its own."""
        members = {member.worker_id for member in view.members}
        pairs: dict[tuple[str, str], list[str]] = {}
        for origin in origins:
            is_own = self.has_dense(step, origin)
            if origin in members and is_own:
                continue
            able = [worker for worker, held in self._holdings.items() if step in held.aux.get(origin, ())]
            able = [origin, *able] if is_own else able
            # A member that has fallen behind its own buddy gets its own back.
            heir = origin if origin in members else replacement_of.get(origin, "")
            target = heir if heir in members else view.members[0].worker_id
            source = target if target in able else able[0]
            pairs.setdefault((source, target), []).append(origin)
        return pairs


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
