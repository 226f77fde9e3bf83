"""Journal records of the state machine as JSON, and back (see ``journal`` and ``state_messages``). Pure.

What a worker reads of a checkpoint (``RecoveryPlan.restores``) is not kept: who goes on with a recovery plans it anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Member, RecoveryPlan, Shipment, View
from shoal.kernels.spec import Codec, Flow, WireCodecs
from shoal.platform.journal import Record
from shoal.platform.state_messages import JournalRecord, RecordKind


def encode_record(record: JournalRecord) -> dict[str, Any]:
    """The fields of a record, as JSON holds them; its kind is the journal's."""
    return {
        "record_id": record.record_id,
        "view": None if record.view is None else dataclasses.asdict(record.view),
        "plan": None if record.plan is None else _encode_plan(record.plan),
        "step": record.step,
        "target": record.target,
        "reason": record.reason,
    }


def decode_records(records: Sequence[Record]) -> tuple[JournalRecord, ...]:
    """The state machine's records among ``records``, in order."""
    kinds = {kind.value for kind in RecordKind}
    return tuple(_decode(record.kind, record.fields) for record in records if record.kind in kinds)


def _decode(kind: str, fields: Mapping[str, Any]) -> JournalRecord:
    return JournalRecord(
        record_id=fields["record_id"],
        kind=RecordKind(kind),
        view=None if fields["view"] is None else _decode_view(fields["view"]),
        plan=None if fields["plan"] is None else _decode_plan(fields["plan"]),
        step=fields["step"],
        target=fields["target"],
        reason=fields["reason"],
    )


def _decode_view(fields: Mapping[str, Any]) -> View:
    known = dict(fields)
    known["members"] = tuple(Member(**member) for member in fields["members"])
    known["placement"] = {table: tuple(owners) for table, owners in fields["placement"].items()}
    known["buddies"] = tuple(fields["buddies"])
    known["codecs"] = {
        t: WireCodecs(Codec(values), Codec(gradients), *map(Flow, flow))
        for t, (values, gradients, *flow) in fields.get("codecs", {}).items()
    }
    known["mirrored"] = tuple(fields.get("mirrored", ()))
    return View(**known)


def _encode_plan(plan: RecoveryPlan) -> dict[str, Any]:
    return {
        "step": plan.step,
        "from_checkpoint": plan.from_checkpoint,
        "shipments": [dataclasses.asdict(shipment) for shipment in plan.shipments],
        "lost_blocks": plan.lost_blocks.as_dict(),
        "reason": plan.reason,
    }


def _decode_plan(fields: Mapping[str, Any]) -> RecoveryPlan:
    shipments = (
        Shipment(**{**one, "blocks": _blocks(one["blocks"]["tables"]), "aux_of": tuple(one["aux_of"])})
        for one in fields["shipments"]
    )
    return RecoveryPlan(
        step=fields["step"],
        from_checkpoint=fields["from_checkpoint"],
        shipments=tuple(shipments),
        lost_blocks=BlockSet.of(fields["lost_blocks"]),
        reason=fields["reason"],
    )


def _blocks(tables: Sequence[tuple[str, Sequence[int]]]) -> BlockSet:
    return BlockSet.of(dict(tables))
