"""Arrow to batch: parity with the reference on any chunking, slice and null bitmap; refusals name column and row."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels import _arrow
from shoal.kernels.arrow import ArrowTable, BatchConverter, TablePart, hash_string
from shoal.kernels.arrow_reference import bags_reference, dense_reference, id_reference, xxh64_reference
from shoal.kernels.errors import RowError, SchemaError
from shoal.kernels.schema import Schema, SparseColumn

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


def check(table: pa.Table, schema: Schema) -> None:
    """Assert that the native batch equals the reference's, value by value."""
    batch = BatchConverter(schema).convert(table)
    features = batch.sparse_features
    rows = table.num_rows
    assert len(batch) == rows and features.stride() == rows and features.keys() == schema.keys
    assert features.values().dtype == torch.int64 and features.offsets().dtype == torch.int64
    offsets = features.offsets().tolist()
    assert len(offsets) == rows * len(schema.sparse) + 1
    for k, feature in enumerate(schema.sparse):
        bags, weights = bags_reference(table, feature)
        cuts = offsets[k * rows : (k + 1) * rows + 1]
        assert [features.values()[a:b].tolist() for a, b in itertools.pairwise(cuts)] == bags, feature
        if schema.is_weighted:
            found = [features.weights()[a:b].tolist() for a, b in itertools.pairwise(cuts)]
            assert found == [[float(np.float32(w)) for w in row] for row in weights]
    expected = torch.tensor(dense_reference(table, schema), dtype=torch.float64).reshape(rows, len(schema.dense))
    assert torch.equal(batch.dense_features, expected.float())
    assert batch.labels.tolist() == table.column(schema.label).to_pylist()


def integers_of(data_type: pa.DataType) -> st.SearchStrategy[int]:
    bits = data_type.bit_width
    if pa.types.is_unsigned_integer(data_type):
        return st.integers(0, 2**bits - 1)
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def values_of(data_type: pa.DataType) -> st.SearchStrategy:
    if data_type in INTEGERS:
        return integers_of(data_type)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return st.text(max_size=40)
    return st.binary(max_size=40)


@st.composite
def id_arrays(draw: st.DrawFn, rows: int) -> pa.Array:
    """A column of any id type: scalar or in lists of any kind, plain or dictionary, with nulls at both levels."""
    element = draw(st.sampled_from(INTEGERS + TEXTS))
    value = st.one_of(st.none(), values_of(element))
    shape = draw(st.sampled_from(["scalar", "list", "large_list", "fixed"]))
    if shape == "scalar":
        array = pa.array(draw(st.lists(value, min_size=rows, max_size=rows)), element)
        return array.dictionary_encode() if draw(st.booleans()) else array
    size = 3 if shape == "fixed" else None
    lists = st.lists(value, min_size=size or 0, max_size=size or 5)
    data = draw(st.lists(st.one_of(st.none(), lists), min_size=rows, max_size=rows))
    kind = {"list": pa.list_, "large_list": pa.large_list}.get(shape, lambda t: pa.list_(t, 3))
    return pa.array(data, kind(element))


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, Schema]:
    """A table cut into chunks and sliced, with 1 to 3 features, dense columns and labels."""
    rows = draw(st.integers(0, 12))
    columns = {
        "y": pa.array(draw(st.lists(st.sampled_from([0, 1]), min_size=rows, max_size=rows)), pa.int8()),
        "d": pa.array(draw(st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=rows, max_size=rows))),
        "e": pa.array(draw(st.lists(st.integers(-100, 100), min_size=rows, max_size=rows)), pa.int64()),
    }
    sparse = []
    for k in range(draw(st.integers(1, 3))):
        columns[f"c{k}"] = draw(id_arrays(rows))
        policy = draw(st.sampled_from(["drop", "oov"]))
        limit = draw(st.sampled_from([None, 1, 2]))
        sparse.append(SparseColumn(name=f"f{k}", column=f"c{k}", null_policy=policy, max_length=limit, oov_id=77))
    table = pa.table({name: c.cast(pa.float64()) if name == "d" else c for name, c in columns.items()})
    start = draw(st.integers(0, rows))
    stop = draw(st.integers(start, rows))
    cut = draw(st.integers(start, stop))
    sliced = pa.concat_tables([table.slice(start, cut - start), table.slice(cut, stop - cut)])
    return sliced, Schema(label="y", dense=("d", "e"), sparse=tuple(sparse), dense_missing="zero")


