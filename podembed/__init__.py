"""Train JAX models whose embedding tables outgrow one machine.

Here is what a program says to the trainer. The mid-level API of embeddings, the optimizers and the initializers are in
`podembed.embedding`. docs/names.md lists all public names; everything else is private and may change.

The parts lie in folders beside this one: `embedding` (values and math), `workers` (one host), `orchestrator` (the
driver) and `jobs` (what people run and copy). Names are imported when they are first used, since Ray and JAX take
seconds to load.
"""

# Nothing is imported here that Python has not loaded already. `python -m podembed` runs this before the current folder
# is taken off the search path, and a `typing.py` in it must not run.
import os

TYPE_CHECKING = False  # as in `typing`

if TYPE_CHECKING:
    from typing import Any

    from podembed.embedding.config import FeatureConfig, TableConfig
    from podembed.orchestrator.api.config import (
        CheckpointConfig,
        ConfigurationError,
        Evaluation,
        FailureConfig,
        HostsChange,
        Recovery,
        Result,
        RunConfig,
        ScalingConfig,
        WarmStart,
    )
    from podembed.orchestrator.api.errors import CrashLoop, DataFailed, JobFailed, TooFewHosts
    from podembed.orchestrator.commit.lease import Fenced, RunIsHeld
    from podembed.orchestrator.commit.run_record import RunMismatch
    from podembed.orchestrator.driver.console import ConsoleReporter, Reporter, SilentReporter, WindowReport
    from podembed.orchestrator.pod import PodLost
    from podembed.orchestrator.strategy import PodStrategy
    from podembed.orchestrator.trainer import Trainer
    from podembed.workers.data.config import CsvData, DataConfigError, DenseColumn, IdColumn, NpyData, ParquetData
    from podembed.workers.data.errors import InputError
    from podembed.workers.job.job import JobConfig, JobError, JobReference, Model
    from podembed.workers.job.ranking import Baseline, LogLoss, Metric, RecallAt
    from podembed.workers.storage.errors import StorageError

    __version__: str

_WHERE = {
    "Baseline": "workers.job.ranking",
    "CheckpointConfig": "orchestrator.api.config",
    "ConfigurationError": "orchestrator.api.config",
    "ConsoleReporter": "orchestrator.driver.console",
    "CrashLoop": "orchestrator.api.errors",
    "CsvData": "workers.data.config",
    "DataConfigError": "workers.data.config",
    "DataFailed": "orchestrator.api.errors",
    "DenseColumn": "workers.data.config",
    "Evaluation": "orchestrator.api.config",
    "FailureConfig": "orchestrator.api.config",
    "FeatureConfig": "embedding.config",
    "Fenced": "orchestrator.commit.lease",
    "HostsChange": "orchestrator.api.config",
    "IdColumn": "workers.data.config",
    "InputError": "workers.data.errors",
    "JobConfig": "workers.job.job",
    "JobError": "workers.job.job",
    "JobFailed": "orchestrator.api.errors",
    "JobReference": "workers.job.job",
    "LogLoss": "workers.job.ranking",
    "Metric": "workers.job.ranking",
    "Model": "workers.job.job",
    "NpyData": "workers.data.config",
    "ParquetData": "workers.data.config",
    "PodLost": "orchestrator.pod",
    "PodStrategy": "orchestrator.strategy",
    "RecallAt": "workers.job.ranking",
    "Recovery": "orchestrator.api.config",
    "Reporter": "orchestrator.driver.console",
    "Result": "orchestrator.api.config",
    "RunConfig": "orchestrator.api.config",
    "RunIsHeld": "orchestrator.commit.lease",
    "RunMismatch": "orchestrator.commit.run_record",
    "ScalingConfig": "orchestrator.api.config",
    "SilentReporter": "orchestrator.driver.console",
    "StorageError": "workers.storage.errors",
    "TableConfig": "embedding.config",
    "TooFewHosts": "orchestrator.api.errors",
    "Trainer": "orchestrator.trainer",
    "WarmStart": "orchestrator.api.config",
    "WindowReport": "orchestrator.driver.console",
}

__all__ = [
    "Baseline",
    "CheckpointConfig",
    "ConfigurationError",
    "ConsoleReporter",
    "CrashLoop",
    "CsvData",
    "DataConfigError",
    "DataFailed",
    "DenseColumn",
    "Evaluation",
    "FailureConfig",
    "FeatureConfig",
    "Fenced",
    "HostsChange",
    "IdColumn",
    "InputError",
    "JobConfig",
    "JobError",
    "JobFailed",
    "JobReference",
    "LogLoss",
    "Metric",
    "Model",
    "NpyData",
    "ParquetData",
    "PodLost",
    "PodStrategy",
    "RecallAt",
    "Recovery",
    "Reporter",
    "Result",
    "RunConfig",
    "RunIsHeld",
    "RunMismatch",
    "ScalingConfig",
    "SilentReporter",
    "StorageError",
    "TableConfig",
    "TooFewHosts",
    "Trainer",
    "WarmStart",
    "WindowReport",
]

# In a checkout the parts are links beside this file. Where a copy lost them, the folders are found in the checkout.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_ROOT, "pyproject.toml")) and not os.path.isdir(os.path.join(__path__[0], "embedding")):
    __path__.append(_ROOT)


def __getattr__(name: str) -> "Any":
    import importlib

    if name == "__version__":
        return importlib.import_module("podembed.version").version()
    if name not in _WHERE:
        raise AttributeError(f"module 'podembed' has no attribute '{name}'")
    return getattr(importlib.import_module(f"podembed.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
