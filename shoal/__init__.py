"""Shoal: elastic training of large recommendation models on Ray.

The names below are imported on first use, so that ``import shoal`` and ``shoal --help`` stay fast (no torch, no ray).
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

# A Ray job whose working directory is this repository finds this file before the installed package's; the installed
# package's folders (kernels, actors, platform, jobs) then still have to be found.
__path__ = pkgutil.extend_path(__path__, __name__)

__version__ = "0.1.0"

# Public name -> the module that defines it.
_EXPORTS: dict[str, str] = {
    "ElasticTrainer": "shoal.jobs.train",
    "Result": "shoal.jobs.train",
    "scale": "shoal.jobs.live",
    "stop": "shoal.jobs.live",
    "Batch": "shoal.kernels.batch",
    "JaggedTensor": "shoal.kernels.jagged",
    "KeyedJaggedTensor": "shoal.kernels.jagged",
    "KeyedTensor": "shoal.kernels.jagged",
    "EmbeddingBagCollection": "shoal.actors.embedding",
    "EmbeddingCollection": "shoal.actors.embedding",
    "EmbeddingBagConfig": "shoal.kernels.tables",
    "EmbeddingConfig": "shoal.kernels.tables",
    "PoolingType": "shoal.kernels.spec",
    "DataType": "shoal.kernels.spec",
    "DataConfig": "shoal.platform.config",
    "TrainConfig": "shoal.platform.config",
    "TablesConfig": "shoal.platform.config",
    "ScalingConfig": "shoal.platform.config",
    "RunConfig": "shoal.platform.config",
    "CheckpointConfig": "shoal.platform.config",
    "FailureConfig": "shoal.platform.config",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
