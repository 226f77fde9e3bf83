"""Views: who has which rank, which row blocks live where, and who holds their copies. Pure.

Invariants, asserted by number in the test:
1. Every member has exactly one rank in [0, W); survivors keep their order; shares are 1/W.
2. A worker that replaces a lost one takes its rank number (F9): with as many replacements as losses all survivors keep
   theirs. Ranks without a replacement are closed up. Unless rank 0 itself is replaced, a survivor has it.
3. Every block of every table has exactly one owner; a row-wise table's counts differ by at most one block.
4. ``plan_view`` moves as few row-wise blocks as (3) allows; planning the same members again moves nothing.
5. Buddies are on another host where there is one (F5; ``buddies``), and stay where they may.
6. ``failover_view`` moves no block whose owner survives with its rows, and gives a lost one to who holds its copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shoal.actors.messages import BlockSet, Member, View
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec, WireCodecs
from shoal.platform.buddies import plan_buddies
from shoal.platform.placement import LEVEL_TOLERANCE, ShardingType, plan_placement, replan_placement, table_bytes
from shoal.platform.sharding import sharding_of


class Candidate(Protocol):
    """A worker that may be a member: what ``NewMember`` and ``Member`` have in common."""

    @property
    def worker_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewMember:
    """A worker that is to be in a view, without a rank yet."""

    worker_id: str
    host: str
    address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """What the views of one run share beside their members."""

    run: str
    transport: str = "auto"
    #: flat or hierarchical.
    exchange: str = "flat"
    store_host: str = ""
    store_port: int = 0
    sharding: Mapping[str, ShardingType] = dataclasses.field(default_factory=dict)
    #: Tables without an entry travel as fp32.
    codecs: Mapping[str, WireCodecs] = dataclasses.field(default_factory=dict)
    #: What is evened out over workers, by table name, in any unit; the table's bytes where it has no entry.
    loads: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Limit on a worker's table bytes, copies for others included; None: not checked.
    memory_bytes_per_worker: int | None = None
    #: Whether every rank has a buddy that holds copies of its blocks.
    replicate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
    """What a view asks to be copied, as against the view before it. Bytes are upper bounds: every id touched."""

    #: Worker id -> blocks that it owns or copies in the new view and holds in no way in the old one.
    receives: Mapping[str, BlockSet] = dataclasses.field(default_factory=dict)
    num_owner_changes: int = 0
    num_blocks: int = 0
    bytes_max: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_owner_changes or self.receives)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewPlan:
    """A view, what it takes to come to it, and why it looks like this."""

    view: View
    moves: Moves
    reason: str


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Members in rank order, and the new rank of every old one: the worker itself, or who replaces it, or None."""

    members: tuple[Candidate, ...]
    renumbered: tuple[int | None, ...]


def plan_view(
    base: View | None,
    epoch: int,
    members: Sequence[Candidate],
    tables: Sequence[TableSpec],
    spec: ViewSpec,
    *,
    replaced: Mapping[str, str] | None = None,
) -> ViewPlan:
    """The view of ``members``: balanced, and near to ``base``.

    Args:
        base: the view to start from; None for a run's first one.
        epoch: number of the new view, higher than the base's.
        members: all workers of the new view; those that are in ``base`` are its survivors. Ids are unique.
        replaced: worker id of a joiner -> worker id of the member of ``base`` whose rank it takes. Other joiners take
            the remaining free ranks, then new ones.

    Raises: PlanError if a worker would exceed ``spec.memory_bytes_per_worker``.
    """
    ranks = _assign_ranks(base, members, replaced or {})
    world_size = len(ranks.members)
    hosts = [member.host for member in ranks.members]
    if base is None:
        placed = plan_placement(
            tables,
            world_size,
            sharding=spec.sharding,
            hosts=hosts,
            loads=spec.loads,
            memory_bytes_per_worker=spec.memory_bytes_per_worker,
        )
        placement = {table.table: table.owners for table in placed}
    else:
        placement = replan_placement(
            tables,
            world_size,
            _renumber(base, ranks, lambda owner: owner),
            copies=_renumber(base, ranks, base.buddy),
            sharding=spec.sharding,
            hosts=hosts,
            loads=spec.loads,
            memory_bytes_per_worker=spec.memory_bytes_per_worker,
        )
    view = _view(base, epoch, ranks, placement, spec)
    _check_memory(view, tables, spec)
    return _view_plan(base, view, tables)


