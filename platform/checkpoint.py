"""Checkpoints of a run: make one visible, list, verify, choose one to resume from, plan its loading, collect old ones.

The decisions (``decide_resume``, ``plan_collect``) are pure functions of values (see also ``loadplan``); the
other functions do I/O through a ``Storage`` at the run's root. Workers write and read the data files
(``shoal.actors.snapshot`` and ``restore``); only the controller calls ``write_manifest`` and ``collect``.

1. A folder without a complete manifest, or whose files differ from it, is never resumed from (K1).
2. A checkpoint beyond the first step of a later epoch is abandoned: never resumed from by itself (K2).
3. Collection deletes the manifest first, keeps what a kept manifest names as parent, and does not touch active writes,
   damaged checkpoints (evidence) or newer formats (someone else's) (K3).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.actors.datafile import Checksum
from shoal.actors.messages import SnapshotPart
from shoal.kernels.errors import CheckpointError, StorageMissingError
from shoal.kernels.spec import TableSpec
from shoal.platform.chain import CheckpointInfo, CheckpointState, abandoned_reason, judge, merge_parts
from shoal.platform.epochs import epoch_first_steps
from shoal.platform.manifest import CHECKPOINTS, MANIFEST_NAME, CheckpointName, Manifest, decode, encode, is_torn
from shoal.platform.storage import Storage

_CHUNK_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What a full verification of one checkpoint found; it is sound if ``problems`` is empty."""

    uri: str
    name: CheckpointName
    #: It and those that it builds on; so are the files and the bytes counted.
    num_checkpoints: int
    num_files: int
    size_bytes: int
    #: One line each, naming file and table.
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return not self.problems


@dataclasses.dataclass(frozen=True)
class ResumeDecision:
    """Which checkpoint to resume from (None: start afresh) and why, as one sentence for the log."""

    manifest: Manifest | None
    reason: str


# ---- writing ------------------------------------------------------------------------------------------------------


def next_name(storage: Storage, epoch: int, step: int) -> CheckpointName:
    """The name for a new write of ``step`` in ``epoch``: the first attempt whose folder does not exist."""
    taken = {CheckpointName.parse(entry.name) for entry in storage.list_dir(CHECKPOINTS)}
    attempts = [name.attempt for name in taken if name and (name.epoch, name.step) == (epoch, step)]
    return CheckpointName(epoch, step, max(attempts) + 1 if attempts else 0)


def complete(
    storage: Storage, name: CheckpointName, parts: Sequence[SnapshotPart], tables: Sequence[TableSpec], **fields: Any
) -> Manifest:
    """Make the checkpoint that the ranks wrote in ``parts`` visible. ``fields``: the rest of its Manifest.

    Raises CheckpointError as ``merge_parts`` and ``write_manifest`` do, StorageError; there is no manifest then.
    """
    infos = list_checkpoints(storage) if any(part.since is not None for part in parts) else ()
    files, parent = merge_parts(name, parts, infos, tables)
    return write_manifest(storage, Manifest(name=name, tables=tuple(tables), files=files, parent=parent, **fields))


def write_manifest(storage: Storage, manifest: Manifest) -> Manifest:
    """Make a checkpoint visible, after checking that all its files are there in full size. Returns what was written.

    Raises CheckpointError, before writing, if a file is missing or short, the checkpoint exists already, its parent is
    not complete, or it is of a history that the run has left (K2): a controller that was replaced cannot bring it back.
    """
    directory = manifest.name.directory
    present = storage.list_files(directory)
    problems = _size_problems(manifest, present)
    reason = abandoned_reason(manifest.name, epoch_first_steps(storage))
    if reason is not None:
        problems.append(reason)
    if manifest.parent is not None:
        states = {str(info.name): info.state for info in list_checkpoints(storage)}
        if states.get(manifest.parent) is not CheckpointState.COMPLETE:
            problems.append(f"its parent {manifest.parent} is not a complete checkpoint")
    if MANIFEST_NAME in present:
        problems.insert(0, f"{directory}/{MANIFEST_NAME} exists already")
    if problems:
        raise CheckpointError(f"{directory} cannot be completed: {'; '.join(problems)}")
    if not manifest.created:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest = dataclasses.replace(manifest, created=now)
    storage.write_bytes(f"{directory}/{MANIFEST_NAME}", encode(manifest))
    return manifest


# ---- reading ------------------------------------------------------------------------------------------------------


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """The manifest of the checkpoint in ``directory``. CheckpointError names what is wrong with it."""
    path = f"{directory}/{MANIFEST_NAME}"
    try:
        return decode(storage.read_bytes(path), path)
    except StorageMissingError as error:
        raise CheckpointError(f"{path} is missing: {directory} is not a complete checkpoint") from error


