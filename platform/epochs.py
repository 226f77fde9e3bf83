"""Which epoch numbers a run has used, from which step each went on, and whose they are (PROTOCOLS V1, K2, F7).

One empty-handed object per epoch below ``journal/``: object stores have no append, so what a record says is in its
name, and one listing reads them all. Records are never deleted: a checkpoint's name, and whatever a straggler of an
older attempt still writes, stay apart from those of every later attempt.

1. An epoch number is claimed once. Of two controllers that claim the same one at the same time at most one succeeds:
   each writes its record first and looks at the others' then, so at least one of them sees both.
2. A controller that finds a record of a higher incarnation has been replaced and is told so (F7).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

from shoal.kernels.errors import LockLostError, StorageError
from shoal.platform.storage import Storage

JOURNAL = "journal"
_NAME = re.compile(r"epoch-(\d{8,})(?:\.first-(\d+)\.c(\d+))?\.json")


@dataclasses.dataclass(frozen=True, order=True)
class EpochRecord:
    """One used epoch number. ``incarnation``: of the controller that claimed it, 0 where runs have no lock."""

    epoch: int
    first_step: int
    incarnation: int = 0

    @property
    def path(self) -> str:
        return f"{JOURNAL}/epoch-{self.epoch:08d}.first-{self.first_step:08d}.c{self.incarnation}.json"


def read_epochs(storage: Storage) -> list[EpochRecord]:
    """All epochs that were ever claimed in the run's folder, ascending."""
    records = []
    for entry in storage.list_dir(JOURNAL):
        match = _NAME.fullmatch(entry.name)
        if match and match[2] is not None:
            records.append(EpochRecord(int(match[1]), int(match[2]), int(match[3])))
        elif match:  # as Shoal wrote it before 0.1: the step is inside
            records.append(EpochRecord(int(match[1]), _first_step_inside(storage, f"{JOURNAL}/{entry.name}")))
    return sorted(records)


def newest_epoch(storage: Storage) -> int:
    """The highest epoch that was ever claimed in the run's folder; -1 before the first."""
    return max((record.epoch for record in read_epochs(storage)), default=-1)


def epoch_first_steps(storage: Storage) -> Mapping[int, int]:
    """Epoch -> the step it went on from (steps applied): what makes older epochs' later checkpoints abandoned (K2)."""
    return first_steps_of(read_epochs(storage))


def first_steps_of(records: Sequence[EpochRecord]) -> Mapping[int, int]:
    """As ``epoch_first_steps``. Pure. Of an epoch that two controllers claimed the earlier step counts: what may be of
    a history that the run has left is not resumed from."""
    steps: dict[int, int] = {}
    for record in records:
        steps[record.epoch] = min(record.first_step, steps.get(record.epoch, record.first_step))
    return steps


def claim_epoch(storage: Storage, epoch: int, first_step: int, incarnation: int = 0) -> None:
    """Record that ``epoch`` is used from now on, by an attempt that goes on from ``first_step``.

    Call it at every view and every recovery, before any worker acts on it. Repeating a claim is harmless. Raises
    LockLostError when a controller of a higher incarnation has claimed any epoch, or another the same one.
    """
    own = EpochRecord(epoch, first_step, incarnation)
    _check_claim(own, read_epochs(storage))
    storage.write_bytes(own.path, json.dumps(dataclasses.asdict(own)).encode())
    try:
        _check_claim(own, read_epochs(storage))
    except LockLostError:
        storage.delete_file(own.path)  # the number stays used: the other's record names it
        raise


def _check_claim(own: EpochRecord, records: Sequence[EpochRecord]) -> None:
    newest = max((record.incarnation for record in records), default=0)
    if newest > own.incarnation:
        raise LockLostError(f"controller {newest} has taken this run over; controller {own.incarnation} ends")
    other = next((r for r in records if r.epoch == own.epoch and r != own), None)
    if other is not None:
        raise LockLostError(
            f"epoch {own.epoch} is claimed twice: from step {own.first_step} by controller {own.incarnation} and from "
            f"step {other.first_step} by controller {other.incarnation}; start the run again"
        )


def _first_step_inside(storage: Storage, path: str) -> int:
    try:
        return int(json.loads(storage.read_bytes(path))["first_step"])
    except (ValueError, KeyError, TypeError, StorageError):
        return 2**62  # torn: the number is used, and nothing is known to be abandoned