@settings(max_examples=300, deadline=None)
@given(tables())
def test_batch_equals_reference_for_any_types_chunks_slices_and_nulls(case: tuple[pa.Table, Schema]) -> None:
    check(*case)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_string_hash_equals_the_specification(data: bytes) -> None:
    assert _arrow.xxh64(data) == xxh64_reference(data)
    assert hash_string(data) == id_reference(data)


def test_string_hash_matches_published_vectors() -> None:
    # Vectors of the xxHash project and its ports; the seed of the second is its documented PRIME32.
    published = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}
    for data, digest in published.items():
        assert _arrow.xxh64(data) == digest == xxh64_reference(data)
    assert hash_string("abc") == 0x44BC2CF5AD770999
    assert hash_string("") == 0xEF46DB3751D8E999 - 2**64


def test_strings_hash_alike_whatever_their_arrow_type() -> None:
    texts = ["é", "", "abc", "x" * 70]
    expected = [hash_string(text) for text in texts]
    data = [t.encode() for t in texts]
    arrays = [pa.array(texts, t) for t in (pa.string(), pa.large_string())]
    arrays += [pa.array(data, t) for t in (pa.binary(), pa.large_binary())]
    for array in [*arrays, *(a.dictionary_encode() for a in arrays)]:
        batch = convert({"c": array}, SparseColumn(name="c", kind="string"))
        assert batch.sparse_features.values().tolist() == expected
    not_utf8 = convert({"c": pa.array([b"\xff\xfe", b"", b"a", b"b"], pa.binary())}, SparseColumn(name="c"))
    assert not_utf8.sparse_features.values()[0].item() == hash_string(b"\xff\xfe")


def convert(columns: dict[str, pa.Array], *sparse: SparseColumn, **schema_fields: object):
    rows = len(next(iter(columns.values())))
    table = pa.table({"y": pa.array([0] * rows), **columns})
    return BatchConverter(Schema(label="y", sparse=sparse, **schema_fields)).convert(table)


def test_uint64_ids_keep_their_bits() -> None:
    ids = np.array([2**64 - 1, 2**63, 2**53 + 1, 0], dtype=np.uint64)
    batch = convert({"c": pa.array(ids)}, SparseColumn(name="c"))
    assert np.array_equal(batch.sparse_features.values().numpy().view(np.uint64), ids)


def test_scalar_column_is_a_bag_of_one() -> None:
    batch = convert({"c": pa.array([5, 6, 7], pa.int32())}, SparseColumn(name="c"))
    assert batch.sparse_features.offsets().tolist() == [0, 1, 2, 3]


def test_float_ids_are_refused_naming_column_and_type() -> None:
    for array in (pa.array([1.0]), pa.array([[1.0]])):
        with pytest.raises(SchemaError, match=r"'c' \(type .*double.*2\*\*53"):
            convert({"c": array}, SparseColumn(name="c"))


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("id", pa.array([[1]])),
        ("id", pa.array(["a"])),
        ("list", pa.array([1])),
        ("string", pa.array([1])),
        ("auto", pa.array([1], pa.timestamp("s"))),
        ("auto", pa.array([[[1]]])),
        ("auto", pa.array([{"a": 1}])),
    ],
)
def test_a_column_of_another_kind_is_refused(kind: str, array: pa.Array) -> None:
    with pytest.raises(SchemaError, match="'c'"):
        convert({"c": array}, SparseColumn(name="c", kind=kind))


def test_missing_column_is_named() -> None:
    with pytest.raises(SchemaError, match="'nope': the data has no such column"):
        convert({"c": pa.array([1])}, SparseColumn(name="nope"))


def test_null_ids_follow_policy_and_are_counted() -> None:
    array = pa.array([[1, None, 3], None, [None], []], pa.list_(pa.int64()))
    dropped = convert({"c": array}, SparseColumn(name="c"))
    assert dropped.sparse_features.values().tolist() == [1, 3]
    assert dropped.sparse_features.offsets().tolist() == [0, 2, 2, 2, 2]
    assert dropped.counters == {"c: nulls": 3}
    oov = convert({"c": array}, SparseColumn(name="c", null_policy="oov"))
    assert oov.sparse_features.values().tolist() == [1, -1, 3, -1, -1]
    with pytest.raises(RowError, match="row 0 of the batch, column 'c': a null id"):
        convert({"c": array}, SparseColumn(name="c", null_policy="error"))


