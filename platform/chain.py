"""Chains of checkpoints: full ones, incremental ones that build on a parent, and what each is worth (K2, K3). Pure.

1. A checkpoint beyond the first step of a later epoch is abandoned; so is what builds on it (K2).
2. An incremental checkpoint is complete only if its parent is, and so on to a full one.
3. The parent that ``merge_parts`` chooses holds every row that no part brings: no part leaves out more than it.
4. A chain has at most ``full_every`` checkpoints, and its increments together hold no more bytes than its full one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from shoal.actors.datafile import FileEntry
from shoal.actors.messages import SnapshotPart
from shoal.kernels.column_blocks import logical_tables
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import TableSpec
from shoal.platform.manifest import CheckpointName, Manifest


class CheckpointState(enum.Enum):
    """What a checkpoint's folder is worth."""

    COMPLETE = "complete"
    #: Complete, but of a history the run has left (K2).
    ABANDONED = "abandoned"
    #: No manifest, or a torn one: a write in progress or the leftovers of one.
    INCOMPLETE = "incomplete"
    #: The manifest, or a file it names, is not as it was written; or a parent is not.
    DAMAGED = "damaged"
    NEWER_FORMAT = "newer format"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One line of ``shoal ckpt ls``. ``reason`` says why ``state`` is not ``complete``."""

    name: CheckpointName
    #: The checkpoint's folder, without credentials.
    uri: str
    state: CheckpointState
    reason: str = ""
    size_bytes: int = 0
    #: Rows in its own files; of an incremental checkpoint those that changed.
    num_rows: int = 0
    created: str = ""
    manifest: Manifest | None = None

    @property
    def parent(self) -> str | None:
        return self.manifest.parent if self.manifest is not None else None


@dataclasses.dataclass(frozen=True)
class BaseDecision:
    """What the next checkpoint builds on: ``step`` is the base that workers are told, None: a full checkpoint."""

    step: int | None
    reason: str


def abandoned_reason(name: CheckpointName, first_steps: Mapping[int, int]) -> str | None:
    """Why a checkpoint is of a history the run has left, or None (K2). ``first_steps``: ``epoch_first_steps``."""
    for epoch, first_step in sorted(first_steps.items()):
        if epoch > name.epoch and name.step > first_step:
            return f"abandoned: epoch {epoch} went on from step {first_step}"
    return None


def judge(infos: Sequence[CheckpointInfo], first_steps: Mapping[int, int]) -> list[CheckpointInfo]:
    """``infos``, oldest first, with abandonment and chains taken into account: each as its own folder was found before.

    Manifests of usable checkpoints get their ``ancestors``.
    """
    judged: dict[str, CheckpointInfo] = {}
    for info in sorted(infos, key=lambda i: i.name):  # parents come first: names grow along a chain
        if info.state is CheckpointState.COMPLETE:
            reason = abandoned_reason(info.name, first_steps)
            if reason is not None:
                info = dataclasses.replace(info, state=CheckpointState.ABANDONED, reason=reason)
            if info.parent is not None:
                info = _with_parent(info, judged.get(info.parent))
        judged[str(info.name)] = info
    return list(judged.values())


def _with_parent(info: CheckpointInfo, parent: CheckpointInfo | None) -> CheckpointInfo:
    assert info.manifest is not None
    if (
        parent is None
        or parent.manifest is None
        or parent.state
        not in (
            CheckpointState.COMPLETE,
            CheckpointState.ABANDONED,
        )
    ):
        why = "is missing" if parent is None else f"is {parent.state.value}: {parent.reason}"
        reason = f"its parent {info.parent} {why}"
        return dataclasses.replace(info, state=CheckpointState.DAMAGED, reason=reason)
    linked = dataclasses.replace(info.manifest, ancestors=parent.manifest.chain)
    info = dataclasses.replace(info, manifest=linked)
    if parent.state is CheckpointState.ABANDONED and info.state is CheckpointState.COMPLETE:
        reason = f"its parent {parent.name} is {parent.reason}"
        info = dataclasses.replace(info, state=CheckpointState.ABANDONED, reason=reason)
    return info


def decide_base(infos: Sequence[CheckpointInfo], full_every: int, tables: Sequence[TableSpec]) -> BaseDecision:
    """What the next checkpoint builds on. ``infos`` as ``list_checkpoints`` returns them."""
    if full_every == 1:
        return BaseDecision(None, "full_every is 1")
    complete = [info for info in infos if info.state is CheckpointState.COMPLETE and info.manifest is not None]
    if not complete:
        return BaseDecision(None, "there is no complete checkpoint")
    newest = max(complete, key=lambda info: info.name).manifest
    assert newest is not None
    chain = newest.chain
    if len(chain) >= full_every:
        return BaseDecision(None, f"the chain has full_every = {full_every} checkpoints")
    if sum(manifest.size_bytes for manifest in chain[1:]) > chain[0].size_bytes:
        return BaseDecision(None, f"the increments since {chain[0].name} hold more bytes than it does")
    problem = _table_problem(newest, tables)
    return BaseDecision(None, problem) if problem else BaseDecision(newest.name.step, f"builds on {newest.name}")


def merge_parts(
    name: CheckpointName,
    parts: Sequence[SnapshotPart],
    infos: Sequence[CheckpointInfo],
    tables: Sequence[TableSpec],
) -> tuple[tuple[FileEntry, ...], str | None]:
    """(files, parent) of the manifest of ``name``, from the parts of all its ranks.

    Ranks may have left out rows since different steps, for they hear of a new base at different times: the newest of
    these has all that is left out. Raises CheckpointError if a part is of another epoch, step or a failed one, or if
    no complete checkpoint of that step or a later one is left.
    """
    for part in parts:
        if (part.epoch, part.step) != (name.epoch, name.step) or part.error is not None:
            what = f"step {part.step} of epoch {part.epoch}{': ' + part.error if part.error else ''}"
            raise CheckpointError(f"{name} cannot be completed by rank {part.rank}'s part of {what}")
    files = tuple(entry for part in parts for entry in part.files)
    since = max((part.since for part in parts if part.since is not None), default=None)
    if since is None:
        return files, None
    # A newer one than the base does as well, for it has more: the base may have been collected meanwhile.
    usable = [
        i.manifest
        for i in infos
        if i.state is CheckpointState.COMPLETE and i.manifest and since <= i.name.step < name.step and i.name < name
    ]
    parent = max(usable, key=lambda manifest: (-len(manifest.chain), manifest.name), default=None)
    if parent is None:
        raise CheckpointError(f"{name} cannot be completed: it builds on step {since}, of which no checkpoint is left")
    problem = _table_problem(parent, tables)
    if problem is not None:
        raise CheckpointError(f"{name} cannot be completed: {problem}")
    return files, str(parent.name)


def _table_problem(parent: Manifest, tables: Sequence[TableSpec]) -> str | None:
    """Why rows of ``tables`` cannot build on those in ``parent``; None where they can."""
    stored = {spec.name: spec for spec in parent.tables}
    cuts, stored_cuts = logical_tables(tables), logical_tables(parent.tables)
    for name, blocks in cuts.items():
        if name in stored_cuts and [b.columns for b in blocks] != [b.columns for b in stored_cuts[name]]:
            return f"table {name!r} is cut into other column blocks than in {parent.name}"
    for spec in tables:
        old = stored.get(spec.name)
        fields = ("num_blocks", "embedding_dim", "data_type")
        changed = [f for f in fields if old is not None and getattr(old, f) != getattr(spec, f)]
        if old is not None and old.optimizer.kind is not spec.optimizer.kind:
            changed.append("optimizer")
        if changed:
            return f"table {spec.name!r} has another {changed[0]} than in {parent.name}"
    return None
