"""The driver of a run and what a program says to it. Names are imported when they are first used: Ray and JAX take seconds to load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, WarmStart
    from orchestrator.strategy import PodStrategy
    from orchestrator.trainer import Trainer
    from workers.data_config import CsvData, DenseColumn, IdColumn, NpyData, ParquetData
    from workers.job import JobConfig, JobReference

_WHERE = {
    "CheckpointConfig": "orchestrator.config",
    "FailureConfig": "orchestrator.config",
    "Result": "orchestrator.config",
    "RunConfig": "orchestrator.config",
    "ScalingConfig": "orchestrator.config",
    "WarmStart": "orchestrator.config",
    "PodStrategy": "orchestrator.strategy",
    "Trainer": "orchestrator.trainer",
    "CsvData": "workers.data_config",
    "DenseColumn": "workers.data_config",
    "IdColumn": "workers.data_config",
    "NpyData": "workers.data_config",
    "ParquetData": "workers.data_config",
    "JobConfig": "workers.job",
    "JobReference": "workers.job",
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