def failover_view(
    base: View,
    epoch: int,
    members: Sequence[Candidate],
    tables: Sequence[TableSpec],
    spec: ViewSpec,
    *,
    holders: Callable[[str, int], Sequence[str]],
    replaced: Mapping[str, str] | None = None,
) -> ViewPlan:
    """The view after a loss that is reached soonest: rows stay where they are; evenness comes later.

    A block's owner is, in this order: its owner in ``base`` if it lives and can bring the rows; the worker that takes
    a lost owner's rank; a member that can bring the rows; the living owner; the member with the fewest blocks.
    Where memory does not allow copies, the view has no buddies and the reason says so.

    Args:
        members: survivors and joiners.
        holders: (table, block) -> workers that can bring its rows to the recovery's target.
    """
    ranks = _assign_ranks(base, members, replaced or {})
    numbers = {member.worker_id: rank for rank, member in enumerate(ranks.members)}
    num_owned = [0] * len(ranks.members)
    placement: dict[str, tuple[int, ...]] = {}
    for table in tables:
        owners = []
        for block, old in enumerate(base.placement[table.name]):
            able = [numbers[worker] for worker in holders(table.name, block) if worker in numbers]
            own, heir = numbers.get(base.members[old].worker_id), ranks.renumbered[old]
            if own is not None and (own in able or not able):
                owner = own
            elif own is None and heir is not None:
                owner = heir
            else:
                owner = min(able or range(len(num_owned)), key=lambda rank: (num_owned[rank], rank))
            num_owned[owner] += 1
            owners.append(owner)
        placement[table.name] = tuple(owners)
    view = _view(base, epoch, ranks, placement, spec)
    try:
        _check_memory(view, tables, spec)
    except PlanError as err:
        plan = _view_plan(base, dataclasses.replace(view, buddies=()), tables)
        return dataclasses.replace(plan, reason=f"{plan.reason}; without copies: {err}") if view.buddies else plan
    return _view_plan(base, view, tables)


def needs_rebalance(view: View, tables: Sequence[TableSpec], spec: ViewSpec) -> str | None:
    """Why a planned view change with the same members would even things out; None where there is too little to gain.

    Loads count (bytes, unless told otherwise), not the number of blocks: the fullest worker has to lose LEVEL_TOLERANCE
    of the mean. So a placement that somebody asked for is left alone unless it is lopsided. A buddy that should be
    another, and a table that is off its host, are always a reason.
    """
    try:
        plan = plan_view(view, view.epoch + 1, view.members, tables, spec).view
    except PlanError:
        return None
    loads = _loads(view, tables, spec.loads)
    before, after = max(loads), max(_loads(plan, tables, spec.loads))
    mean = sum(loads) / view.world_size
    if before - after > LEVEL_TOLERANCE * mean:
        return (
            f"the fullest worker holds {before / mean:.2f} times the mean {'load' if spec.loads else 'bytes'} of "
            f"tables, {after / mean:.2f} would do"
        )
    astray = [table.name for table in tables if _is_astray(table, view, spec) and not _is_astray(table, plan, spec)]
    if astray:
        return f"{len(astray)} tables belong on one host each, {astray[0]!r} the first of them"
    if plan.buddies != view.buddies:
        num_other = sum(a != b for a, b in zip(plan.buddies, view.buddies or (-1,) * view.world_size))
        return f"copies of {num_other or view.world_size} workers belong elsewhere"
    return None


def _is_astray(table: TableSpec, view: View, spec: ViewSpec) -> bool:
    """Whether a table that is to stay on one host is on several."""
    is_bound = sharding_of(table, spec.sharding).is_host_bound
    return is_bound and len({view.hosts[rank] for rank in view.placement[table.name]}) > 1


def _loads(view: View, tables: Sequence[TableSpec], loads: Mapping[str, float]) -> list[float]:
    """Load of tables that every rank owns: bytes, with every id touched, where ``loads`` has no entry."""
    owned = [0.0] * view.world_size
    for table in tables:
        block_load = loads.get(table.name, table_bytes(table)) / table.num_blocks
        for rank in view.placement[table.name]:
            owned[rank] += block_load
    return owned


def count_moves(base: View, view: View, tables: Sequence[TableSpec]) -> Moves:
    """What has to be copied from ``base``'s members to ``view``'s. One pass over all blocks."""
    held_before, held_after = _holders(base), _holders(view)
    receives: dict[str, dict[str, list[int]]] = {}
    num_changes = num_blocks = bytes_max = 0
    for table in tables:
        block_bytes = table_bytes(table) // table.num_blocks
        for block, (before, after) in enumerate(zip(base.placement[table.name], view.placement[table.name])):
            num_changes += held_before[before][0] != held_after[after][0]
            for worker in held_after[after]:
                if worker not in held_before[before]:
                    receives.setdefault(worker, {}).setdefault(table.name, []).append(block)
                    num_blocks += 1
                    bytes_max += block_bytes
    return Moves(
        receives={worker: BlockSet.of(blocks) for worker, blocks in sorted(receives.items())},
        num_owner_changes=num_changes,
        num_blocks=num_blocks,
        bytes_max=bytes_max,
    )


def _holders(view: View) -> list[tuple[str, ...]]:
    """For every rank the worker ids of the owner and, where there is one, of the buddy."""
    ids = [member.worker_id for member in view.members]
    buddies = [view.buddy(rank) for rank in range(view.world_size)]
    return [(ids[rank],) if buddy is None else (ids[rank], ids[buddy]) for rank, buddy in enumerate(buddies)]


