"""What an earlier run of the same name has measured of its flows, for ``shoal plan``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.platform.config import JobConfig
from shoal.platform.telemetry import FileStore, read_events


def flow_notes(config: JobConfig) -> list[str]:
    """Notes from the run's folder, where it is a local one: remote storage is not read for them."""
    from shoal.platform.storage import Storage

    if "://" in config.run.storage_path or not os.path.isdir(config.run.run_dir):
        return []
    store: FileStore = Storage(config.run.run_dir)
    return advice_notes(config, read_events(store))


def advice_notes(config: JobConfig, events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The last ``flow_advice`` among events, but for tables whose settings have followed it."""
    last = None
    for event in events:
        last = event if event.get("kind") == "flow_advice" else last
    if last is None:
        return []
    notes = []
    for table, reason in last.get("tables", {}).items():
        flow = config.tables.of(table).flow or "rows"
        if not reason.startswith(f"flow {flow} "):
            notes.append(f"run {config.run.name} measured at step {last.get('step')}: table {table}: {reason}")
    return notes
