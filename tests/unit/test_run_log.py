"""What a run tells of its exchange: kind, hosts and flows once, advice when it changes, bytes in every record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.actors.messages import FlowCost, Member, Progress, View
from shoal.platform.run_log import RunLog
from shoal.platform.storage import Storage
from shoal.platform.telemetry import ProgressRecord, read_events


def _view(epoch: int, hosts: str) -> View:
    members = tuple(
        Member(rank=rank, worker_id=f"w{rank}", host=host, share=1.0 / len(hosts)) for rank, host in enumerate(hosts)
    )
    return View(
        run="r", epoch=epoch, members=members, placement={}, transport="auto", exchange="hierarchical", store_host="",
        store_port=0,
    )  # fmt: skip


def _record(step: int, pooled_bytes: float) -> Progress:
    values: dict[str, Any] = dict.fromkeys(
        ("loss", "samples_per_s", "ne", "auc", "calibration", "exchange_ms", "step_ms"), 1.0
    )
    values |= {"bytes_within_hosts": 100.0, "bytes_across_hosts": 200.0}
    flows = {"long": FlowCost("rows", 1000.0, pooled_bytes), "word": FlowCost("rows", 10.0, None)}
    return Progress(kind="train", step=step, values=values, seconds=1.0, flows=flows)


def test_the_exchange_is_told_once_and_advice_when_it_changes(tmp_path):
    storage = Storage(str(tmp_path / "run"))
    log = RunLog(SimpleNamespace(storage=storage, name="r", steps_total=100), incarnation=0)  # type: ignore[arg-type]
    log.view = _view(0, "aab")
    for step, pooled_bytes in ((10, 900.0), (20, 300.0), (30, 310.0)):
        log.record(_record(step, pooled_bytes))
    log.view = _view(1, "ab")
    log.record(_record(40, 950.0))
    log.record(_record(50, 300.0))
    log.close()
    events = [(event["kind"], event.get("step", event.get("epoch"))) for event in read_events(storage)]
    assert events == [("exchange", 0), ("flow_advice", 20), ("exchange", 1), ("flow_advice", 50)]
    told = {event["kind"]: event for event in read_events(storage)}
    assert told["exchange"]["exchange"] == "hierarchical" and told["exchange"]["hosts"] == {"a": 1, "b": 1}
    assert told["flow_advice"]["tables"] == {"long": "flow pooled would take 70% fewer bytes of rows and gradients"}
    record = next(item for item in log.items_since(0) if isinstance(item, ProgressRecord))
    assert (record.exchange, record.bytes_within_hosts, record.bytes_across_hosts) == ("hierarchical", 100.0, 200.0)
    assert record.flows == {"long": "rows", "word": "rows"}