def test_null_list_over_a_range_of_values_contributes_nothing() -> None:
    mask = pa.array([False, True, False])
    array = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=mask)
    batch = convert({"c": array}, SparseColumn(name="c"))
    assert batch.sparse_features.values().tolist() == [1, 2, 5]


def test_max_length_keeps_the_first_ids_and_counts_the_rest() -> None:
    array = pa.array([[1, 2, 3], [4], []], pa.list_(pa.int64()))
    batch = convert({"c": array}, SparseColumn(name="c", max_length=2))
    assert batch.sparse_features.values().tolist() == [1, 2, 4]
    assert batch.counters == {"c: truncated": 1}


def test_weights_stay_with_their_ids() -> None:
    ids = pa.array([[1, None, 3], [4, 5], None], pa.list_(pa.int64()))
    weights = pa.array([[0.5, 9.0, 2.0], [1.5, 2.5], None], pa.list_(pa.float64()))
    columns = {"c": ids, "w": weights, "p": pa.array([7, 8, 9])}
    weighted = SparseColumn(name="c", weights_column="w")
    features = convert(columns, weighted, SparseColumn(name="p")).sparse_features
    assert features.values().tolist() == [1, 3, 4, 5, 7, 8, 9]
    assert features.weights().tolist() == [0.5, 2.0, 1.5, 2.5, 1, 1, 1]
    table = pa.table({"y": pa.array([0, 1]), "c": pa.array([3, 4]), "w": pa.array([0.25, 4.0])}).slice(1)
    check(table, Schema(label="y", sparse=(weighted,)))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0], [1.0]], "row 1 of the batch, column 'c': 1 weights in column 'w' for 2 ids"),
        ([[1.0], None], "0 weights in column 'w' for 2 ids"),
        ([[1.0], [1.0, None]], "row 1 .* null or not finite"),
        ([[float("inf")], [1.0, 2.0]], "row 0 .* null or not finite"),
    ],
)
def test_bad_weights_name_the_row(weights: list, message: str) -> None:
    columns = {"c": pa.array([[1], [2, 3]]), "w": pa.array(weights, pa.list_(pa.float32()))}
    with pytest.raises(RowError, match=message):
        convert(columns, SparseColumn(name="c", weights_column="w"))


@pytest.mark.parametrize(
    ("labels", "row"), [([0.0, 7.0], 1), ([1.0, -3.0], 1), ([float("nan"), 0.0], 0), ([0.0, None], 1)]
)
def test_labels_outside_zero_and_one_are_refused_with_their_row(labels: list, row: int) -> None:
    table = pa.table({"y": pa.array(labels, pa.float64())})
    with pytest.raises(RowError, match=f"row {row} of the batch, column 'y'"):
        BatchConverter(Schema(label="y")).convert(table)


def test_regression_labels_may_be_any_finite_number() -> None:
    schema = Schema(label="y", label_kind="regression")
    table = pa.table({"y": pa.array([7.5, -3.0])})
    assert BatchConverter(schema).convert(table).labels.tolist() == [7.5, -3.0]
    with pytest.raises(RowError, match="must be finite"):
        BatchConverter(schema).convert(pa.table({"y": pa.array([float("inf")])}))


def test_missing_dense_values_are_refused_or_zero() -> None:
    columns = {"d": pa.array([1.0, None, float("nan"), 2.0])}
    with pytest.raises(RowError, match="row 1 of the batch, column 'd'"):
        convert(columns, dense=("d",))
    batch = convert(columns, dense=("d",), dense_missing="zero")
    assert batch.dense_features[:, 0].tolist() == [1.0, 0.0, 0.0, 2.0]
    assert batch.counters == {"d: nulls": 2}


def test_sample_weights_must_be_finite_and_not_negative() -> None:
    assert convert({"w": pa.array([0.5, 0.0])}, weight="w").weights.tolist() == [0.5, 0.0]
    for bad in (-1.0, float("nan"), None):
        with pytest.raises(RowError, match="row 1 of the batch, column 'w'"):
            convert({"w": pa.array([0.5, bad], pa.float32())}, weight="w")


def test_extras_pass_ids_and_hashed_strings_through() -> None:
    batch = convert({"u": pa.array([3, 4]), "s": pa.array(["a", "b"])}, extras=("u", "s"))
    assert batch.extras["u"].tolist() == [3, 4]
    assert batch.extras["s"].tolist() == [hash_string("a"), hash_string("b")]


