"""JaggedTensor, KeyedJaggedTensor, KeyedTensor without TorchRec: layout, views, empty cases, errors, scripting."""

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from shoal.kernels.errors import DataError
from shoal.kernels.jagged import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    _kt_regroup_arguments,
    jt_is_equal,
    kjt_is_equal,
)
from shoal.kernels.jagged_checks import validate_keyed_jagged_tensor
from shoal.kernels.tables import EmbeddingBagConfig
from shoal.kernels.vbe import expand_inverse_indices, pad_strides

#        sample 0  1   2
# "a"    [0, 1]    []  [2]
# "b"    [3]       [4] [5, 6, 7]
LENGTHS = [2, 0, 1, 1, 1, 3]


def two_keys(**changes) -> KeyedJaggedTensor:
    arguments = {
        "keys": ["a", "b"],
        "values": torch.arange(8),
        "weights": torch.arange(8) / 10,
        "lengths": torch.tensor(LENGTHS),
    }
    return KeyedJaggedTensor(**(arguments | changes))


def test_layout_is_key_major():
    kjt = two_keys()
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 4, 5, 8]
    assert (kjt.stride(), kjt.stride_per_key(), kjt.length_per_key(), kjt.offset_per_key()) == (
        3,
        [3, 3],
        [3, 5],
        [0, 3, 8],
    )
    assert kjt["b"].values().tolist() == [3, 4, 5, 6, 7] and kjt["b"].lengths().tolist() == [1, 1, 3]
    assert kjt["b"].offsets_or_none() is None
    assert kjt.to_dict()["b"].offsets().tolist() == [0, 1, 2, 5]
    assert kjt.to_dict() is kjt.to_dict()


def test_split_gives_self_views_and_empty_batches_that_keep_the_stride():
    kjt = two_keys()
    nothing, everything = kjt.split([0, 2])
    assert everything is kjt
    assert nothing.keys() == [] and nothing.stride() == 3 and nothing.values().numel() == 0
    first, second = kjt.split([1, 1])
    assert second.values().data_ptr() == kjt.values()[3:].data_ptr()
    assert first.keys() == ["a"] and first.lengths().tolist() == [2, 0, 1]


@pytest.mark.parametrize("indices", [[1, 0], [1, 1, 0], [0], []])
def test_permute_repeats_and_leaves_out_keys(indices):
    permuted = two_keys().permute(indices)
    assert permuted.keys() == [["a", "b"][i] for i in indices]
    expected = [[[0, 1, 2], [3, 4, 5, 6, 7]][i] for i in indices]
    assert permuted.values().tolist() == list(itertools.chain(*expected))
    assert permuted.lengths().tolist() == list(itertools.chain(*(LENGTHS[3 * i : 3 * i + 3] for i in indices)))


def test_no_bags_at_all_gives_empty_lengths_and_offsets_of_zero():
    kjt = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.empty(0), torch.empty(0, dtype=torch.int32))
    jagged = kjt.to_dict()["b"]
    assert jagged.lengths().tolist() == [] and jagged.offsets().tolist() == [0] and jagged.values().numel() == 0
    assert KeyedJaggedTensor.empty().to_dict() == {}
    assert KeyedJaggedTensor.empty().stride() == 0


def test_lengths_that_do_not_fit_the_keys_name_keys_stride_and_count():
    kjt = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(5), lengths=torch.tensor([2, 1, 2]))
    with pytest.raises(ValueError, match=r"3 elements.*2 keys x stride 1.*\['a', 'b'\]"):
        kjt.to_dict()


def test_unknown_key_names_the_keys_there_are():
    with pytest.raises(KeyError, match=r"no key 'c'; the keys are \['a', 'b'\]"):
        two_keys()["c"]


def test_float_lengths_and_offsets_are_refused():
    with pytest.raises(AssertionError):
        JaggedTensor(torch.zeros(3), lengths=torch.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError):
        KeyedJaggedTensor(["a"], torch.zeros(3), offsets=torch.tensor([0.0, 3.0]))
    with pytest.raises(AssertionError):
        JaggedTensor(torch.zeros(3))


