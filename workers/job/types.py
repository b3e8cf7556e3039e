"""What stands in the fields of a `JobConfig` that are no plain values. They say whether it is what the field is for,
and what to write instead.

Mistakes that are easy to make have remedies of their own. Such are a table for a feature and a class for an object.
Another is the optimizer of the rows in the place of that of the dense parameters.

`placement_problem` says why a table cannot live on devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.device_places import problem_on_devices
from podembed.embedding.optimizers import Optimizer
from podembed.workers.control.callback import Callback
from podembed.workers.control.stopping import EarlyStopping
from podembed.workers.declared_types import shown
from podembed.workers.formats.registry import declared_kinds, is_readable
from podembed.workers.job.ranking import Baseline
from podembed.workers.job.tasks import Task


def type_problem(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of some fields of a `JobConfig`, in one sentence for the user; None if nothing
    is.
    """
    checks = (
        _features(fields["features"]),
        _model(fields["model"]),
        _data(fields["data"]),
        _row_optimizer("optimizer", fields["optimizer"]),
        *_table_optimizers(fields["features"]),
        *_table_dtypes(fields["features"]),
        _dense_optimizer(fields["dense_optimizer"]),
        _schedule(fields["schedule"]),
        _loss(fields["loss"]),
        _tasks(fields["tasks"]),
        _metrics(fields["metrics"]),
        _baseline(fields["baseline"]),
        _early_stopping(fields["early_stopping"]),
        _callbacks(fields["callbacks"]),
    )
    return next((problem for problem in checks if problem), None)


def _sentence(field: str, value: Any, expected: str, remedy: str) -> str:
    return f"Found {field}={shown(value)}. Expected {expected}. {remedy}."


def _features(features: Any) -> str | None:
    expected = "a dictionary of names to FeatureConfig"
    example = 'Write features={"user": FeatureConfig(TableConfig(vocabulary_size=..., dim=...))}'
    if not isinstance(features, Mapping) or not features:
        return _sentence("features", features, f"{expected}, with at least one", example)
    for name, feature in features.items():
        field = f"features[{name!r}]"
        if not isinstance(name, str) or not name:
            return _sentence("features", features, "names that are text", example)
        if isinstance(feature, TableConfig):
            return (
                f"Found a TableConfig as {field}. Expected a FeatureConfig. Write FeatureConfig(table), with the same "
                "table object for features that share it."
            )
        if not isinstance(feature, FeatureConfig):
            return _sentence(field, feature, "a FeatureConfig", example)
    return None


def _model(model: Any) -> str | None:
    expected = "an object with init(key, spec) and apply(params, batch, context), see docs/write-a-job.md"
    if isinstance(model, type):
        return _sentence("model", model, expected, f"Write model={model.__name__}(...), an object of it")
    adapter = _adapter(model)
    if adapter:
        return _sentence("model", model, expected, f"It is a module of a framework: write model={adapter}")
    if not all(callable(getattr(model, method, None)) for method in ("init", "apply")):
        return _sentence("model", model, expected, "Pass one; jobs/models has two")
    return None


def _adapter(model: Any) -> str | None:
    """How a module of a framework is made a model; None for anything else. Frameworks are not imported for that."""
    adapters = {
        "flax.linen": "FlaxModel(module)",
        "flax.nnx": "NnxModel(lambda rngs, spec: ...)",
        "equinox": "EquinoxModel(lambda key, spec: ...)",
        "haiku": "HaikuModel(function)",
    }
    bases = [f"{base.__module__}." for base in type(model).__mro__]
    return next((text for name, text in adapters.items() if any(base.startswith(f"{name}.") for base in bases)), None)


def _data(data: Any) -> str | None:
    if is_readable(data):
        return None
    remedy = (
        "Samples are read from files: write ParquetData('clicks/*.parquet', label='click'), and write samples in "
        "memory to such files first"
    )
    return _sentence("data", data, declared_kinds(), remedy)


def _is_optax(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in ("init", "update"))


def _row_optimizer(field: str, value: Any) -> str | None:
    if isinstance(value, Optimizer):
        return None
    expected = "a row optimizer of `embedding`, such as Adagrad(0.05)"
    if isinstance(value, type) and issubclass(value, Optimizer):
        return _sentence(field, value, expected, f"Write {value.__name__}(...), an object of it")
    if _is_optax(value):
        return (
            f"Found a transformation of optax as {field}, which updates rows. Expected {expected}. optax is for the "
            "dense parameters: pass it as dense_optimizer."
        )
    if hasattr(value, "as_optax"):
        return (
            f"Found {field}={type(value).__name__}, a Keras optimizer. Expected {expected}. For the dense parameters "
            "pass dense_optimizer=optimizer.as_optax()."
        )
    return _sentence(field, value, expected, "Pass one")


def _tables(features: Any) -> list[TableConfig]:
    """Once for each feature; none where the features are something else."""
    if not isinstance(features, Mapping) or _features(features):
        return []
    return [feature.table for feature in features.values()]


def _table_optimizers(features: Any) -> list[str | None]:
    return [
        _row_optimizer(f"optimizer of table {table.name!r}", table.optimizer)
        for table in _tables(features)
        if table.optimizer is not None
    ]


def _table_dtypes(features: Any) -> list[str | None]:
    return [
        _sentence(f"dtype of table {table.name!r}", str(table.dtype), "float32, the type of all rows", "Leave it out")
        for table in _tables(features)
        if table.dtype != np.float32
    ]


