"""Column blocks as values: widths, names, the way back to the logical table, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.column_blocks import (
    block_name,
    check_tables,
    column_widths,
    cut_columns,
    logical_table,
    logical_tables,
)
from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec

TABLE = TableSpec(name="user", num_embeddings=100, embedding_dim=20, seed=7, num_blocks=4)


@pytest.mark.parametrize(
    ("dim", "widths"),
    [(64, (64,)), (128, (128,)), (256, (128, 128)), (384, (128,) * 3), (520, (260, 260)), (131, (131,))],
)
def test_default_width_is_the_smallest_divisor_of_at_least_128(dim, widths):
    assert column_widths(dim) == widths


@given(st.integers(1, 300), st.integers(1, 300))
def test_widths_of_a_number_of_blocks_are_even_and_sum_to_the_table(dim, num_blocks):
    if num_blocks > dim:
        with pytest.raises(ConfigError, match=f"{num_blocks} column blocks"):
            column_widths(dim, num_blocks, table="t")
        return
    widths = column_widths(dim, num_blocks)
    assert len(widths) == num_blocks and sum(widths) == dim and min(widths) > 0
    assert max(widths) - min(widths) in ((0, 4) if dim % 4 == 0 and dim // 4 >= num_blocks else (0, 1))


def test_blocks_know_their_table_and_lead_back_to_it():
    blocks = cut_columns(TABLE, (8, 5, 7))
    assert [b.name for b in blocks] == ["user.c0", "user.c1", "user.c2"] == [block_name("user", i) for i in range(3)]
    assert [(b.first_column, b.embedding_dim, b.logical_dim, b.seed) for b in blocks] == [
        (0, 8, 20, 7),
        (8, 5, 20, 7),
        (13, 7, 20, 7),
    ]
    assert all(logical_table(block) == TABLE for block in blocks)
    assert logical_tables([TABLE, *cut_columns(dataclasses.replace(TABLE, name="item"), (10, 10))]).keys() == {
        "user",
        "item",
    }
    check_tables(blocks)


def test_an_uncut_table_stays_what_it_was():
    assert cut_columns(TABLE, (20,)) == (TABLE,)
    assert (TABLE.logical_name, TABLE.first_column, TABLE.logical_dim) == ("user", 0, 20)
    assert logical_table(TABLE) is TABLE and not TABLE.shares_statistic


def test_only_row_wise_state_is_shared_between_blocks():
    rowwise = dataclasses.replace(TABLE, optimizer=OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD))
    adam = dataclasses.replace(TABLE, optimizer=OptimizerSpec(kind=OptimizerKind.ADAM))
    assert all(b.shares_statistic for b in cut_columns(rowwise, (10, 10)))
    assert not any(b.shares_statistic for b in cut_columns(rowwise, (10, 10), has_own_statistic=True))
    assert not any(b.shares_statistic for b in cut_columns(adam, (10, 10)))


@pytest.mark.parametrize("widths", [(), (10, 9), (20, 0), (25, -5)])
def test_widths_that_do_not_fit_are_refused(widths):
    with pytest.raises(ConfigError, match="'user': column widths"):
        cut_columns(TABLE, widths)


def test_a_block_is_not_cut_again():
    with pytest.raises(ConfigError, match="column block already"):
        cut_columns(cut_columns(TABLE, (10, 10))[0], (5, 5))


def test_tables_that_do_not_fit_together_are_refused():
    a, b, c = cut_columns(TABLE, (8, 5, 7))
    with pytest.raises(ConfigError, match=r"two tables are named 'user.c1'"):
        check_tables([dataclasses.replace(TABLE, name="user.c1"), a, b, c])
    for tables in ([a, b], [a, c], [b, a, c], [a, b, dataclasses.replace(TABLE, name="item"), c]):
        with pytest.raises(ConfigError, match="'user': "):
            check_tables(tables)
    with pytest.raises(ConfigError, match=r"columns \[8, 33\)"):
        dataclasses.replace(b, embedding_dim=25).validate()