def test_concat_refuses_mixed_weights_and_strides():
    with pytest.raises(ValueError, match="weighted"):
        KeyedJaggedTensor.concat([two_keys(), two_keys(weights=None)])
    with pytest.raises(AssertionError, match="strides must be consistent"):
        KeyedJaggedTensor.concat([two_keys(), two_keys(keys=["c"])])
    with pytest.raises(ValueError, match="empty"):
        KeyedJaggedTensor.concat([])


def test_padded_dense_cuts_and_pads_and_carries_gradients():
    values = torch.arange(1.0, 5.0, requires_grad=True)
    jagged = JaggedTensor(values, lengths=torch.tensor([3, 0, 1]))
    assert jagged.to_padded_dense().tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    padded = jagged.to_padded_dense(desired_length=2, padding_value=9.0)
    assert padded.tolist() == [[1, 2], [9, 9], [4, 9]]
    padded.sum().backward()
    assert values.grad.tolist() == [1, 1, 0, 1]
    assert JaggedTensor(torch.empty(0), lengths=torch.tensor([0, 0])).to_padded_dense(3).shape == (2, 3)


def test_dense_round_trip():
    bags = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    jagged = JaggedTensor.from_dense(bags, weights=bags)
    assert [bag.tolist() for bag in jagged.to_dense()] == [[1], [], [7, 8]]
    assert [bag.tolist() for bag in jagged.to_dense_weights()] == [[1], [], [7, 8]]
    matrix = torch.tensor([[1.0, 0.0], [5.0, 5.0], [7.0, 8.0]])
    assert jt_is_equal(
        JaggedTensor.from_dense_lengths(matrix, torch.tensor([1, 0, 2], dtype=torch.int32)),
        JaggedTensor.from_dense(bags),
    )


def test_pytree_round_trips():
    for kjt in (
        two_keys(),
        two_keys(
            stride_per_key_per_rank=[[2], [4]], inverse_indices=(["a", "b"], torch.zeros(2, 3, dtype=torch.int64))
        ),
    ):
        leaves, spec = pytree.tree_flatten(kjt)
        again = pytree.tree_unflatten(leaves, spec)
        assert kjt_is_equal(kjt, again) and again.stride_per_key_per_rank() == kjt.stride_per_key_per_rank()
    with pytest.raises(ValueError):
        pytree.tree_unflatten(leaves + leaves, spec)
    kt = KeyedTensor.from_tensor_list(["x", "y"], [torch.zeros(2, 1), torch.ones(2, 3)])
    assert torch.equal(pytree.tree_map(lambda t: t + 1, kt)["y"], torch.full((2, 3), 2.0))


def test_vbe_batch_expands_to_the_batch_it_stands_for():
    kjt = two_keys(
        stride_per_key_per_rank=[[2], [4]],
        inverse_indices=(["b", "a"], torch.tensor([[3, 0, 3], [1, 0, 0]])),
    )
    assert kjt.variable_stride_per_key() and kjt.stride() == 3 and kjt.stride_per_key() == [2, 4]
    plain = expand_inverse_indices(kjt)
    assert not plain.variable_stride_per_key() and plain.stride() == 3
    assert plain["a"].values().tolist() == [0, 1, 0, 1] and plain["a"].lengths().tolist() == [0, 2, 2]
    assert plain["b"].values().tolist() == [5, 6, 7, 2, 5, 6, 7] and plain["b"].lengths().tolist() == [3, 1, 3]
    assert torch.equal(plain.weights(), plain.values() / 10)
    padded = pad_strides(kjt)
    assert padded.stride() == 4 and padded["a"].lengths().tolist() == [2, 0, 0, 0]
    with pytest.raises(DataError, match="no inverse indices"):
        expand_inverse_indices(two_keys(stride_per_key_per_rank=[[2], [4]]))


def test_from_jt_dict_collapses_equal_strides():
    kjt = two_keys()
    assert kjt_is_equal(KeyedJaggedTensor.from_jt_dict(kjt.to_dict()), kjt)
    uneven = KeyedJaggedTensor.from_jt_dict(
        {
            "a": JaggedTensor(torch.arange(2), lengths=torch.tensor([2])),
            "b": JaggedTensor(torch.arange(2), lengths=torch.tensor([1, 1])),
        }
    )
    assert uneven.stride_per_key_per_rank() == [[1], [2]]
    forced = KeyedJaggedTensor.from_jt_dict(kjt.to_dict(), force_variable_stride=True)
    assert forced.stride_per_key_per_rank() == [[3], [3]]


