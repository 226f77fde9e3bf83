"""The declared schema of a training data set: which columns are labels, dense features, sparse features and weights.

Pure: standard library only. The types of columns are not declared but checked: what a column may hold follows from its
role (PROTOCOLS D, data faults 36-45):

* label, sample weight, dense: any integer, boolean or floating column;
* sparse, one id a row or a list of ids: integers of 8 to 64 bits (uint64 keeps its bits) or strings and binaries, which
  are hashed with XXH64, seed 0, over their bytes. Floating ids are refused: 2**53 + 1 does not survive them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.kernels.errors import ConfigError

ID_KINDS = ("auto", "id", "list", "string")
NULL_POLICIES = ("drop", "oov", "error")
LABEL_KINDS = ("binary", "regression")
MISSING_POLICIES = ("error", "zero")

#: What a null id becomes under ``null_policy="oov"`` unless the column says otherwise: an id outside every static
#: table, so that a table's ``IdPolicy.OOV`` sends it to the reserved last row.
OOV_ID = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One sparse feature: a column of ids (a bag of one per row) or of lists of ids."""

    #: The feature's name, the key in the KeyedJaggedTensor.
    name: str
    #: The column in the files; None: the feature's name.
    column: str | None = None
    #: ``auto`` takes what the files hold; ``id`` one integer a row; ``list`` lists of integers; ``string`` strings or
    #: binaries, alone or in lists. Anything else in the files is refused, naming the file and the column.
    kind: str = "auto"
    #: A column of weights, one per id: the same shape as the ids, row by row. None: every id weighs 1.
    weights_column: str | None = None
    #: Keep at most this many ids of a list, the first ones (the others are counted); None: all.
    max_length: int | None = None
    #: A null id, or a null list: ``drop`` (an empty place), ``oov`` (becomes ``oov_id``), ``error``. Counted.
    null_policy: str = "drop"
    #: The id that a null becomes under ``oov``.
    oov_id: int = OOV_ID

    @property
    def source(self) -> str:
        """The name of the column in the files."""
        return self.column if self.column is not None else self.name

    def validate(self) -> None:
        """Raise ConfigError naming the feature, the field, its value and what is allowed."""
        where = f"sparse feature {self.name!r}"
        if not self.name:
            raise ConfigError("a sparse feature has no name")
        if self.kind not in ID_KINDS:
            raise ConfigError(f"{where}: kind is {self.kind!r}; it must be one of {', '.join(ID_KINDS)}")
        if self.null_policy not in NULL_POLICIES:
            allowed = ", ".join(NULL_POLICIES)
            raise ConfigError(f"{where}: null_policy is {self.null_policy!r}; it must be one of {allowed}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"{where}: max_length is {self.max_length}; it must be >= 1 or absent")
        if not -(2**63) <= self.oov_id < 2**63:
            raise ConfigError(f"{where}: oov_id is {self.oov_id}; it must fit a signed 64-bit integer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a data set and their roles."""

    #: The label column.
    label: str
    #: Dense columns, in the order of the model's dense input.
    dense: tuple[str, ...] = ()
    #: Sparse features, in the order of the keys of the KeyedJaggedTensor.
    sparse: tuple[SparseColumn, ...] = ()
    #: A column of sample weights (finite, >= 0); None: every sample weighs 1.
    weight: str | None = None
    #: Further columns of one id a row (integers or strings) handed on as int64 in ``Batch.extras``, e.g. a user id.
    extras: tuple[str, ...] = ()
    #: ``binary``: labels are exactly 0 or 1; ``regression``: any finite number.
    label_kind: str = "binary"
    #: A null, NaN or infinite dense value: ``error`` or ``zero`` (counted).
    dense_missing: str = "error"

    @property
    def keys(self) -> list[str]:
        """Keys of the KeyedJaggedTensor, in order."""
        return [feature.name for feature in self.sparse]

    @property
    def is_weighted(self) -> bool:
        """Whether the KeyedJaggedTensor carries weights (features without a weights column weigh 1)."""
        return any(feature.weights_column is not None for feature in self.sparse)

    @property
    def columns(self) -> list[str]:
        """The columns to read from the files, each once, in a stable order."""
        names = [self.label, *self.dense]
        for feature in self.sparse:
            names.append(feature.source)
            if feature.weights_column is not None:
                names.append(feature.weights_column)
        if self.weight is not None:
            names.append(self.weight)
        return list(dict.fromkeys([*names, *self.extras]))

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and what is allowed."""
        if not self.label:
            raise ConfigError("schema.label is empty; name the label column")
        if self.label_kind not in LABEL_KINDS:
            raise ConfigError(f"schema.label_kind is {self.label_kind!r}; it must be one of {', '.join(LABEL_KINDS)}")
        if self.dense_missing not in MISSING_POLICIES:
            allowed = ", ".join(MISSING_POLICIES)
            raise ConfigError(f"schema.dense_missing is {self.dense_missing!r}; it must be one of {allowed}")
        for what, names in (("dense", self.dense), ("sparse", self.keys), ("extras", self.extras)):
            seen: set[str] = set()
            for name in names:
                if name in seen:
                    raise ConfigError(f"schema.{what} names {name!r} twice")
                seen.add(name)
        for feature in self.sparse:
            feature.validate()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Schema:
        """Build a schema from plain data (a job file): sparse entries may be names or mappings of SparseColumn fields.

        Raises ConfigError naming an unknown key.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"schema has no key {unknown[0]!r}; it has {', '.join(sorted(known))}")
        fields = dict(values)
        fields["dense"] = tuple(fields.get("dense", ()))
        fields["extras"] = tuple(fields.get("extras", ()))
        fields["sparse"] = tuple(_sparse_columns(fields.get("sparse", ())))
        try:
            schema = cls(**fields)
        except TypeError as error:
            raise ConfigError(f"schema: {error}") from error
        schema.validate()
        return schema

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that ``from_mapping`` accepts."""
        return dataclasses.asdict(self)


def _sparse_columns(entries: Iterable[str | Mapping[str, Any] | SparseColumn]) -> Iterable[SparseColumn]:
    for entry in entries:
        if isinstance(entry, SparseColumn):
            yield entry
        elif isinstance(entry, str):
            yield SparseColumn(name=entry)
        else:
            try:
                yield SparseColumn(**entry)
            except TypeError as error:
                raise ConfigError(f"schema.sparse entry {dict(entry)!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file of a data set, as its footer describes it: what the data order and its fingerprint depend on."""

    path: str
    size_bytes: int
    #: Rows of each row group.
    row_groups: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)
