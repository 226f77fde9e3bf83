"""FileEntry: what a checkpoint's manifest says about one of its data files, and the checksum it is sealed with.

Pure values: no tensors, no I/O. Workers write data files and return their entries; only the controller writes the
manifest that makes them a checkpoint (PROTOCOLS K1, F7).
"""

from __future__ import annotations

import dataclasses
import urllib.parse
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import TableSpec

#: The layout of data files and manifest. Raise it when an older reader could misread a newer file.
#: 2: incremental checkpoints: a manifest may name a parent, and a file may hold only what changed since it.
#: 3: a table may be cut into column blocks, each with files of its own. Others are written as 2, which older ones read.
FORMAT_VERSION = 3
UNCUT_FORMAT_VERSION = 2
#: The dense file holds the metric state of the run so far under names with this prefix.
METRICS_PREFIX = "metrics."


class Checksum:
    """A running CRC-32 (IEEE, zlib's): finds every single flipped bit and every burst of up to 32 bits.

    In the standard library, releases the GIL, and streams at 3.5 GB/s where SHA-256 does 1.3 and BLAKE2b 0.7; disks
    and object stores are slower than that. The text form names the algorithm, so that another can follow.
    """

    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes | memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def __str__(self) -> str:
        return f"crc32:{self._crc:08x}"


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of a whole buffer."""
    checksum = Checksum()
    checksum.update(data)
    return str(checksum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One data file of a checkpoint; ``path`` is relative to the checkpoint's folder.

    ``kind``: ``table`` (rows of ``table``, of the row blocks ``blocks`` in file order), ``deleted`` (ids of rows of
    ``table`` that are gone, of those blocks), ``dense`` or ``blob``.
    """

    path: str
    kind: str
    size_bytes: int
    checksum: str
    table: str | None = None
    num_rows: int = 0
    blocks: tuple[int, ...] = ()
    #: Table files: None: all rows of the blocks (which may have none); else only those updated after this step.
    since: int | None = None
    #: How many rows each of ``blocks`` has in the whole checkpoint; empty in files of format 1.
    block_rows: tuple[int, ...] = ()

    @property
    def shown(self) -> str:
        """The file and its table, for messages."""
        return f"{self.path} (table {self.table!r})" if self.table else self.path

    def to_json(self) -> dict[str, Any]:
        """A JSON object without the fields at their defaults."""
        values = dataclasses.asdict(self)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FileEntry:
        """Inverse of ``to_json``. Raises CheckpointError if a field is missing, unknown or of another type."""
        try:
            lists = {name: tuple(values.get(name, ())) for name in ("blocks", "block_rows")}
            entry = cls(**{**values, **lists})
        except TypeError as error:
            raise CheckpointError(f"manifest: file entry {dict(values)} is not understood: {error}") from error
        is_typed = isinstance(entry.path, str) and isinstance(entry.size_bytes, int) and isinstance(entry.checksum, str)
        if not is_typed or entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise CheckpointError(f"manifest: file entry {dict(values)} is not understood")
        return entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedFile(FileEntry):
    """A file as a load plan names it: of the checkpoint itself or of one that its chain of parents reaches."""

    #: The checkpoint's folder that holds it, relative to the run.
    folder: str
    #: Those of ``blocks`` to take rows of; the others' are in newer files.
    taken: tuple[int, ...]
    #: Row blocks of the table when the file was written.
    num_blocks: int
    #: Where the file was written with another cut into columns: the table that its rows are for, and the one they are
    #: of, a column block (or all) of the same logical table.
    target: str | None = None
    stored: TableSpec | None = None

    @property
    def loaded_into(self) -> str:
        """Name of the table that its rows are for."""
        return self.target or self.table or ""


def stored_blocks(owned: Sequence[int], num_blocks: int, stored_num_blocks: int) -> set[int]:
    """The row blocks, as numbered when a file was written, that overlap ``owned``, of ``num_blocks``."""
    if stored_num_blocks <= num_blocks:
        return {block // (num_blocks // stored_num_blocks) for block in owned}
    factor = stored_num_blocks // num_blocks
    return {block * factor + i for block in owned for i in range(factor)}


def part_path(table: str, rank: int, number: int) -> str:
    """Path of a table's part file within the checkpoint's folder (whose name carries epoch and attempt, F7)."""
    return f"tables/{folder_name(table)}/part-{rank:05d}-{number:05d}.arrow"


def deleted_path(table: str, rank: int) -> str:
    """Path of a file of deleted ids; not beside the part files, so that those of a folder share their columns."""
    return f"deleted/{folder_name(table)}/part-{rank:05d}.arrow"


def folder_name(table: str) -> str:
    """``table`` as one safe path segment: what a URL would escape is escaped, also a leading dot."""
    quoted = urllib.parse.quote(table, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
