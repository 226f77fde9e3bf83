"""Which epoch numbers a run has used: one small object per epoch below ``journal/`` (PROTOCOLS V1).

Object stores have no append, so the number is in the object's name. Markers are never deleted: a checkpoint's name, and
whatever a straggler of an older attempt still writes, stay apart from those of every later attempt.
"""

from __future__ import annotations

import json
import re

from shoal.platform.storage import Storage

JOURNAL = "journal"
_NAME = re.compile(r"epoch-(\d{8,})\.json")


def newest_epoch(storage: Storage) -> int:
    """The highest epoch that was ever claimed in the run's folder; -1 before the first."""
    matches = (_NAME.fullmatch(entry.name) for entry in storage.list_dir(JOURNAL))
    return max((int(match[1]) for match in matches if match), default=-1)


def claim_epoch(storage: Storage, epoch: int, first_step: int) -> None:
    """Record that ``epoch`` is used from now on, by an attempt that goes on from ``first_step``."""
    record = json.dumps({"epoch": epoch, "first_step": first_step})
    storage.write_bytes(f"{JOURNAL}/epoch-{epoch:08d}.json", record.encode())
