"""The declared columns as the native converter knows them, and the check that a data set's types can play their roles.

Imports no torch: the processes that only read files stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.kernels import _arrow
from shoal.kernels.schema import ID_KINDS, NULL_POLICIES, Schema, SparseColumn

if TYPE_CHECKING:
    import pyarrow as pa

# Roles of columns; part of the native ABI.
_LABEL, _WEIGHT, _DENSE, _SPARSE, _EXTRA = range(5)


class NativeColumns:
    """The native converter of a schema. ``violations_max``: how many forbidden values per column it keeps."""

    def __init__(self, schema: Schema, *, violations_max: int = 1) -> None:
        schema.validate()
        specs = column_specs(schema)
        #: The declared columns and their weights columns ("" for none), in the order of all native results.
        self.names: list[str] = [spec[0] for spec in specs]
        self.weights: list[str] = [spec[3] for spec in specs]
        self.native = _arrow.Converter(
            specs,
            labels_are_binary=schema.label_kind == "binary",
            missing_dense_is_zero=schema.dense_missing == "zero",
            failures_max=violations_max,
        )

    def bind(self, arrow_schema: pa.Schema) -> list[tuple[str, str]]:
        """Take the types of a data set. Returns (column, sentence) for each that cannot play its role; [] if bound."""
        problems = []
        for index, sentence in self.native.bind(arrow_schema.__arrow_c_schema__()):
            name = self.names[index]
            at = arrow_schema.get_field_index(name)
            found = f" (type {arrow_schema.field(at).type})" if at >= 0 else ""
            problems.append((name, f"column {name!r}{found}: {sentence}"))
        return problems


def column_specs(schema: Schema) -> list[tuple[Any, ...]]:
    """One tuple per declared column: name, role, kind, weights column, max length, null policy, OOV id."""

    def plain(name: str, role: int) -> tuple[Any, ...]:
        return (name, role, 0, "", -1, 0, -1)

    def sparse(feature: SparseColumn) -> tuple[Any, ...]:
        return (
            feature.source,
            _SPARSE,
            ID_KINDS.index(feature.kind),
            feature.weights_column or "",
            -1 if feature.max_length is None else feature.max_length,
            NULL_POLICIES.index(feature.null_policy),
            feature.oov_id,
        )

    specs = [plain(schema.label, _LABEL)]
    if schema.weight is not None:
        specs.append(plain(schema.weight, _WEIGHT))
    specs += [plain(name, _DENSE) for name in schema.dense]
    specs += [sparse(feature) for feature in schema.sparse]
    return specs + [plain(name, _EXTRA) for name in schema.extras]
