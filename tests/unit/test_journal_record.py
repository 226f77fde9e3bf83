"""Records of the state machine survive JSON, whatever is in them."""

from __future__ import annotations

import json

from shoal.actors.messages import BlockSet, Member, RecoveryPlan, Shipment, View
from shoal.kernels.spec import Codec, Flow, WireCodecs
from shoal.platform.journal import Record
from shoal.platform.journal_record import decode_records, encode_record
from shoal.platform.state_messages import JournalRecord, RecordKind

VIEW = View(
    run="r",
    epoch=3,
    members=(
        Member(rank=0, worker_id="w1.0", host="a", share=0.5, address="h:1"),
        Member(rank=1, worker_id="w2.0", host="b", share=0.5),
    ),
    placement={"t": (0, 1, 1, 0)},
    transport="auto",
    store_host="h",
    store_port=7,
    buddies=(1, 0),
    codecs={"t": WireCodecs(Codec.INT8, Codec.BF16, Flow.POOLED)},
)
PLAN = RecoveryPlan(
    step=40,
    from_checkpoint=False,
    shipments=(Shipment(source="w1.0", target="w2.0", blocks=BlockSet.of({"t": [1, 2]}), aux_of=("w1.1",)),),
    lost_blocks=BlockSet.of({"t": [3]}),
    reason="because",
)


def as_read(record: JournalRecord) -> Record:
    fields = json.loads(json.dumps(encode_record(record)))
    return Record(number=1, incarnation=1, time=0.0, kind=record.kind.value, fields=fields)


def test_records_come_back_as_they_were():
    records = (
        JournalRecord(record_id=0, kind=RecordKind.START, view=VIEW, step=0),
        JournalRecord(record_id=1, kind=RecordKind.RECOVER, view=VIEW, plan=PLAN, step=40, target=2, reason="lost"),
        JournalRecord(record_id=2, kind=RecordKind.TARGET, target=5),
    )
    assert decode_records([as_read(record) for record in records]) == records


def test_what_the_state_machine_does_not_write_is_passed_over():
    end = Record(number=9, incarnation=1, time=0.0, kind="end", fields={"phase": "failed"})
    assert decode_records([end]) == ()
