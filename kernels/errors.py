"""Errors a user or a peer process can see. Each class has a stable code; messages say what, where, why and the fix.

User errors derive from ``ValueError`` so that callers who know Python's conventions can catch them without knowing us.
What crosses a process (a peer's status, a timeout) derives from ``RuntimeError``.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base of every error Shoal raises on purpose. ``code`` is stable across releases."""

    code = "SHOAL-000"
    #: Whether this process is where it went wrong; None: not known. Set where the error arises, False on a rank that
    #: only learned of it.
    is_origin: bool | None = None

    def __str__(self) -> str:
        return f"[{self.code}] {super().__str__()}"


class ConfigError(ShoalError, ValueError):
    """A job file, an option or an argument is wrong: names the key, the value and the allowed range."""

    code = "SHOAL-101"


class DependencyError(ShoalError, RuntimeError):
    """An installed package is missing or does not fit: one line that names the versions that work."""

    code = "SHOAL-102"


class SchemaError(ShoalError, ValueError):
    """A data set does not match the declared schema: names the file, the column and both types."""

    code = "SHOAL-201"


class DataError(ShoalError, ValueError):
    """A value in the data is not allowed: names file, row group, row, feature and value where they are known."""

    code = "SHOAL-202"


class BadIdError(DataError):
    """An id lies outside a static table and the feature's policy is ``error``: names rank, feature, table and value."""

    code = "SHOAL-203"


class NonFiniteError(ShoalError, ArithmeticError):
    """A loss or gradient was NaN or infinite more often than the policy allows: names step and rank."""

    code = "SHOAL-204"


class CheckpointError(ShoalError, ValueError):
    """A checkpoint is missing, torn, damaged or does not fit: names file and table."""

    code = "SHOAL-301"


class CheckpointMismatchError(CheckpointError):
    """A sound checkpoint belongs to another model or optimizer: resuming from an older one would not help."""

    code = "SHOAL-306"


class StorageError(ShoalError, OSError):
    """Storage refused or failed an operation after its retries: names the operation and the URI."""

    code = "SHOAL-302"


class StorageFullError(StorageError):
    """Storage cannot take data: no space, over quota, read-only or not permitted. Partial files were removed."""

    code = "SHOAL-303"


class StorageMissingError(StorageError):
    """The object, folder or bucket does not exist."""

    code = "SHOAL-304"


class LockHeldError(ShoalError, RuntimeError):
    """Another run works in the same folder: names who, where, since when, and how to take over."""

    code = "SHOAL-307"


class LockLostError(ShoalError, RuntimeError):
    """This run's folder has been taken over by another controller: this one writes nothing any more and ends."""

    code = "SHOAL-308"


class PlanError(ShoalError, ValueError):
    """A placement is impossible: names the table, the bytes needed and the bytes free per worker."""

    code = "SHOAL-401"


class CapacityError(ShoalError, RuntimeError):
    """A store, a table or /dev/shm is full: names it, its limit and the option that raises it."""

    code = "SHOAL-402"


class PeerError(ShoalError, RuntimeError):
    """Another process failed or disagreed; names its rank."""

    code = "SHOAL-501"


class ProtocolError(PeerError):
    """Ranks disagree about the run, epoch, step, kind, plan or sizes of an exchange: names rank and field."""

    code = "SHOAL-502"


class ExchangeTimeoutError(PeerError):
    """An exchange or another wait passed its deadline: names the operation and the ranks that are missing."""

    code = "SHOAL-503"


class ClusterError(ShoalError, RuntimeError):
    """The Ray cluster cannot be reached or cannot hold the run: says what is missing and how to get it."""

    code = "SHOAL-601"


class FencedError(ClusterError):
    """This process has been replaced (a later controller of the run, a newer view): it may write no more."""

    code = "SHOAL-602"


class RowError(DataError):
    """A value of one row of a batch is not allowed. Who knows where the batch came from says it: see ``located``."""

    def __init__(self, column: str, row: int, reason: str) -> None:
        super().__init__(f"row {row} of the batch, column {column!r}: {reason}")
        self.column = column
        self.row = row
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, int, str]]:
        return RowError, (self.column, self.row, self.reason)

    def located(self, file: str, row_group: int, row: int) -> DataError:
        """The same complaint with the place in the data set: row ``row`` of a row group of a file."""
        return DataError(f"{file}, row group {row_group}, row {row}, column {self.column!r}: {self.reason}")
