"""The progress of a run on the console: one bar on a terminal, plain ``key=value`` lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from shoal.platform.telemetry import ProgressRecord


class Progress:
    """Shows records as they come. On a terminal one bar is redrawn in place; otherwise each record is one line.

    Use it as a context manager: the bar is closed, and the cursor restored, however the run ends.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        line_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``line_interval_s``: least time between plain lines; the last record is always shown."""
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._line_interval_s = line_interval_s
        self._clock = clock
        self._shown_at = -math.inf
        self._held: ProgressRecord | None = None
        self._bar: Any = None

    def update(self, record: ProgressRecord) -> None:
        """Show a record."""
        if self._is_terminal:
            self._draw(record)
        elif self._clock() - self._shown_at >= self._line_interval_s:
            self._write_line(record)
        else:
            self._held = record

    def note(self, text: str) -> None:
        """Print a line (an event, an evaluation) without disturbing the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._stream, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Show what was held back and end the bar."""
        if self._held is not None:
            self._write_line(self._held)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write_line(self, record: ProgressRecord) -> None:
        print(format_line(record), file=self._stream, flush=True)
        self._shown_at = self._clock()
        self._held = None

    def _draw(self, record: ProgressRecord) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=record.steps_total,
                initial=record.step,
                file=self._stream,
                # A terminal without a size (a container's, often) would hide the bar.
                dynamic_ncols=_has_width(self._stream),
                ncols=None if _has_width(self._stream) else DEFAULT_COLUMNS,
                mininterval=0,
                leave=True,
                bar_format=_BAR if record.steps_total else _COUNT,
            )
        # Steps go back after a recovery, which a bar that only counts up could not show.
        self._bar.n = record.step
        self._bar.total = record.steps_total
        self._bar.set_postfix_str(format_bar(record), refresh=False)
        self._bar.refresh()


def _has_width(stream: TextIO) -> bool:
    """Whether the terminal behind a stream says how wide it is."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


#: Width of the bar where the terminal does not say its own.
DEFAULT_COLUMNS = 120

_BAR = "{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt} {postfix}"
_COUNT = "step {n_fmt} {postfix}"


def format_line(record: ProgressRecord) -> str:
    """``step=100/400 samples_per_s=12345 loss=0.5012 ... eta=1m05s``; what is unknown is left out."""
    steps = f"{record.step}/{record.steps_total}" if record.steps_total is not None else str(record.step)
    values = {"step": steps, "samples_per_s": _rate(record.samples_per_s), **_metrics(record)}
    values |= {"exchange_ms": _fixed(record.exchange_ms, 2), "workers": str(record.workers), **_traffic(record)}
    values |= {"epoch": str(record.epoch), **_protection(record), "eta": _eta(record)}
    return " ".join(f"{name}={value}" for name, value in values.items() if value)


def format_bar(record: ProgressRecord) -> str:
    """What stands behind the bar, most wanted first (a narrow terminal cuts the end)."""
    values = {"": f"{_rate(record.samples_per_s)} samples/s", **_metrics(record), "eta": _eta(record)}
    exchange = _fixed(record.exchange_ms, 1)
    values |= {"exch": f"{exchange}ms" if exchange else "", "workers": str(record.workers), **_protection(record)}
    return " ".join(f"{name} {value}".strip() for name, value in values.items() if value)


def format_duration(seconds: float) -> str:
    """``42s``, ``1m05s``, ``2h07m`` or ``3d04h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _metrics(record: ProgressRecord) -> dict[str, str]:
    return {name: _fixed(getattr(record, name), 4) for name in ("loss", "ne", "auc")}


def _traffic(record: ProgressRecord) -> dict[str, str]:
    """How rows travel, and the bytes that a step sends; nothing with one worker."""
    if record.workers < 2:
        return {}
    sizes = (("within_hosts", record.bytes_within_hosts), ("across_hosts", record.bytes_across_hosts))
    pooled = sum(flow == "pooled" for flow in record.flows.values())
    return {
        "exchange": record.exchange,
        **{name: format_bytes(size).replace(" ", "") for name, size in sizes if size},
        "pooled_tables": f"{pooled}/{len(record.flows)}" if pooled else "",
    }


def _protection(record: ProgressRecord) -> dict[str, str]:
    """How far a loss would take the run back, and what is without a copy for now."""
    protected = "" if record.protected_step is None else str(record.protected_step)
    unprotected = format_bytes(record.unprotected_bytes).replace(" ", "") if record.unprotected_bytes else ""
    return {"protected": protected, "unprotected": unprotected}


def _fixed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _eta(record: ProgressRecord) -> str:
    is_known = record.eta_s is not None and math.isfinite(record.eta_s)
    return format_duration(record.eta_s or 0.0) if is_known else ""
