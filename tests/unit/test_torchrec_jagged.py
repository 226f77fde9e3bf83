"""Our jagged classes against TorchRec's own, on random inputs: same results from every public method."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels import jagged as ours

theirs = pytest.importorskip("torchrec", reason="TorchRec (extra peers) is the oracle here")


@st.composite
def batches(draw):
    """Arguments of a KeyedJaggedTensor: 1-5 keys, 0-4 bags each, some VBE, some weighted, int32 or int64 lengths."""
    num_keys = draw(st.integers(1, 5))
    keys = [f"k{i}" for i in range(num_keys)]
    is_variable = draw(st.booleans())
    stride = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 2))
    if is_variable:
        per_rank = draw(
            st.lists(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=num_keys, max_size=num_keys)
        )
        num_bags = sum(map(sum, per_rank))
    else:
        per_rank, num_bags = None, num_keys * stride
    lengths = draw(st.lists(st.integers(0, 3), min_size=num_bags, max_size=num_bags))
    total = sum(lengths)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    arguments = {
        "keys": keys,
        "values": torch.arange(total),
        "weights": torch.arange(total) / 4 if draw(st.booleans()) else None,
        "lengths": torch.tensor(lengths, dtype=dtype),
        "stride_per_key_per_rank": per_rank,
    }
    if draw(st.booleans()):
        bounds = torch.cat([torch.zeros(1, dtype=dtype), torch.cumsum(arguments.pop("lengths"), 0).to(dtype)])
        arguments["offsets"] = bounds
    return arguments


def same(left, right):
    """Assert that two results are equal: tensors with dtype, lists and dicts element by element, jagged by parts."""
    assert type(left).__name__ == type(right).__name__
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            same(one, other)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        same(list(left.values()), list(right.values()))
    elif type(left).__name__ == "JaggedTensor":
        for read in ("values", "lengths", "offsets", "weights_or_none"):
            same(getattr(left, read)(), getattr(right, read)())
    elif type(left).__name__ == "KeyedJaggedTensor":
        for read in (
            "keys",
            "values",
            "lengths",
            "offsets",
            "weights_or_none",
            "stride",
            "stride_per_key",
            "stride_per_key_per_rank",
            "variable_stride_per_key",
            "length_per_key",
            "offset_per_key",
            "lengths_offset_per_key",
            "index_per_key",
            "dist_labels",
            "dist_tensors",
        ):
            same(getattr(left, read)(), getattr(right, read)())
    else:
        assert left == right


def both(arguments):
    return ours.KeyedJaggedTensor(**arguments), theirs.KeyedJaggedTensor(**arguments)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_reading_agrees(arguments):
    left, right = both(arguments)
    same(left, right)
    assert str(left) == str(right)
    same(left.to_dict(), right.to_dict())
    for key in arguments["keys"]:
        same(left[key], right[key])
    same(left.flatten_lengths(), right.flatten_lengths())
    assert left.size_in_bytes() == right.size_in_bytes()


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_rearranging_agrees(arguments, data):
    left, right = both(arguments)
    num_keys = len(arguments["keys"])
    cut = data.draw(st.integers(0, num_keys))
    same(left.split([cut, num_keys - cut]), right.split([cut, num_keys - cut]))
    indices = data.draw(st.lists(st.integers(0, num_keys - 1), min_size=1, max_size=6))
    same(left.permute(indices), right.permute(indices))
    same(left.dist_splits([cut, num_keys - cut]), right.dist_splits([cut, num_keys - cut]))
    same(ours.KeyedJaggedTensor.from_jt_dict(left.to_dict()), theirs.KeyedJaggedTensor.from_jt_dict(right.to_dict()))
    same(ours.KeyedJaggedTensor.concat([left, left]).values(), theirs.KeyedJaggedTensor.concat([right, right]).values())
    same(ours.KeyedJaggedTensor.empty_like(left), theirs.KeyedJaggedTensor.empty_like(right))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("strides", [[2, 2], [1, 3], [0, 0], [0, 2]])
def test_dist_init_agrees(strides, is_weighted):
    keys, generator = ["a", "b", "c"], torch.Generator().manual_seed(0)
    num_bags = len(keys) * sum(strides)
    lengths = torch.randint(0, 4, (num_bags,), generator=generator)
    values = torch.arange(int(lengths.sum()))
    tensors = [lengths, values] + ([values / 8] if is_weighted else [])
    if strides[0] == strides[1]:
        recat = torch.tensor([rank * 3 + key for key in range(3) for rank in range(2)], dtype=torch.int32)
    else:
        starts = [0, 3 * strides[0]]
        recat = torch.tensor(
            [starts[r] + k * strides[r] + b for k in range(3) for r in range(2) for b in range(strides[r])],
            dtype=torch.int32,
        )
    arguments = (keys, tensors, False, 2, recat, strides)
    same(ours.KeyedJaggedTensor.dist_init(*arguments), theirs.KeyedJaggedTensor.dist_init(*arguments))


@pytest.mark.parametrize("stagger", [1, 2])
def test_dist_init_with_variable_strides_agrees(stagger):
    keys, num_workers = ["a", "b"], 4
    strides = torch.tensor([2, 1, 0, 3, 1, 1, 2, 0])
    lengths = torch.tensor([1, 2, 0, 3, 0, 1, 2, 1, 1, 0])
    values = torch.arange(int(lengths.sum()))
    recat = torch.tensor([rank * 2 + key for key in range(2) for rank in range(num_workers)], dtype=torch.int32)
    arguments = (keys, [lengths, values, strides, values / 8], True, num_workers, recat, None, stagger)
    same(ours.KeyedJaggedTensor.dist_init(*arguments), theirs.KeyedJaggedTensor.dist_init(*arguments))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_keyed_tensor_agrees(widths, data):
    keys = [f"k{i}" for i in range(len(widths))]
    tensors = [torch.randn(3, width) for width in widths]
    left = ours.KeyedTensor.from_tensor_list(keys, tensors)
    right = theirs.KeyedTensor.from_tensor_list(keys, tensors)
    assert str(left) == str(right) and left.offset_per_key() == right.offset_per_key()
    same(left.to_dict(), right.to_dict())
    groups = data.draw(st.lists(st.lists(st.sampled_from(keys), min_size=1, max_size=4), min_size=1, max_size=3))
    same(ours.KeyedTensor.regroup([left], groups), theirs.KeyedTensor.regroup([right], groups))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.one_of(st.none(), st.integers(1, 5)))
def test_jagged_tensor_agrees(lengths, width):
    values = torch.arange(sum(lengths), dtype=torch.float32)
    arguments = {"values": values, "weights": values / 2, "lengths": torch.tensor(lengths)}
    left, right = ours.JaggedTensor(**arguments), theirs.JaggedTensor(**arguments)
    same(left, right)
    assert str(left) == str(right)
    same(left.to_dense(), right.to_dense())
    same(left.to_padded_dense(width, 7.0), right.to_padded_dense(width, 7.0))
    same(left.to_padded_dense_weights(width), right.to_padded_dense_weights(width))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5), min_size=1, max_size=4))
def test_regroup_arguments_agree(groups):
    from torchrec.sparse.jagged_tensor import _kt_regroup_arguments

    arguments = (torch.empty(0), [["a", "b"], ["c", "d", "e"], ["f"]], [[3, 4], [5, 6, 7], [8]], groups)
    same(list(ours._kt_regroup_arguments(*arguments)), list(_kt_regroup_arguments(*arguments)))