def _dense_optimizer(value: Any) -> str | None:
    expected = "a transformation of optax, such as optax.adam(1e-3), or None"
    if isinstance(value, Optimizer):
        return (
            f"Found dense_optimizer={type(value).__name__}, which updates rows of tables. Expected {expected}. Pass it "
            f"as optimizer, and optax.{type(value).__name__.lower()}(...) or another one here."
        )
    if not isinstance(value, type) and hasattr(value, "as_optax"):
        return (
            f"Found dense_optimizer={type(value).__name__}, a Keras optimizer. Expected {expected}. Write "
            "dense_optimizer=optimizer.as_optax()."
        )
    if value is None:
        return None
    if _is_optax(value):
        return rate_problem(value)
    called = getattr(value, "__name__", "")
    remedy = f"Call it: {called}(...)" if callable(value) and called else "Pass one"
    return _sentence("dense_optimizer", value, expected, remedy)


def _schedule(value: Any) -> str | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return None
    expected = "a function of the step that returns a factor of all learning rates, or None"
    return _sentence("schedule", value, expected, "Write schedule=optax.linear_schedule(1.0, 0.0, 10_000)")


def _loss(value: Any) -> str | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return None
    expected = (
        "a function of scores and labels, each [n], that returns the loss of each sample, [n], or None for sigmoid "
        "cross-entropy"
    )
    return _sentence("loss", value, expected, "Write loss=optax.squared_error, or a function of your own")


def _tasks(value: Any) -> str | None:
    if isinstance(value, tuple) and all(isinstance(task, Task) for task in value):
        return None
    return _sentence("tasks", value, "a tuple of Task", "Write tasks=(Task('click'), Task('stars', 'regression'))")


def _metrics(value: Any) -> str | None:
    expected = "a tuple of metrics, such as (RecallAt(10, group_by='user'),)"
    if not isinstance(value, tuple):
        return _sentence("metrics", value, expected, "Write metrics=(metric,), with the comma")
    for metric in value:
        is_metric = (
            not isinstance(metric, type)
            and isinstance(name := getattr(metric, "name", None), str)
            and bool(name)
            and name.isprintable()
            and hasattr(metric, "group_by")
        )
        if not is_metric or not callable(getattr(metric, "of", None)):
            return _sentence(
                "metrics", value, expected, "Each has a name, group_by, and of(scores), which returns a number"
            )
    return None


def _baseline(value: Any) -> str | None:
    if value is None or isinstance(value, Baseline):
        return None
    return _sentence(
        "baseline", value, "a Baseline, or None", "Write Baseline(name='popularity', figures={'AUC': 0.6})"
    )


def _early_stopping(value: Any) -> str | None:
    if value is None or isinstance(value, EarlyStopping):
        return None
    return _sentence("early_stopping", value, "an EarlyStopping, or None", "Write EarlyStopping(patience=3)")


def _callbacks(callbacks: Any) -> str | None:
    expected, example = "objects of classes that extend Callback", "Write callbacks=(MyCallback(),)"
    if not isinstance(callbacks, tuple):
        return _sentence("callbacks", callbacks, f"a tuple of {expected}", example)
    wrong = next((one for one in callbacks if not isinstance(one, Callback)), None)
    return None if wrong is None else _sentence("a callback", wrong, expected, example)


_RATES = ("step_size", "learning_rate")


def rate_problem(transformation: Any) -> str | None:
    """What is wrong with the rates of a transformation of optax, and what to do; None if nothing is, or it cannot be
    seen.

    Such a transformation is made of functions that keep their numbers in their closures. Nothing is computed, since a
    job is also declared where no device may be used. Other packages' functions, and rates that are schedules, are not
    judged.
    """
    found = list(_kept(transformation, set()))
    remedy = "Write a finite learning rate above 0, such as optax.adam(1e-3)."
    for name, value in found:
        if isinstance(value, float) and (math.isnan(value) or (name in _RATES and math.isinf(value))):
            return f"Found a dense_optimizer with {name}={value}. Expected finite numbers. {remedy}"
    if any(name == _FOREIGN for name, _ in found):
        return None
    # A rate becomes a negative factor, since steps go down. Other factors, of gradients for example, are above 0.
    factors = [value for name, value in found if name == "step_size"]
    factors += [-value for name, value in found if name == "learning_rate"]
    if factors and min(factors) > 0:
        return f"Found a dense_optimizer with the learning rate {-factors[-1]:g}, which goes uphill. {remedy}"
    return None


_FOREIGN = "a function that is not of optax, or a schedule"


def _kept(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All numbers in the closures of functions, by the name that they have there."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple | list | Mapping):
        parts = value.items() if isinstance(value, Mapping) else ((None, part) for part in value)
        for name, part in parts:
            yield from ((name, float(part)),) if name is not None and _is_number(part) else _kept(part, seen)
        return
    if not callable(value):
        return
    module = getattr(value, "__module__", None) or ""
    # Some of optax.contrib, such as cocob, take the sign into their own hands.
    if not module.startswith("optax.") or module.startswith("optax.contrib.") or not hasattr(value, "__code__"):
        yield _FOREIGN, None
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            part = cell.cell_contents
        except ValueError:  # A function that refers to itself, while it is made.
            continue
        yield from ((name, float(part)),) if _is_number(part) else _kept(part, seen)


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if getattr(value, "shape", None) != ():
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def placement_problem(features: Mapping[str, FeatureConfig], optimizer: Optimizer) -> str | None:
    """What is wrong with the tables that a job wants on its devices, in sentences for the user; None if nothing is.

    Args:
      optimizer: optimizer of tables that have none of their own.
    """
    tables = {id(feature.table): feature.table for feature in features.values() if feature.table.is_on_devices}
    return next((problem for table in tables.values() if (problem := problem_on_devices(table, optimizer))), None)
