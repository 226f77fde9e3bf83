"""The declared schema: what it accepts, and how it says what it does not."""

from __future__ import annotations

import pytest

from shoal.kernels.errors import ConfigError
from shoal.kernels.schema import Schema, SparseColumn


def test_columns_are_listed_once_in_order() -> None:
    sparse = (SparseColumn(name="a", column="x", weights_column="w"), SparseColumn(name="b", column="x"))
    schema = Schema(label="y", dense=("d",), sparse=sparse, weight="v", extras=("x", "z"))
    assert schema.columns == ["y", "d", "x", "w", "v", "z"]
    assert schema.keys == ["a", "b"] and schema.is_weighted


def test_mapping_round_trip_accepts_names_and_fields() -> None:
    schema = Schema.from_mapping({"label": "y", "sparse": ["a", {"name": "b", "max_length": 3}], "dense": ["d"]})
    assert schema.sparse == (SparseColumn(name="a"), SparseColumn(name="b", max_length=3))
    assert Schema.from_mapping(schema.to_mapping()) == schema


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": ""}, "label"),
        ({"label": "y", "lable": 1}, "lable"),
        ({"label": "y", "label_kind": "multi"}, "label_kind is 'multi'"),
        ({"label": "y", "dense_missing": "mean"}, "dense_missing"),
        ({"label": "y", "sparse": ["a", "a"]}, "'a' twice"),
        ({"label": "y", "sparse": [{"name": "a", "kind": "float"}]}, "kind is 'float'"),
        ({"label": "y", "sparse": [{"name": "a", "null_policy": "no"}]}, "null_policy is 'no'"),
        ({"label": "y", "sparse": [{"name": "a", "max_length": 0}]}, "max_length is 0"),
        ({"label": "y", "sparse": [{"name": "a", "colum": "x"}]}, "colum"),
    ],
)
def test_a_wrong_schema_names_the_field(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schema.from_mapping(values)
