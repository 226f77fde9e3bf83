"""Evening out a placement: single moves from the fullest worker to the emptiest. Pure.

Every move lowers the sum of squares of the loads, so it ends; the bound is for the reader.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

#: Workers whose loads differ by less than this part of the mean are left alone: a move has to gain something.
LEVEL_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """What moves of one table: the whole of it, or one of its row blocks."""

    load: float
    is_whole: bool
    #: Workers that it may live on; None: all.
    ranks: frozenset[int] | None = None
    #: Bytes that it takes along.
    size: float = 0.0


def level_loads(
    units: Sequence[Unit],
    owners: Sequence[list[int]],
    load: list[float],
    *,
    hosts: Sequence[Sequence[int]] = (),
    room: list[float] | None = None,
) -> None:
    """Move tables, and blocks where the counts allow it, from the fullest to the emptiest worker; in place.

    Args:
        units: per table; earlier ones are preferred where two would do as well.
        owners: per table the owner of every row block.
        load: of every worker.
        hosts: the workers of every host, if there is more than one: tables that must stay on a host are then evened out
            within it.
        room: bytes that every worker can still take; None: any number.
    """
    level = _Levelling(units, owners, load, room)
    everybody = range(len(load))
    pools = [everybody, *(list(ranks) for ranks in hosts if len(hosts) > 1)]
    for _ in range(len(units) + 1):
        moved = [level.run(pool) for pool in pools]
        if len(pools) == 1 or not any(moved):
            return


class _Levelling:
    def __init__(
        self, units: Sequence[Unit], owners: Sequence[list[int]], load: list[float], room: list[float] | None
    ) -> None:
        self._units = units
        self._owners = owners
        self._load = load
        self._room = room
        self._counts = [Counter(numbers) for numbers in owners]
        #: Worker -> the tables that it has blocks of.
        self._on: list[set[int]] = [set() for _ in load]
        for table, counts in enumerate(self._counts):
            for rank in counts:
                self._on[rank].add(table)

    def run(self, pool: Sequence[int]) -> bool:
        """Even out the workers of ``pool``; whether anything moved."""
        load = self._load
        tolerance = LEVEL_TOLERANCE * sum(load) / len(load)
        moved = False
        for _ in range(len(self._units) * len(load) + 1):
            full = max(pool, key=load.__getitem__)
            empty = min(pool, key=load.__getitem__)
            gap = load[full] - load[empty]
            table = self._choose(full, empty, gap) if gap > tolerance else None
            if table is None:
                return moved
            self._move(table, full, empty)
            moved = True
        return moved

    def _choose(self, full: int, empty: int, gap: float) -> int | None:
        best, best_distance = None, 0.0
        for table in sorted(self._on[full]):
            unit = self._units[table]
            distance = abs(2 * unit.load - gap)
            if not 0 < unit.load < gap or (best is not None and distance >= best_distance):
                continue
            if unit.ranks is not None and not (full in unit.ranks and empty in unit.ranks):
                continue
            if self._room is not None and unit.size > self._room[empty]:
                continue
            counts = self._counts[table]
            if unit.is_whole or counts[full] > counts[empty]:
                best, best_distance = table, distance
        return best

    def _move(self, table: int, full: int, empty: int) -> None:
        unit, numbers, counts = self._units[table], self._owners[table], self._counts[table]
        last = max(block for block, owner in enumerate(numbers) if owner == full)
        for block in range(len(numbers)) if unit.is_whole else [last]:
            counts[numbers[block]] -= 1
            counts[empty] += 1
            numbers[block] = empty
        if counts[full] == 0:
            del counts[full]
            self._on[full].discard(table)
        self._on[empty].add(table)
        self._load[full] -= unit.load
        self._load[empty] += unit.load
        if self._room is not None:
            self._room[full] += unit.size
            self._room[empty] -= unit.size