def test_empty_table_keeps_every_dtype() -> None:
    schema = Schema(
        label="y", dense=("d",), weight="w", extras=("u",), sparse=(SparseColumn(name="c", weights_column="cw"),)
    )
    columns = {"y": pa.array([1.0]), "d": pa.array([1]), "w": pa.array([1.0]), "u": pa.array([1])}
    columns |= {"c": pa.array([[1]]), "cw": pa.array([[1.0]])}
    full = BatchConverter(schema).convert(pa.table(columns))
    empty = BatchConverter(schema).convert(pa.table(columns).slice(1))
    assert len(empty) == 0 and empty.dense_features.shape == (0, 1)
    for a, b in ((full, empty),):
        assert a.sparse_features.values().dtype == b.sparse_features.values().dtype
        assert a.sparse_features.weights().dtype == b.sparse_features.weights().dtype
        assert a.sparse_features.offsets().dtype == b.sparse_features.offsets().dtype
        assert a.weights.dtype == b.weights.dtype and a.extras["u"].dtype == b.extras["u"].dtype
    assert empty.sparse_features.offsets().tolist() == [0]


def test_all_number_types_become_float32() -> None:
    values = [0, 1, 1, 0]
    types = [*INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.bool_()]
    for data_type in types:
        data = np.array(values, np.float16) if data_type == pa.float16() else values
        array = pa.array([bool(v) for v in values]) if data_type == pa.bool_() else pa.array(data, data_type)
        table = pa.table({"y": array, "d": array}).slice(1)
        batch = BatchConverter(Schema(label="y", dense=("d",))).convert(table)
        assert batch.labels.tolist() == batch.dense_features[:, 0].tolist() == [1, 1, 0]
    halves = np.frombuffer(np.arange(0x7C00, dtype=np.uint16).tobytes(), np.float16)
    table = pa.table({"y": pa.array(halves)})
    found = BatchConverter(Schema(label="y", label_kind="regression")).convert(table).labels
    assert np.array_equal(found.numpy(), halves.astype(np.float32))


def test_parts_of_tables_convert_as_one_batch() -> None:
    table = pa.table({"y": [0, 1, 0, 1, 1], "c": [[1], [], [2, 3], [4], [5, 6, 7]]})
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    converter = BatchConverter(Schema(label="y", sparse=(SparseColumn(name="c"),)))
    handed = ArrowTable(chunked)
    batch = converter.convert([TablePart(handed, 1, 3), TablePart(handed, 4, 5)])
    whole = converter.convert(pa.concat_tables([table.slice(1, 2), table.slice(4)]))
    assert torch.equal(batch.sparse_features.values(), whole.sparse_features.values())
    assert torch.equal(batch.sparse_features.offsets(), whole.sparse_features.offsets())
    assert torch.equal(batch.labels, whole.labels)


def test_damaged_offsets_are_refused_not_read() -> None:
    array = pa.ListArray.from_arrays(pa.array([0, 5, 2], pa.int32()), pa.array([1, 2, 3, 4, 5]))
    with pytest.raises(RuntimeError, match="damaged"):
        convert({"c": array}, SparseColumn(name="c"))


def test_arrays_outlive_table_and_converter() -> None:
    batches = [convert({"c": pa.array(np.full(1000, i))}, SparseColumn(name="c")) for i in range(20)]
    for i, batch in enumerate(batches):
        assert (batch.sparse_features.values() == i).all()


def test_batch_slice_keeps_rows_of_every_feature() -> None:
    columns = {"c": pa.array([[1], [], [2, 3], [4]]), "p": pa.array([5, 6, 7, 8]), "w": pa.array([1.0, 2, 3, 4])}
    batch = convert(columns, SparseColumn(name="c"), SparseColumn(name="p"), weight="w", extras=("p",))
    part = batch.slice(1, 3)
    assert len(part) == 2 and part.position == 1
    assert part.sparse_features.values().tolist() == [2, 3, 6, 7]
    assert part.sparse_features.offsets().tolist() == [0, 0, 2, 3, 4]
    assert part.weights.tolist() == [2.0, 3.0] and part.extras["p"].tolist() == [6, 7]
    assert len(batch.slice(4, 9)) == 0