def list_checkpoints(run: Storage | str, *, first_steps: Mapping[int, int] | None = None) -> list[CheckpointInfo]:
    """All checkpoint folders of a run, oldest first, each with its state.

    Checks manifests and the presence and size of their files, not their content (see ``verify_checkpoint``).

    Args:
        run: the run's folder.
        first_steps: epoch -> its first step (K2), beside what the journal and the manifests say.
    """
    storage = Storage(run) if isinstance(run, str) else run
    infos = []
    for entry in storage.list_dir(CHECKPOINTS):
        name = CheckpointName.parse(entry.name)
        if name is not None:
            infos.append(_inspect(storage, name))
    known = {**epoch_first_steps(storage), **(first_steps or {})}
    for info in infos:
        if info.manifest is not None and info.manifest.epoch_first_step is not None:
            known.setdefault(info.name.epoch, info.manifest.epoch_first_step)
    return judge(infos, known)


def open_checkpoint(uri: str) -> tuple[Storage, Manifest]:
    """The checkpoint at ``uri``, its folder or its run's (then the newest): (storage of the run, manifest).

    Raises CheckpointError where it, or one that it builds on, cannot be used.
    """
    storage = Storage(uri)
    name = CheckpointName.parse(storage.split()[1])
    if name is None:
        decision = decide_resume(list_checkpoints(storage), "must", where=storage.shown_uri)
        assert decision.manifest is not None
        return storage, decision.manifest
    folder, directory = storage.split()
    manifest = read_manifest(folder, directory)
    run, last = folder.split()
    if last != CHECKPOINTS:
        raise CheckpointError(f"{folder.shown_uri} is not the {CHECKPOINTS} folder of a run")
    if manifest.parent is None:
        return run, manifest
    info = next(info for info in list_checkpoints(run) if info.name == name)
    if info.state not in (CheckpointState.COMPLETE, CheckpointState.ABANDONED) or info.manifest is None:
        raise CheckpointError(f"{info.uri} cannot be used: {info.reason}")
    return run, info.manifest


def verify_checkpoint(uri: str) -> VerifyReport:
    """Read every file of the checkpoint at ``uri`` (its folder, or its run's), and of those that it builds on, and
    compare them with their manifests.

    Raises CheckpointError if a manifest cannot be used.
    """
    storage, manifest = open_checkpoint(uri)
    problems: list[str] = []
    for layer in manifest.chain:
        found = _size_problems(layer, storage.list_files(layer.name.directory))
        found = found or _checksum_problems(storage, layer)
        problems += found if layer is manifest else [f"{layer.name}: {problem}" for problem in found]
    return VerifyReport(
        uri=f"{storage.shown_uri.rstrip('/')}/{manifest.name.directory}",
        name=manifest.name,
        num_checkpoints=len(manifest.chain),
        num_files=sum(len(layer.files) for layer in manifest.chain),
        size_bytes=manifest.kept_bytes,
        problems=tuple(problems),
    )


# ---- decisions ----------------------------------------------------------------------------------------------------


def decide_resume(
    infos: Sequence[CheckpointInfo],
    policy: str | int,
    *,
    exclude: Collection[CheckpointName] = (),
    where: str = "this run",
) -> ResumeDecision:
    """Which of ``infos`` to resume from. Pure.

    ``policy``: ``never``; ``auto``: the newest sound one, or none; ``must``: the same, but none is an error; a step
    number: exactly that step. ``exclude`` names checkpoints that turned out damaged while loading. The reason names
    every newer one that was passed over. Raises CheckpointError.
    """
    if policy == "never":
        return ResumeDecision(None, "resume is 'never': starting from step 0")
    if policy not in ("auto", "must"):
        if not str(policy).isdecimal():
            raise CheckpointError(f"resume policy {policy!r} is unknown; use auto, must, never or a step number")
        return _resume_at(infos, int(policy), exclude, where)
    passed: list[str] = []
    for info in sorted(infos, key=lambda i: i.name, reverse=True):
        if info.state is CheckpointState.COMPLETE and not _is_excluded(info, exclude):
            skipped = f"; passed over {', '.join(passed)}" if passed else ""
            return ResumeDecision(info.manifest, f"resuming from {info.name}{skipped}")
        passed.append(f"{info.name} ({info.reason or 'failed to load'})")
    found = f"passed over {', '.join(passed)}" if passed else "there are none"
    if policy == "must":
        raise CheckpointError(f"{where} has no complete checkpoint: {found}")
    return ResumeDecision(None, f"no complete checkpoint ({found}): starting from step 0")


def plan_collect(
    infos: Sequence[CheckpointInfo],
    keep: int,
    active: Collection[CheckpointName] = (),
    first_steps: Mapping[int, int] | None = None,
) -> list[CheckpointName]:
    """Which checkpoint folders to delete so that the newest ``keep`` complete ones, and all they need, remain. Pure.

    In the order to delete them in: no checkpoint goes before those that build on it. Writes in progress have no
    manifest yet. Workers write their checkpoints in order, so an incomplete folder is a leftover once a newer
    checkpoint is complete, and at once where ``first_steps`` say it is abandoned; a newer one, or one that ``active``
    names, is left alone.
    """
    assert keep >= 1
    by_name = {str(info.name): info for info in infos}
    complete = sorted((i.name for i in infos if i.state is CheckpointState.COMPLETE), reverse=True)
    kept = {str(name) for name in [*complete[:keep], *active]}
    for info in infos:
        is_newest = not complete or info.name > complete[0]
        is_dead = abandoned_reason(info.name, first_steps or {}) is not None
        if info.state is CheckpointState.INCOMPLETE and is_newest and not is_dead:
            kept.add(str(info.name))
    frontier = list(kept)
    while frontier:
        found = by_name.get(frontier.pop())
        parent = found.parent if found is not None else None
        if parent is not None and parent not in kept:
            kept.add(parent)
            frontier.append(parent)
    removable = (CheckpointState.COMPLETE, CheckpointState.ABANDONED, CheckpointState.INCOMPLETE)
    doomed = [info.name for info in infos if str(info.name) not in kept and info.state in removable]
    return sorted(doomed, reverse=True)  # names grow along a chain


