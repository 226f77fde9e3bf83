"""Training state as bytes, for another worker: the dense state with the run's counters, and a rank's metric bins.

safetensors with JSON metadata: no pickle, and a float keeps its bits. The dense state is the same on all ranks (V4), so
any survivor's serves a joiner; metric bins are each rank's own and add up (``BinaryMetrics.merge_``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch

from shoal.kernels.metrics import BinaryMetrics

if TYPE_CHECKING:
    from shoal.actors.trainer import Trainer


def encode_dense(trainer: Trainer) -> bytes:
    """Dense parameters, buffers and optimizer state of the trainer's step, with its counters."""
    metadata = {
        "step": trainer.step,
        "samples": trainer.num_samples,
        "skipped_steps": trainer.skipped_steps,
        "last_checkpoint": trainer.last_checkpoint,
        "optimizer": trainer.dense.optimizer_kind,
    }
    return safetensors.torch.save(trainer.dense.state_tensors(), {"shoal.state": json.dumps(metadata)})


def load_dense(trainer: Trainer, data: bytes) -> int:
    """Take over what ``encode_dense`` made on another worker; returns its step. The metrics are left alone."""
    # The metadata is in the header: its length comes first, as 8 bytes.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = json.loads(header["__metadata__"]["shoal.state"])
    trainer.dense.load_state_tensors(safetensors.torch.load(data), metadata["optimizer"])
    trainer.step = int(metadata["step"])
    trainer.num_samples = int(metadata["samples"])
    trainer.skipped_steps = int(metadata["skipped_steps"])
    trainer.last_checkpoint = int(metadata["last_checkpoint"])
    return trainer.step


def encode_metrics(metrics: BinaryMetrics) -> bytes:
    """The bins of one rank."""
    return safetensors.torch.save(metrics.state_dict())


def decode_metrics(data: bytes) -> BinaryMetrics:
    """Inverse of ``encode_metrics``."""
    metrics = BinaryMetrics()
    metrics.load_state_dict(safetensors.torch.load(data))
    return metrics
