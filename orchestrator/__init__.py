"""The driver of a run and what a program says to it. Names are imported when they are first used: Ray and JAX take
seconds to load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api.config import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, WarmStart
    from orchestrator.strategy import PodStrategy
    from orchestrator.trainer import Trainer
    from workers.data.config import CsvData, DenseColumn, IdColumn, NpyData, ParquetData
    from workers.job.job import JobConfig, JobReference

_WHERE = {
    "CheckpointConfig": "orchestrator.api.config",
    "FailureConfig": "orchestrator.api.config",
    "Result": "orchestrator.api.config",
    "RunConfig": "orchestrator.api.config",
    "ScalingConfig": "orchestrator.api.config",
    "WarmStart": "orchestrator.api.config",
    "PodStrategy": "orchestrator.strategy",
    "Trainer": "orchestrator.trainer",
    "CsvData": "workers.data.config",
    "DenseColumn": "workers.data.config",
    "IdColumn": "workers.data.config",
    "NpyData": "workers.data.config",
    "ParquetData": "workers.data.config",
    "JobConfig": "workers.job.job",
    "JobReference": "workers.job.job",
}

__all__ = [
    "CheckpointConfig",
    "CsvData",
    "DenseColumn",
    "FailureConfig",
    "IdColumn",
    "JobConfig",
    "JobReference",
    "NpyData",
    "ParquetData",
    "PodStrategy",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Trainer",
    "WarmStart",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'orchestrator' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)
