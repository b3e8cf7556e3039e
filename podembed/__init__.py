"""Train JAX models whose embedding tables outgrow one machine.

Here is what a program says to the trainer. The mid-level API of embeddings, its optimizers and initializers are in
`podembed.embedding`, metrics and losses in `podembed.workers.job`. Everything else is private and may change.

The parts lie in folders beside this one: `embedding` (values and math), `workers` (one host), `orchestrator` (the
driver) and `jobs` (what people run and copy). Names are imported when they are first used, since Ray and JAX take
seconds to load.
"""

# Nothing is imported here that Python has not loaded already: `python -m podembed` comes by before the current folder
# is taken off the search path, and a `typing.py` in it must not run.
import os

TYPE_CHECKING = False  # as in `typing`

if TYPE_CHECKING:
    from typing import Any

    from podembed.embedding.config import FeatureConfig, TableConfig
    from podembed.orchestrator.api.config import (
        CheckpointConfig,
        FailureConfig,
        Result,
        RunConfig,
        ScalingConfig,
        WarmStart,
    )
    from podembed.orchestrator.strategy import PodStrategy
    from podembed.orchestrator.trainer import Trainer
    from podembed.workers.data.config import CsvData, DenseColumn, IdColumn, NpyData, ParquetData
    from podembed.workers.job.job import JobConfig, JobReference

_WHERE = {
    "CheckpointConfig": "orchestrator.api.config",
    "CsvData": "workers.data.config",
    "DenseColumn": "workers.data.config",
    "FailureConfig": "orchestrator.api.config",
    "FeatureConfig": "embedding.config",
    "IdColumn": "workers.data.config",
    "JobConfig": "workers.job.job",
    "JobReference": "workers.job.job",
    "NpyData": "workers.data.config",
    "ParquetData": "workers.data.config",
    "PodStrategy": "orchestrator.strategy",
    "Result": "orchestrator.api.config",
    "RunConfig": "orchestrator.api.config",
    "ScalingConfig": "orchestrator.api.config",
    "TableConfig": "embedding.config",
    "Trainer": "orchestrator.trainer",
    "WarmStart": "orchestrator.api.config",
}

__all__ = [
    "CheckpointConfig",
    "CsvData",
    "DenseColumn",
    "FailureConfig",
    "FeatureConfig",
    "IdColumn",
    "JobConfig",
    "JobReference",
    "NpyData",
    "ParquetData",
    "PodStrategy",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TableConfig",
    "Trainer",
    "WarmStart",
]

# In a checkout the parts are links beside this file. Where a copy lost them, the folders are found in the checkout.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_ROOT, "pyproject.toml")) and not os.path.isdir(os.path.join(__path__[0], "embedding")):
    __path__.append(_ROOT)


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'podembed' has no attribute '{name}'")
    return getattr(importlib.import_module(f"podembed.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
