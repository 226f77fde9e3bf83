"""The manifest: the one file that makes a folder of data files a checkpoint (PROTOCOLS K1, K2). Pure: values and text.

1. The first line holds the checksum of all that follows, so any flipped or missing byte of the manifest is found.
2. A manifest of a newer format version is refused before anything else in it is interpreted.
3. ``decode(encode(m)) == m``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from shoal.actors.datafile import FORMAT_VERSION, UNCUT_FORMAT_VERSION, FileEntry, checksum_of
from shoal.kernels.errors import CheckpointError, ConfigError
from shoal.kernels.spec import ColumnBlock, DataType, OptimizerKind, OptimizerSpec, TableSpec, WeightDecayMode

MANIFEST_NAME = "manifest.json"
CHECKPOINTS = "checkpoints"

_FIRST_LINE = '{{"checksum": "{}",\n'
_NAME = re.compile(r"step-(\d{8,})\.e(\d+)(?:\.a(\d+))?")


@dataclasses.dataclass(frozen=True, order=True)
class CheckpointName:
    """Identity of a checkpoint within its run; ordered by (epoch, step, attempt), newest history last.

    ``step``: number of steps whose updates it holds. ``epoch``: of the view that wrote it. ``attempt``: counts writes
    of the same step in the same epoch, so that no attempt ever touches the files of another (F7).
    """

    epoch: int
    step: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}.e{self.epoch}" + (f".a{self.attempt}" if self.attempt else "")

    @property
    def directory(self) -> str:
        """Folder of the checkpoint, relative to the run."""
        return f"{CHECKPOINTS}/{self}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """The name a folder stands for, or None if it is not a checkpoint's."""
        match = _NAME.fullmatch(text)
        return cls(int(match[2]), int(match[1]), int(match[3] or 0)) if match else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint except its rows and tensors. All mappings hold JSON values only."""

    name: CheckpointName
    run: str
    #: World size that wrote it; for information, any other can load it.
    world_size: int
    tables: tuple[TableSpec, ...]
    files: tuple[FileEntry, ...]
    #: Position in the data: what the feed needs to go on with the very next batch.
    cursor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: First step of the epoch that wrote it (K2): older epochs' checkpoints beyond it are abandoned. None: unknown.
    epoch_first_step: int | None = None
    data_fingerprint: str | None = None
    #: Versions of shoal, torch and so on, for information.
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Metric values and other facts of the run at this step.
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: UTC time of writing, ISO 8601, for information.
    created: str = ""
    #: Folder name of the checkpoint this one completes (incremental checkpoints, K3); None: it is complete by itself.
    parent: str | None = None
    #: The manifests of the chain of parents, the oldest first. Not stored: ``checkpoint.list_checkpoints`` fills it in.
    ancestors: tuple[Manifest, ...] = ()
    #: 0: the oldest that can say what is in ``tables``.
    format_version: int = 0

    def __post_init__(self) -> None:
        if self.format_version == 0:
            is_cut = any(spec.columns is not None for spec in self.tables)
            object.__setattr__(self, "format_version", FORMAT_VERSION if is_cut else UNCUT_FORMAT_VERSION)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def num_rows(self) -> int:
        """Rows in its own files: of an incremental checkpoint those that changed. A row in column blocks is one."""
        once = self._counted_tables
        return sum(entry.num_rows for entry in self.files if entry.kind == "table" and entry.table in once)

    @property
    def _counted_tables(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.tables if spec.first_column == 0)

    @property
    def chain(self) -> tuple[Manifest, ...]:
        """The checkpoint after all it builds on, the oldest first. CheckpointError where its parents are not known."""
        if self.parent is not None and not self.ancestors:
            raise CheckpointError(f"{self.name} builds on {self.parent}, which is not known")
        return (*self.ancestors, self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that is needed to load it."""
        return sum(manifest.size_bytes for manifest in self.chain)

    @property
    def num_rows_total(self) -> int | None:
        """Rows in the whole checkpoint; None where a parent is not known, or is of format 1 and does not say."""
        if self.parent is not None and not self.ancestors:
            return None
        counts: dict[tuple[str | None, int], int] = {}
        for manifest in self.chain:
            if manifest.format_version == 1:
                return self.num_rows if manifest is self else None
            for entry in (file for file in manifest.files if file.table in self._counted_tables):
                counts |= {(entry.table, block): rows for block, rows in zip(entry.blocks, entry.block_rows)}
        return sum(counts.values())

    def find(self, kind: str, path: str | None = None) -> FileEntry | None:
        """The first file of ``kind`` (and, if given, of that path)."""
        return next((f for f in self.files if f.kind == kind and path in (None, f.path)), None)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON text, sealed by its first line."""
    values: dict[str, Any] = {
        "format_version": manifest.format_version,
        "run": manifest.run,
        "epoch": manifest.name.epoch,
        "step": manifest.name.step,
        "attempt": manifest.name.attempt,
    }
    for field in ("created", "world_size", "epoch_first_step", "cursor", "data_fingerprint", "parent"):
        values[field] = getattr(manifest, field)
    values |= {"versions": dict(manifest.versions), "summary": dict(manifest.summary)}
    values["tables"] = [_table_to_json(spec) for spec in manifest.tables]
    values["files"] = [entry.to_json() for entry in manifest.files]
    # One line per file and table keeps a large manifest readable and small.
    lines = []
    for key, value in values.items():
        if isinstance(value, list):
            items = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {items}\n ]" if value else f" {json.dumps(key)}: []")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    body = (",\n".join(lines) + "\n}\n").encode()
    return _FIRST_LINE.format(checksum_of(body)).encode() + body


def decode(data: bytes, where: str) -> Manifest:
    """Inverse of ``encode``. CheckpointError, naming ``where``, if it is torn, damaged or of a newer format."""
    if is_torn(data):
        raise CheckpointError(f"{where}: incomplete manifest ({len(data)} bytes): its writer stopped half way")
    values = _parse(data)
    # A newer format may be sealed in another way, so its number is looked at first.
    version = values.get("format_version") if values else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format version {version} is newer than this Shoal's {FORMAT_VERSION}; load it with a newer Shoal"
        )
    first, _, body = data.partition(b"\n")
    if first + b"\n" != _FIRST_LINE.format(checksum_of(body)).encode() or values is None:
        raise CheckpointError(f"{where}: the manifest is damaged: it does not match its checksum")
    try:
        name = CheckpointName(values["epoch"], values["step"], values["attempt"])
        own = {"name", "tables", "files", "ancestors"}
        taken = {f.name: values[f.name] for f in dataclasses.fields(Manifest) if f.name in values and f.name not in own}
        tables = tuple(_table_from_json(item) for item in values["tables"])
        files = tuple(FileEntry.from_json(item) for item in values["files"])
        return Manifest(name=name, tables=tables, files=files, **taken)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: the manifest is not understood: {error!r}") from error


def is_torn(data: bytes) -> bool:
    """Whether the text stops before its end, as after a crash of its writer: a leftover, not a damaged checkpoint."""
    return not data.endswith(b"}\n")


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _table_to_json(spec: TableSpec) -> dict[str, Any]:
    optimizer = {**dataclasses.asdict(spec.optimizer), "kind": spec.optimizer.kind.name.lower()}
    optimizer["weight_decay_mode"] = spec.optimizer.weight_decay_mode.name.lower()
    values = {**dataclasses.asdict(spec), "data_type": spec.data_type.value, "optimizer": optimizer}
    if spec.columns is None:
        del values["columns"]  # as before there were column blocks
    return values


def _table_from_json(values: Mapping[str, Any]) -> TableSpec:
    optimizer = dict(values["optimizer"])
    optimizer["kind"] = OptimizerKind[optimizer["kind"].upper()]
    optimizer["weight_decay_mode"] = WeightDecayMode[optimizer["weight_decay_mode"].upper()]
    taken = {**values, "data_type": DataType(values["data_type"]), "optimizer": OptimizerSpec(**optimizer)}
    if "columns" in values:
        taken["columns"] = ColumnBlock(**values["columns"])
    spec = TableSpec(**taken)
    try:
        spec.validate()
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return spec
