"""Events and curves: numbered files, no loss while storage fails, secrets masked, TensorBoard readable."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.platform.storage import Storage
from shoal.platform.telemetry import EventLog, MetricWriter, ProgressRecord, read_events


class FlakyStore:
    """Storage in memory that fails while ``is_down``."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_down = False
        self.is_local = False
        self.uri = "memory://run"

    def write_bytes(self, path: str, data: bytes) -> None:
        if self.is_down:
            raise OSError("s3://key:value@bucket is gone")
        assert path not in self.files, "an event file must never be rewritten"
        self.files[path] = data

    def read_bytes(self, path: str) -> bytes:
        return self.files[path]

    def list_dir(self, path: str = "") -> list:
        names = sorted(name.removeprefix(path + "/") for name in self.files if name.startswith(path + "/"))
        return [type("Entry", (), {"name": name})() for name in names]


def test_events_are_read_back_in_order(tmp_path):
    storage = Storage(str(tmp_path))
    log = EventLog(storage, "c0", clock=lambda: 12.5)
    log.write("view", epoch=1, workers=[0, 1])
    log.write("checkpoint", flush=False, step=np.int64(7))
    log.write("end", reason={"b", "a"})
    assert sorted(p.name for p in (tmp_path / "events").iterdir()) == ["00000001-c0.jsonl", "00000002-c0.jsonl"]
    events = list(read_events(storage))
    assert [event["kind"] for event in events] == ["view", "checkpoint", "end"]
    assert events[0] == {"time": 12.5, "kind": "view", "epoch": 1, "workers": [0, 1]}
    assert events[1]["step"] == 7 and events[2]["reason"] == ["a", "b"]


def test_second_writer_goes_on_with_higher_numbers_and_its_own_names():
    store = FlakyStore()
    EventLog(store, "c0").write("start")
    EventLog(store, "c1").write("restart")
    assert sorted(store.files) == ["events/00000001-c0.jsonl", "events/00000002-c1.jsonl"]
    assert [event["kind"] for event in read_events(store)] == ["start", "restart"]


def test_failing_storage_costs_a_warning_and_no_event(caplog):
    store = FlakyStore()
    log = EventLog(store, "c0")
    store.is_down = True
    log.write("a")
    log.write("b")
    store.is_down = False
    log.write("c")
    assert [event["kind"] for event in read_events(store)] == ["a", "b", "c"]
    assert "cannot write" in caplog.text and "key:value" not in caplog.text


def test_pending_events_are_bounded_and_the_loss_is_counted(monkeypatch):
    monkeypatch.setattr("shoal.platform.telemetry.EVENTS_PENDING_MAX", 3)
    store = FlakyStore()
    log = EventLog(store, "c0")
    for i in range(5):
        log.write("e", flush=False, i=i)
    log.flush()
    events = list(read_events(store))
    assert events[0]["kind"] == "events_dropped" and events[0]["num_dropped"] == 2
    assert [event["i"] for event in events[1:]] == [2, 3, 4]


def test_secrets_in_events_are_masked():
    store = FlakyStore()
    EventLog(store, "c0").write("error", api_key="hunter2", uri="s3://a:hunter2@b")
    assert b"hunter2" not in next(iter(store.files.values()))


def test_damaged_line_is_passed_over():
    store = FlakyStore()
    store.files["events/00000001-c0.jsonl"] = b'{"kind": "a"}\n{"kind": "b\n\xff\n' + json.dumps({"kind": "c"}).encode()
    assert [event["kind"] for event in read_events(store)] == ["a", "c"]


RECORD = ProgressRecord(step=5, loss=0.5, auc=float("nan"), workers=2, phases_ms={"route": 1.5}, counters={"skips": 1})


def test_scalars_leave_out_what_is_unknown():
    values = RECORD.scalars()
    assert values["train/loss"] == 0.5 and values["phase/route_ms"] == 1.5 and values["count/skips"] == 1
    assert "train/ne" not in values and "speed/exchange_ms" not in values


@pytest.mark.parametrize("is_local", [True, False])
def test_curves_can_be_read_by_tensorboard(tmp_path, is_local):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = Storage(str(tmp_path)) if is_local else RemoteStore(tmp_path)
    writer = MetricWriter(store, "c0")
    writer.write(RECORD)
    writer.close()
    accumulator = EventAccumulator(str(tmp_path / "metrics"))
    accumulator.Reload()
    assert accumulator.Scalars("train/loss")[0].step == 5
    assert accumulator.Scalars("train/loss")[0].value == pytest.approx(0.5)
    assert "train/auc" not in accumulator.Tags()["scalars"]


class RemoteStore:
    """A folder that does not say it is local."""

    is_local = False
    uri = "remote://run"

    def __init__(self, folder) -> None:
        self.folder = folder

    def write_bytes(self, path: str, data: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)


def test_gauges_are_set_inside_ray_only(monkeypatch):
    from shoal.platform.telemetry import RayGauges

    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert RayGauges.connect("r") is None