def discard(storage: Storage, name: CheckpointName) -> None:
    """Delete a checkpoint, or what a failed write left of one; the manifest first, so it is never seen half deleted."""
    storage.delete_file(f"{name.directory}/{MANIFEST_NAME}")
    storage.delete_dir(name.directory)


def collect(
    storage: Storage,
    keep: int,
    *,
    active: Collection[CheckpointName] = (),
    first_steps: Mapping[int, int] | None = None,
) -> list[CheckpointName]:
    """Delete what ``plan_collect`` says; returns the names."""
    known = {**epoch_first_steps(storage), **(first_steps or {})}
    doomed = plan_collect(list_checkpoints(storage, first_steps=known), keep, active, known)
    for name in doomed:
        discard(storage, name)
    return doomed


# ---- details ------------------------------------------------------------------------------------------------------


def _inspect(storage: Storage, name: CheckpointName) -> CheckpointInfo:
    uri = f"{storage.shown_uri.rstrip('/')}/{name.directory}"
    path = f"{name.directory}/{MANIFEST_NAME}"
    try:
        data = storage.read_bytes(path)
    except StorageMissingError:
        return CheckpointInfo(name=name, uri=uri, state=CheckpointState.INCOMPLETE, reason="it has no manifest")
    try:
        manifest = decode(data, path)
    except CheckpointError as error:
        state = CheckpointState.INCOMPLETE if is_torn(data) else CheckpointState.DAMAGED
        state = CheckpointState.NEWER_FORMAT if "is newer than" in str(error) else state
        return CheckpointInfo(name=name, uri=uri, state=state, reason=str(error))
    problems = _size_problems(manifest, storage.list_files(name.directory))
    if manifest.name != name:
        problems.append(f"its manifest is that of {manifest.name}")
    return CheckpointInfo(
        name=name,
        uri=uri,
        state=CheckpointState.DAMAGED if problems else CheckpointState.COMPLETE,
        reason="; ".join(problems),
        size_bytes=manifest.size_bytes,
        num_rows=manifest.num_rows,
        created=manifest.created,
        manifest=manifest,
    )


def _is_excluded(info: CheckpointInfo, exclude: Collection[CheckpointName]) -> bool:
    return info.manifest is not None and any(manifest.name in exclude for manifest in info.manifest.chain)


def _size_problems(manifest: Manifest, present: Mapping[str, int]) -> list[str]:
    """One line for every file of the manifest that is missing or of another size."""
    problems = []
    for entry in manifest.files:
        size = present.get(entry.path)
        if size is None:
            problems.append(f"{entry.shown}: the file is missing")
        elif size != entry.size_bytes:
            problems.append(f"{entry.shown}: truncated: {size} bytes, the manifest says {entry.size_bytes}")
    return problems


def _checksum_problems(storage: Storage, manifest: Manifest) -> list[str]:
    problems = []
    for entry in manifest.files:
        found = _checksum(storage, f"{manifest.name.directory}/{entry.path}")
        if found != entry.checksum:
            problems.append(f"{entry.shown}: damaged: checksum {found}, the manifest says {entry.checksum}")
    return problems


def _checksum(storage: Storage, path: str) -> str:
    def attempt() -> str:
        checksum = Checksum()
        with storage.open_input(path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                checksum.update(chunk)
        return str(checksum)

    return storage.retrying("read", path, attempt)


def _resume_at(
    infos: Sequence[CheckpointInfo], step: int, exclude: Collection[CheckpointName], where: str
) -> ResumeDecision:
    usable = (CheckpointState.COMPLETE, CheckpointState.ABANDONED)
    at_step = sorted((i for i in infos if i.name.step == step), key=lambda i: i.name, reverse=True)
    for info in at_step:
        if info.state in usable and not _is_excluded(info, exclude):
            return ResumeDecision(info.manifest, f"resuming from {info.name}, as asked")
    if at_step:
        reason = at_step[0].reason or "failed to load"
        raise CheckpointError(f"{where}: the checkpoint of step {step} cannot be used: {reason}")
    steps = ", ".join(str(s) for s in sorted({i.name.step for i in infos if i.state in usable})) or "none"
    raise CheckpointError(f"{where} has no checkpoint of step {step}; complete ones: {steps}")
