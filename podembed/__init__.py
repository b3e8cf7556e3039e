"""Train JAX models whose embedding tables outgrow one machine.

Here is what a program says to the trainer. The mid-level API of embeddings, the optimizers and the initializers are in
`podembed.embedding`. Models and data sets of the jobs to copy are in `podembed.jobs`. docs/names.md lists all public
names; everything else is private and may change.

The parts lie in folders beside this one: `embedding` (values and math), `workers` (one host), `orchestrator` (the
driver), `serving` (how a model leaves a run), `tools` (what reads a run) and `jobs` (what people run and copy). Names
are imported when they are first used, since Ray and JAX take seconds to load.
"""

# Nothing is imported here that Python has not loaded already. `python -m podembed` runs this before the current folder
# is taken off the search path, and a `typing.py` in it must not run.
import os

TYPE_CHECKING = False  # as in `typing`

if TYPE_CHECKING:
    from typing import Any

    from podembed.embedding.config import FeatureConfig, TableConfig
    from podembed.jobs.prepare.from_dataset import prepare_dataset
    from podembed.jobs.reporters.console import ConsoleReporter
    from podembed.jobs.trainer import Trainer
    from podembed.orchestrator.api.config import (
        CheckpointConfig,
        ConfigurationError,
        FailureConfig,
        MetricsConfig,
        RunConfig,
        ScalingConfig,
        WarmStart,
    )
    from podembed.orchestrator.api.result import (
        Evaluation,
        HostsChange,
        MeasuredTable,
        Recovery,
        Result,
    )
    from podembed.orchestrator.api.run_errors import CrashLoop, DataFailed, JobFailed, TooFewHosts
    from podembed.orchestrator.commit.holder import RunIsHeld
    from podembed.orchestrator.commit.lease import Fenced
    from podembed.orchestrator.commit.run_record import RunMismatch
    from podembed.orchestrator.events.progress import WindowReport
    from podembed.orchestrator.events.reporter import Reporter, SilentReporter
    from podembed.orchestrator.stepwise.pod import PodLost
    from podembed.orchestrator.stepwise.strategy import PodStrategy
    from podembed.serving.artifact.export_model import export_model
    from podembed.serving.figures.of_groups import MRR, GroupedAUC, HitRateAt, NDCGAt
    from podembed.serving.figures.of_samples import MAE, RMSE, Accuracy, Calibration, NormalizedEntropy
    from podembed.serving.predict.evaluate import evaluate
    from podembed.serving.predict.predict import predict
    from podembed.serving.predict.rank import rank_all
    from podembed.serving.predict.recommend import recommend
    from podembed.serving.publish.publisher import Offer, publish
    from podembed.serving.server.serve import asgi_app
    from podembed.serving.server.server_config import ServerConfig
    from podembed.tools.metrics.point import Measurement, Point
    from podembed.workers.columns.vocabulary import vocabulary_size
    from podembed.workers.control.callback import Callback
    from podembed.workers.control.stopping import EarlyStopping
    from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn, Label, Negatives
    from podembed.workers.data.config import CsvData, NpyData, ParquetData, ReadOrder
    from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
    from podembed.workers.data.input_errors import InputError
    from podembed.workers.job.job import JobConfig
    from podembed.workers.job.job_errors import JobError
    from podembed.workers.job.ranking import Baseline, LogLoss, Metric, RecallAt
    from podembed.workers.job.reference import JobReference
    from podembed.workers.job.tasks import Task
    from podembed.workers.model.batch import Losses, ModelBatch, WithState
    from podembed.workers.model.context import StepContext
    from podembed.workers.model.contract import Model, ModelSpec, ShortModel
    from podembed.workers.model.equinox_model import EquinoxModel
    from podembed.workers.model.flax_models import FlaxModel, NnxModel
    from podembed.workers.model.haiku_model import HaikuModel
    from podembed.workers.model.jagged import Jagged
    from podembed.workers.model.losses import bpr, in_batch_softmax, pointwise, sampled_softmax
    from podembed.workers.storage.storage_errors import StorageError

    __version__: str

