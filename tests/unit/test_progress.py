"""The console: plain lines off a terminal, one bar on one; durations and sizes; what to do next."""

from __future__ import annotations

import dataclasses
import io

import pytest

from shoal.jobs.next_steps import format_next_steps, next_commands
from shoal.jobs.progress import Progress, format_bytes, format_duration, format_line
from shoal.platform.config import TrainConfig
from shoal.platform.telemetry import ProgressRecord

RECORD = ProgressRecord(
    step=100,
    steps_total=400,
    samples=204_800,
    samples_per_s=12_345.6,
    loss=0.50123,
    ne=0.81,
    auc=0.7654,
    exchange_ms=2.5,
    workers=2,
    eta_s=65.0,
)


def test_plain_line_has_every_value_as_key_value():
    line = format_line(RECORD)
    assert line == (
        "step=100/400 samples_per_s=12346 loss=0.5012 ne=0.8100 auc=0.7654 exchange_ms=2.50 workers=2 epoch=0 eta=1m05s"
    )


def test_with_several_workers_the_line_tells_how_rows_travel_and_what_a_step_sends():
    record = dataclasses.replace(
        RECORD,
        exchange="hierarchical",
        bytes_within_hosts=3 * 1024,
        bytes_across_hosts=2.5 * 1024**2,
        flows={"a": "rows", "b": "pooled"},
    )
    shown = " exchange=hierarchical within_hosts=3.0KiB across_hosts=2.5MiB pooled_tables=1/2 "
    assert shown in format_line(record)
    assert record.scalars()["exchange/bytes_across_hosts"] == 2.5 * 1024**2
    assert "hosts" not in format_line(dataclasses.replace(record, workers=1))


def test_unknown_values_are_left_out():
    assert format_line(ProgressRecord(step=3, workers=1)) == "step=3 samples_per_s=0.0 workers=1 epoch=0"
    assert "eta" not in format_line(ProgressRecord(step=3, eta_s=float("inf")))


def test_off_a_terminal_each_record_is_one_line():
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.update(RECORD)
        progress.note("event=checkpoint step=100")
    assert stream.getvalue().splitlines() == [format_line(RECORD), "event=checkpoint step=100"]


def test_lines_are_rate_limited_but_the_last_one_is_shown():
    now = [0.0]
    stream = io.StringIO()
    with Progress(stream=stream, line_interval_s=10, clock=lambda: now[0]) as progress:
        for step in range(25):
            now[0] = float(step)
            progress.update(ProgressRecord(step=step))
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["step=0", "step=10", "step=20", "step=24"]


def test_terminal_gets_one_bar_redrawn_in_place():
    stream = io.StringIO()
    with Progress(stream=stream, is_terminal=True) as progress:
        progress.update(RECORD)
        progress.note("a note")
        progress.update(ProgressRecord(step=90, steps_total=400, workers=2))
    text = stream.getvalue()
    assert "\r" in text and "100/400" in text and "auc 0.7654" in text
    # A recovery goes back; the bar does too.
    assert "90/400" in text
    assert "a note\n" in text


def test_terminal_without_a_known_end_counts_steps():
    stream = io.StringIO()
    with Progress(stream=stream, is_terminal=True) as progress:
        progress.update(ProgressRecord(step=7, loss=0.5))
    assert "step 7" in stream.getvalue() and "%" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (65, "1m05s"), (3600, "1h00m"), (7620, "2h07m"), (274_000, "3d04h"), (-1, "0s")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (2 << 40, "2.0 TiB")]
)
def test_sizes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_next_commands_fit_what_the_run_has():
    everything = next_commands("runs/a b", has_test_data=True, has_checkpoint=True, train=TrainConfig(epochs=3))
    assert [command.split()[1] for command, _ in everything[:2]] == ["eval", "resume"]
    assert "train.epochs=6" in everything[1][0]
    assert all("'runs/a b" in command for command, _ in everything)
    bare = next_commands("runs/x", has_test_data=True, has_checkpoint=False, train=TrainConfig())
    assert [command.split()[0] for command, _ in bare] == ["tensorboard"]
    assert format_next_steps(bare).startswith("next:\n  tensorboard --logdir runs/x/metrics")
