"""The controller's journal: numbered, immutable records below ``journal/`` in the run's folder (PROTOCOLS F4, F7, F8).

Object stores have no append and no atomic rename, so a record is an object of its own,
``journal/<number>-<incarnation>.json``, written once. Every start of a controller is a new *incarnation*, one higher
than any before it.

1. ``append`` returns once the record is on storage: only then does anybody act on it.
2. A controller that sees a record of a higher incarnation raises FencedError and writes no more.
3. What a fenced controller managed to write before it saw the higher one is void: a record counts only if no record of
   a higher incarnation has its number or a lower one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.kernels.errors import FencedError
from shoal.platform.epochs import JOURNAL
from shoal.platform.storage import Storage

_NAME = re.compile(r"(\d{8,})-(\d{6,})\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One entry of the journal."""

    number: int
    incarnation: int
    #: Wall clock, for people.
    time: float
    #: ``run``: an incarnation begins; ``view``: a view is decided; ``target``: a recovery's step; ``end``.
    kind: str
    fields: Mapping[str, Any]


class Journal:
    """The journal as its one writer has it."""

    def __init__(self, storage: Storage, incarnation: int, next_number: int, clock: Callable[[], float]) -> None:
        self.incarnation = incarnation
        self._storage = storage
        self._next = next_number
        self._clock = clock

    def append(self, kind: str, **fields: Any) -> Record:
        """Write a record (fields: what JSON holds). Raises FencedError where a later controller has taken over."""
        names = _names(self._storage)
        newest = max((incarnation for _, incarnation in names), default=-1)
        if newest > self.incarnation:
            raise FencedError(
                f"controller {self.incarnation} of this run has been replaced by {newest}: it may write no more"
            )
        record = Record(
            number=self._next,
            incarnation=self.incarnation,
            time=round(self._clock(), 3),
            kind=kind,
            fields=fields,
        )
        self._next += 1
        data = {"time": record.time, "kind": kind, "fields": fields}
        self._storage.write_bytes(_path(record.number, record.incarnation), json.dumps(data).encode())
        return record


def open_journal(
    storage: Storage, least_incarnation: int = 0, clock: Callable[[], float] = time.time, **fields: Any
) -> tuple[Journal, tuple[Record, ...]]:
    """Begin a new incarnation: (the journal, to write to; what those before it wrote). Writes a ``run`` record."""
    names = _names(storage)
    number = max((number for number, _ in names), default=-1) + 1
    incarnation = max(least_incarnation, max((incarnation for _, incarnation in names), default=-1) + 1)
    journal = Journal(storage, incarnation, number, clock)
    journal.append("run", **fields)
    # Read after our own record stands: what a controller before us writes from now on is void, so this is complete.
    return journal, tuple(r for r in read_journal(storage) if r.incarnation < incarnation)


def read_journal(storage: Storage) -> tuple[Record, ...]:
    """All records that count, in order."""
    return tuple(_read(storage, number, incarnation) for number, incarnation in valid_names(_names(storage)))


def valid_names(names: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the (number, incarnation) of all records those that count (3), in order. Pure."""
    starts: dict[int, int] = {}
    for number, incarnation in names:
        starts[incarnation] = min(number, starts.get(incarnation, number))
    return sorted(
        (number, incarnation)
        for number, incarnation in names
        if all(number < start for other, start in starts.items() if other > incarnation)
    )


def _names(storage: Storage) -> list[tuple[int, int]]:
    matches = (_NAME.fullmatch(entry.name) for entry in storage.list_dir(JOURNAL))
    return [(int(match[1]), int(match[2])) for match in matches if match]


def _path(number: int, incarnation: int) -> str:
    return f"{JOURNAL}/{number:08d}-{incarnation:06d}.json"


def _read(storage: Storage, number: int, incarnation: int) -> Record:
    data = json.loads(storage.read_bytes(_path(number, incarnation)))
    return Record(number=number, incarnation=incarnation, **data)