def test_regroup_takes_columns_in_the_order_asked():
    first = KeyedTensor.from_tensor_list(["a", "b"], [torch.full((2, 1), 1.0), torch.full((2, 2), 2.0)])
    second = KeyedTensor(["c"], [1], torch.full((2, 1), 3.0, requires_grad=True))
    groups = KeyedTensor.regroup([first, second], [["c", "b"], ["c"]])
    assert groups[0].tolist() == [[3, 2, 2]] * 2
    (groups[0].sum() + groups[1].sum()).backward()
    assert second.values().grad.tolist() == [[2], [2]]
    assert list(KeyedTensor.regroup_as_dict([first, second], [["a"]], ["g"])) == ["g"]


def test_classes_compile_with_torchscript():
    def split_and_read(kjt: KeyedJaggedTensor) -> torch.Tensor:
        parts = kjt.split([1, 1])
        return parts[1].permute([0]).to_dict()["b"].to_padded_dense(2)

    assert torch.jit.script(split_and_read)(two_keys()).tolist() == [[3, 0], [4, 0], [5, 6]]
    assert torch.jit.script(KeyedJaggedTensor.empty)().keys() == []
    round_trip = torch.jit.script(ComputeJTDictToKJT())(torch.jit.script(ComputeKJTToJTDict())(two_keys()))
    assert round_trip.values().tolist() == list(range(8))


def test_printing_shows_bags():
    assert str(two_keys(weights=None)) == (
        'KeyedJaggedTensor({\n    "a": [[0, 1], [], [2]],\n    "b": [[3], [4], [5, 6, 7]]\n})\n'
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": None}, "neither"),
        ({"lengths": torch.tensor([2, 0, 1, 1, 1, 2])}, "sum of lengths, 7, is not the number of values, 8"),
        ({"lengths": torch.tensor([3, -1, 1, 1, 1, 3])}, "negative element, -1"),
        ({"lengths": None, "offsets": torch.tensor([0, 2, 2, 3, 4, 5, 7])}, "from 0 to 7"),
        ({"offsets": torch.tensor([0, 2, 2, 3, 4, 6, 8])}, "not the cumulative sum"),
        ({"lengths": None, "offsets": torch.tensor([], dtype=torch.int64)}, "offsets are empty"),
        ({"keys": ["a", "a"]}, r"\['a'\] occur more than once"),
        ({"keys": []}, "no keys for 6 bags"),
        ({"keys": ["a", "b", "c", "d"]}, "6 bags are not 4 keys x stride 1"),
        ({"stride_per_key_per_rank": [[2], [3]]}, r"strides \[2, 3\], which do not add up to 6 bags"),
        ({"weights": torch.zeros(7)}, "7 weights for 8 values"),
        ({"length_per_key": [4, 4]}, r"length_per_key is \[4, 4\] but the lengths .* sum to \[3, 5\]"),
    ],
)
def test_validation_says_what_does_not_fit(changes, message):
    with pytest.raises(DataError, match=message):
        validate_keyed_jagged_tensor(two_keys(**changes))


def test_validation_checks_ids_against_the_tables_that_read_them():
    tables = [EmbeddingBagConfig(num_embeddings=8, embedding_dim=1, name="t", feature_names=["b", "absent"])]
    assert validate_keyed_jagged_tensor(two_keys()) and validate_keyed_jagged_tensor(two_keys(), tables)
    tables[0].num_embeddings = 7
    assert not validate_keyed_jagged_tensor(two_keys(), tables)


def test_regroup_arguments_chain_the_copies_of_a_key():
    groups = [["f1", "f3"], ["f2"], ["f3", "f1"], ["f1"]]
    copies, in_widths, out_widths, widths = _kt_regroup_arguments(
        torch.empty(0), [["f1", "f2"], ["f3"]], [[3, 4], [5]], groups
    )
    assert [row[5] for row in copies.tolist()] == [4, 3, 0, -6, -5, -6]
    assert [row[:5] for row in copies.tolist()][3:5] == [[1, 2, 0, 0, 5], [0, 2, 0, 5, 3]]
    assert (in_widths.tolist(), out_widths.tolist(), widths) == ([7, 5], [8, 4, 8, 3], [8, 4, 8, 3])