_WHERE = {
    "Accuracy": "serving.figures.of_samples",
    "Baseline": "workers.job.ranking",
    "Calibration": "serving.figures.of_samples",
    "Callback": "workers.control.callback",
    "CheckpointConfig": "orchestrator.api.config",
    "ConfigurationError": "orchestrator.api.config",
    "ConsoleReporter": "jobs.reporters.console",
    "CrashLoop": "orchestrator.api.run_errors",
    "CsvData": "workers.data.config",
    "DataConfigError": "workers.data.columns",
    "DataFailed": "orchestrator.api.run_errors",
    "DenseColumn": "workers.data.columns",
    "EarlyStopping": "workers.control.stopping",
    "EquinoxModel": "workers.model.equinox_model",
    "Evaluation": "orchestrator.api.result",
    "FailureConfig": "orchestrator.api.config",
    "Measurement": "tools.metrics.point",
    "MetricsConfig": "orchestrator.api.config",
    "Point": "tools.metrics.point",
    "FeatureConfig": "embedding.config",
    "Fenced": "orchestrator.commit.lease",
    "FlaxModel": "workers.model.flax_models",
    "GroupedAUC": "serving.figures.of_groups",
    "HaikuModel": "workers.model.haiku_model",
    "HitRateAt": "serving.figures.of_groups",
    "HostsChange": "orchestrator.api.result",
    "IdColumn": "workers.data.columns",
    "InputError": "workers.data.input_errors",
    "IntegerColumn": "workers.data.extra_columns",
    "Jagged": "workers.model.jagged",
    "JobConfig": "workers.job.job",
    "JobError": "workers.job.job_errors",
    "JobFailed": "orchestrator.api.run_errors",
    "JobReference": "workers.job.reference",
    "Label": "workers.data.columns",
    "ListColumn": "workers.data.extra_columns",
    "LogLoss": "workers.job.ranking",
    "Losses": "workers.model.batch",
    "MAE": "serving.figures.of_samples",
    "MRR": "serving.figures.of_groups",
    "MeasuredTable": "orchestrator.api.result",
    "Metric": "workers.job.ranking",
    "Model": "workers.model.contract",
    "ModelBatch": "workers.model.batch",
    "ModelSpec": "workers.model.contract",
    "NDCGAt": "serving.figures.of_groups",
    "Negatives": "workers.data.columns",
    "NnxModel": "workers.model.flax_models",
    "NormalizedEntropy": "serving.figures.of_samples",
    "NpyData": "workers.data.config",
    "ParquetData": "workers.data.config",
    "PodLost": "orchestrator.stepwise.pod",
    "PodStrategy": "orchestrator.stepwise.strategy",
    "RMSE": "serving.figures.of_samples",
    "ReadOrder": "workers.data.config",
    "RecallAt": "workers.job.ranking",
    "Recovery": "orchestrator.api.result",
    "Reporter": "orchestrator.events.reporter",
    "Result": "orchestrator.api.result",
    "RunConfig": "orchestrator.api.config",
    "RunIsHeld": "orchestrator.commit.holder",
    "RunMismatch": "orchestrator.commit.run_record",
    "ScalingConfig": "orchestrator.api.config",
    "ShortModel": "workers.model.contract",
    "SilentReporter": "orchestrator.events.reporter",
    "StepContext": "workers.model.context",
    "StorageError": "workers.storage.storage_errors",
    "TableConfig": "embedding.config",
    "Task": "workers.job.tasks",
    "TooFewHosts": "orchestrator.api.run_errors",
    "Trainer": "jobs.trainer",
    "VectorColumn": "workers.data.extra_columns",
    "WarmStart": "orchestrator.api.config",
    "WindowReport": "orchestrator.events.progress",
    "WithState": "workers.model.batch",
    "bpr": "workers.model.losses",
    "evaluate": "serving.predict.evaluate",
    "export_model": "serving.artifact.export_model",
    "in_batch_softmax": "workers.model.losses",
    "pointwise": "workers.model.losses",
    "predict": "serving.predict.predict",
    "prepare_dataset": "jobs.prepare.from_dataset",
    "rank_all": "serving.predict.rank",
    "recommend": "serving.predict.recommend",
    "Offer": "serving.publish.publisher",
    "publish": "serving.publish.publisher",
    "ServerConfig": "serving.server.server_config",
    "asgi_app": "serving.server.serve",
    "sampled_softmax": "workers.model.losses",
    "vocabulary_size": "workers.columns.vocabulary",
}

__all__ = [
    "MAE",
    "MRR",
    "RMSE",
    "Accuracy",
    "Baseline",
    "Calibration",
    "Callback",
    "CheckpointConfig",
    "ConfigurationError",
    "ConsoleReporter",
    "CrashLoop",
    "CsvData",
    "DataConfigError",
    "DataFailed",
    "DenseColumn",
    "EarlyStopping",
    "EquinoxModel",
    "Evaluation",
    "FailureConfig",
    "FeatureConfig",
    "Fenced",
    "FlaxModel",
    "GroupedAUC",
    "HaikuModel",
    "HitRateAt",
    "HostsChange",
    "IdColumn",
    "InputError",
    "IntegerColumn",
    "Jagged",
    "JobConfig",
    "JobError",
    "JobFailed",
    "JobReference",
    "Label",
    "ListColumn",
    "LogLoss",
    "Losses",
    "MeasuredTable",
    "Measurement",
    "Metric",
    "MetricsConfig",
    "Model",
    "ModelBatch",
    "ModelSpec",
    "NDCGAt",
    "Negatives",
    "NnxModel",
    "NormalizedEntropy",
    "NpyData",
    "Offer",
    "ParquetData",
    "PodLost",
    "PodStrategy",
    "Point",
    "ReadOrder",
    "RecallAt",
    "Recovery",
    "Reporter",
    "Result",
    "RunConfig",
    "RunIsHeld",
    "RunMismatch",
    "ScalingConfig",
    "ServerConfig",
    "ShortModel",
    "SilentReporter",
    "StepContext",
    "StorageError",
    "TableConfig",
    "Task",
    "TooFewHosts",
    "Trainer",
    "VectorColumn",
    "WarmStart",
    "WindowReport",
    "WithState",
    "asgi_app",
    "bpr",
    "evaluate",
    "export_model",
    "in_batch_softmax",
    "pointwise",
    "predict",
    "prepare_dataset",
    "publish",
    "rank_all",
    "recommend",
    "sampled_softmax",
    "vocabulary_size",
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