def _assign_ranks(base: View | None, members: Sequence[Candidate], replaced: Mapping[str, str]) -> _Ranks:
    assert members and len({m.worker_id for m in members}) == len(members), "members are unique and not none"
    if base is None:
        return _Ranks(tuple(members), ())
    by_id = {member.worker_id: member for member in members}
    slots: list[Candidate | None] = [by_id.get(member.worker_id) for member in base.members]
    joiners = []
    for member in members:
        if base.rank_of(member.worker_id) is not None:
            continue
        lost = base.rank_of(replaced[member.worker_id]) if member.worker_id in replaced else None
        if lost is not None and slots[lost] is None:
            slots[lost] = member
        else:
            joiners.append(member)
    free = [rank for rank, member in enumerate(slots) if member is None]
    if len(free) > len(joiners):
        # Ranks are closed up anyway: joiners take the last free ones behind a survivor, so that it becomes rank 0.
        first = next((rank for rank, member in enumerate(slots) if member is not None), -1)
        free = [rank for rank in free if rank > first][-len(joiners) :] if joiners else []
    taken = free[: len(joiners)]
    for rank, member in zip(taken, joiners):
        slots[rank] = member
    filled = [rank for rank, member in enumerate(slots) if member is not None]
    renumbered: list[int | None] = [None] * len(slots)
    for rank, old in enumerate(filled):
        renumbered[old] = rank
    in_order = [member for member in slots if member is not None] + joiners[len(taken) :]
    return _Ranks(tuple(in_order), tuple(renumbered))


def _renumber(base: View, ranks: _Ranks, pick: Callable[[int], int | None]) -> dict[str, tuple[int | None, ...]]:
    """Table -> for every block the new rank of ``pick`` of its owner in ``base``."""
    picked = [pick(rank) for rank in range(base.world_size)]
    renumbered = [None if rank is None else ranks.renumbered[rank] for rank in picked]
    return {table: tuple(renumbered[owner] for owner in owners) for table, owners in base.placement.items()}


def _view(
    base: View | None, epoch: int, ranks: _Ranks, placement: Mapping[str, tuple[int, ...]], spec: ViewSpec
) -> View:
    hosts = [member.host for member in ranks.members]
    buddies: tuple[int, ...] = ()
    if spec.replicate:
        buddies = plan_buddies(hosts, _kept_buddies(base, ranks) if base is not None else ())
    return View(
        run=spec.run,
        epoch=epoch,
        members=tuple(
            Member(rank=rank, worker_id=m.worker_id, host=m.host, share=1.0 / len(hosts), address=m.address)
            for rank, m in enumerate(ranks.members)
        ),
        placement=placement,
        transport=spec.transport,
        exchange=spec.exchange,
        codecs={t: wire for t in placement if (wire := spec.codecs.get(t, WireCodecs())) != WireCodecs()},
        mirrored=tuple(sorted(t for t in placement if spec.sharding.get(t) is ShardingType.DATA_PARALLEL)),
        store_host=spec.store_host,
        store_port=spec.store_port,
        buddies=buddies,
    )


def _kept_buddies(base: View, ranks: _Ranks) -> list[int | None]:
    """For every new rank the new rank of its buddy in ``base``, where both are still there or replaced."""
    kept: list[int | None] = [None] * len(ranks.members)
    for old, rank in enumerate(ranks.renumbered):
        buddy = base.buddy(old)
        if rank is not None and buddy is not None:
            kept[rank] = ranks.renumbered[buddy]
    return kept


def _check_memory(view: View, tables: Sequence[TableSpec], spec: ViewSpec) -> None:
    """Raise PlanError if the blocks a worker owns and copies for others exceed the limit."""
    limit = spec.memory_bytes_per_worker
    if limit is None:
        return
    owned = [math.floor(size) for size in _loads(view, tables, {})]
    for rank in range(view.world_size):
        copies = sum(owned[ward] for ward, buddy in enumerate(view.buddies) if buddy == rank)
        if owned[rank] + copies > limit:
            raise PlanError(
                f"worker {rank} of {view.world_size} would hold {owned[rank]} bytes of tables of its own and {copies} "
                f"bytes of copies for others; its limit is {limit}. Raise scaling.memory_per_worker, add workers, or "
                "set run.failure.recovery to checkpoint, which keeps no copies"
            )


def _view_plan(base: View | None, view: View, tables: Sequence[TableSpec]) -> ViewPlan:
    if base is None:
        return ViewPlan(view=view, moves=Moves(), reason=f"first view, {view.world_size} workers")
    moves = count_moves(base, view, tables)
    before = {member.worker_id for member in base.members}
    after = {member.worker_id for member in view.members}
    parts = [f"{base.world_size} -> {view.world_size} workers"]
    parts += [f"{worker} leaves" for worker in sorted(before - after)]
    parts += [f"{worker} joins as rank {view.rank_of(worker)}" for worker in sorted(after - before)]
    num_all = sum(table.num_blocks for table in tables)
    parts.append(
        f"{moves.num_owner_changes} of {num_all} row blocks change owner, at most {moves.bytes_max} bytes move"
    )
    return ViewPlan(view=view, moves=moves, reason="; ".join(parts))
