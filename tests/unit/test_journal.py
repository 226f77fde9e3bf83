"""The journal: numbered records of the controller, and which of them count (PROTOCOLS F4, F7, F8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.errors import FencedError
from shoal.platform.epochs import claim_epoch
from shoal.platform.journal import open_journal, read_journal, valid_names
from shoal.platform.storage import Storage


def test_next_incarnation_reads_what_those_before_it_wrote(tmp_path):
    storage = Storage(str(tmp_path))
    first, before = open_journal(storage, run="r")
    assert first.incarnation == 0 and before == ()
    claim_epoch(storage, 3, 0)  # lies in the same folder
    first.append("view", epoch=3, members=["w0"])
    second, before = open_journal(storage, run="r")
    assert second.incarnation == 1
    assert [(r.number, r.kind) for r in before] == [(0, "run"), (1, "view")] and before[1].fields["members"] == ["w0"]


def test_lower_incarnation_stops_on_seeing_a_higher(tmp_path):
    storage = Storage(str(tmp_path))
    first, _ = open_journal(storage)
    open_journal(storage)
    with pytest.raises(FencedError, match="replaced by 1"):
        first.append("view", epoch=1)


def test_record_that_a_replaced_controller_wrote_too_late_is_void(tmp_path):
    storage = Storage(str(tmp_path))
    first, _ = open_journal(storage)
    first.append("view", epoch=0)
    second, _ = open_journal(storage)
    # It looked before the second one began, and its write arrives after: the look of ``append`` cannot help there.
    storage.write_bytes("journal/00000002-000000.json", b'{"time": 0, "kind": "view", "fields": {"epoch": 9}}')
    storage.write_bytes("journal/00000003-000000.json", b'{"time": 0, "kind": "view", "fields": {"epoch": 10}}')
    second.append("view", epoch=1)
    assert [r.fields.get("epoch") for r in read_journal(storage)] == [None, 0, None, 1]


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=20))
def test_records_that_count_have_rising_numbers_and_incarnations(names):
    valid = valid_names(sorted(names))
    numbers, incarnations = [n for n, _ in valid], [i for _, i in valid]
    assert numbers == sorted(set(numbers)) and incarnations == sorted(incarnations)
    assert not names or valid, "the highest incarnation always counts"
