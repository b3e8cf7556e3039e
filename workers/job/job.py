"""`JobConfig`: what a user declares about one training job, and what follows from it for tables, features and widths.

A job is a Python function that returns a frozen `JobConfig`. The command line names the function, and the run record
keeps that name with its arguments. A run can therefore be resumed from its folder alone. Where and how long a job runs
is not said here (`orchestrator.api.config`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad, Optimizer
from podembed.workers.control.callback import Callback
from podembed.workers.control.stopping import EarlyStopping
from podembed.workers.data.config import InputData
from podembed.workers.declared_types import check_plain_fields
from podembed.workers.job.candidates import (
    SAMPLE,
    alignment_problem,
    candidates_problem,
    chance_shapes,
    num_parts,
    room_problem,
)
from podembed.workers.job.feature_shapes import inner_shape, tell_order
from podembed.workers.job.job_errors import JobError
from podembed.workers.job.quality import has_logits
from podembed.workers.job.ranking import Baseline, LogLoss, Metric, RecallAt
from podembed.workers.job.tasks import Task, tasks_problem, with_classes
from podembed.workers.job.types import placement_problem, type_problem
from podembed.workers.model.contract import Model, ShortModel, has_short_form

if TYPE_CHECKING:
    import jax
    import optax


# First segments of the keys of a job's dense state: parameters of its model, its own state, and that of the optimizer.
DENSE_PARTS = ("params", "state", "optimizer")
WIRE_DTYPES = ("float32", "bfloat16")
COMPUTE_DTYPES = ("float32", "bfloat16")


Loss = Callable[["jax.Array", "jax.Array"], "jax.Array"]
Schedule = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """One training job.

    Attributes:
      name: used for the run's folder and in messages.
      features: per input the table it looks up in; features that share a table share the `TableConfig` object. Their
        order is that in which the model gets widths and activations, see `ShortModel`.
      model: the dense half, of either form.
      data: where samples come from; its feature names are those of `features`.
      batch_size: samples of a step over all hosts.
      optimizer: row optimizer of every table that has none of its own.
      initial_accumulator_value: above 0, the first accumulator of every `Adagrad` and `FTRL` that was given none.
        Gradients of a job are those of a mean over its batch, so TensorFlow's 0.1, made for sums, would hold rows back.
        A run keeps what it began with.
      dense_optimizer: any optax transformation, for the model's parameters; None stands for `optax.adam(1e-3)`.
      schedule: a factor of the learning rates of all tables and of the dense optimizer, by the number of the step, such
        as one of optax. None leaves them as they are.
      loss: per-sample loss `(scores [n], labels [n]) -> [n]`; None stands for the sigmoid binary cross entropy. The
        step's loss is its mean over the global batch, weighted by the samples' weights. Of candidates it is the mean
        over those of a sample. A model with a method `loss` has that instead.
      tasks: the labels that the model learns, where there are several. It returns scores by task, and the loss is their
        weighted sum over the labels that a sample has.
      num_epochs: passes over the training data.
      num_lanes: fixed parts of an epoch, at least the largest number of hosts; divides `batch_size`.
      seed: seed of the order of the samples, of the rows' first values and of the model's.
      staleness: steps between a lookup and the newest update that it sees. 0 is synchronous. With 1 the lookup of step
        t + 1 is made while the device works on step t. It sees the updates up to step t - 1, and all of them in the
        first step after a commit. Tables on devices are looked up in the step itself, with every update.
      overlap: with staleness 0, whether rows without conflict are prefetched. While the device works on step t, hosts
        send what it does not touch of the lookup of step t + 1. None measures, and does so where it pays. Changes no
        number.
      wire_dtype: `float32`, or `bfloat16` to halve the bytes of rows, vectors and gradients between machines, each of
        which is then rounded to 8 bits. Tables, and what hosts of one machine share, stay float32.
      compute_dtype: what the model computes with, `float32` or `bfloat16`. Parameters, optimizer state, tables and
        losses stay float32. It is meant for GPUs and TPUs. On CPUs it pays with AMX (`amx_bf16` in `/proc/cpuinfo`)
        under jax 0.12, for models of wide layers; elsewhere it is slower.
      best_auc: the best AUC that any model can reach on the evaluation data, where it is known.
      candidates: a feature whose ids in a sample are candidates, the first one being positive. Its activations are
        `[n, c, width]`, and the model returns scores `[n, c]`. The label of the first is that of the sample, and 0 that
        of the others. None where a sample has one score.
      metrics: figures of an evaluation besides its loss, and AUC and log loss where labels are 0 and 1.
      early_stopping: ends training when evaluations no longer get better; None trains all epochs.
      callbacks: hear how the run goes, in the driver's program.
      baseline: what a rule without learning reaches on the evaluation data, where it is known.
    """

    name: str
    features: Mapping[str, FeatureConfig]
    model: Model | ShortModel
    data: InputData
    batch_size: int
    optimizer: Optimizer = field(default_factory=lambda: Adagrad(0.05))
    initial_accumulator_value: float = 1e-8
    dense_optimizer: optax.GradientTransformation | None = None
    schedule: Schedule | None = None
    loss: Loss | None = None
    tasks: tuple[Task, ...] = ()
    num_epochs: int = 1
    num_lanes: int = 16
    seed: int = 0
    staleness: int = 0
    overlap: bool | None = None
    wire_dtype: str = "float32"
    compute_dtype: str = "float32"
    best_auc: float | None = None
    candidates: str | None = None
    metrics: tuple[Metric, ...] = ()
    baseline: Baseline | None = None
    callbacks: tuple[Callback, ...] = ()
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, JobError)
        for name in ("metrics", "tasks", "callbacks"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problem = type_problem({field.name: getattr(self, field.name) for field in fields(self)})
        if problem:
            raise JobError(f"{problem} That is in the JobConfig {self.name!r}.")
        if not self.name:
            raise JobError(
                "Found no name in JobConfig. Expected one, since the run's folder is named after it. Write "
                "name='clicks'."
            )
        if "/" in self.name or "\n" in self.name or self.name in (".", ".."):
            raise JobError(
                f"Found the name {self.name!r} in JobConfig. Expected one without slashes and line breaks, since the "
                "run's folder is named after it. Put the folder above into storage_path."
            )
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise JobError(
                f"Found seed={self.seed}. Expected a whole number of 64 bits, which is what JAX takes. Use a smaller "
                "one."
            )
        self._check_numbers()
        if self.staleness not in (0, 1):
            raise JobError(
                f"Found staleness={self.staleness!r}. Expected 0, where each lookup sees every earlier update, or 1, "
                "where it misses the newest."
            )
        if self.wire_dtype not in WIRE_DTYPES:
            raise JobError(
                f"Found wire_dtype={self.wire_dtype!r}. Expected 'float32', or 'bfloat16' to halve the bytes between "
                "machines."
            )
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise JobError(
                f"Found compute_dtype={self.compute_dtype!r}. Expected 'float32', or 'bfloat16' for mixed precision. "
                "Write one of them, as text."
            )
        try:
            self.activation_shapes  # noqa: B018  # raises what is wrong with an output_shape
        except ValueError as error:
            raise JobError(str(error)) from error
        self._check_candidates()
        if not (self.data.label or self.tasks or self.has_own_loss or self.candidates):
            raise JobError(
                f"Found no label in the data of the JobConfig {self.name!r}, whose loss compares scores with labels. "
                "Expected one, or a loss that does without. Write label='click' in the data, give the model a method "
                "`loss`, or declare candidates."
            )
        problem = tasks_problem(
            self.tasks,
            [label.name for label in self.data.label_columns],
            metrics=self.metrics,
            rivals=[name for name in ("loss", "candidates") if getattr(self, name) is not None],
            has_own_loss=self.has_own_loss,
        )
        if problem:
            raise JobError(f"{problem} That is in the JobConfig {self.name!r}.")
        self._check_metrics()
        problem = placement_problem(self.features, self.optimizer)
        if problem:
            raise JobError(f"{problem} That is in the JobConfig {self.name!r}.")
        tell_order(self.model, self.features)
        # Raises what is wrong with the data's declaration now, not on a host.
        problem = alignment_problem(self.resolved_data.id_columns)
        if problem:
            raise JobError(f"{problem} That is in the JobConfig {self.name!r}.")

    @property
    def has_own_loss(self) -> bool:
        """Whether the model has a loss, which may look at the whole batch."""
        return getattr(self.model, "loss", None) is not None

    @property
    def leaves_out_unlabelled(self) -> bool:
        """Whether a sample whose label is missing counts for nothing: where its one label is all that the loss sees."""
        return (
            not self.tasks and not self.has_own_loss and any(one.missing == "mask" for one in self.data.label_columns)
        )

    @property
    def asks_for_step(self) -> bool:
        """Whether the number of a step changes what its programs compute."""
        return not has_short_form(self.model) or self.has_own_loss or self.schedule is not None

    @property
    def has_logits(self) -> bool:
        """Whether scores are known to be log odds."""
        return has_logits(self.loss) and not self.has_own_loss and not self.tasks

    @property
    def num_scores(self) -> int:
        """Scores per sample, over candidates or tasks; 0 where a sample has one score."""
        return self.num_candidates or sum(task.width for task in self.tasks)

    @property
    def num_candidates(self) -> int:
        """Scores of a sample; 0 where it has one score that is no candidate's."""
        return 0 if self.candidates is None else math.prod(self.activation_shapes[self.candidates][:-1])

    @property
    def evaluation_parts(self) -> int:
        """How often an evaluation scores each sample, every time with the next candidates."""
        if self.candidates is None:
            return 1
        return num_parts(self.resolved_data.id_columns[self.candidates], self.num_candidates)

    @property
    def candidate_features(self) -> tuple[str, ...]:
        """The features that have the candidates of a sample. Those of one column with the same negatives have the same,
        such as a vector and a bias of items.
        """
        if self.candidates is None:
            return ()
        columns = self.resolved_data.id_columns
        kinds = {name: (source.column, source.negatives and source.negatives.draws) for name, source in columns.items()}
        return tuple(name for name, kind in kinds.items() if kind == kinds[self.candidates])

    @property
    def ranks_all(self) -> bool:
        """Whether an evaluation ranks the positive candidate of a sample among all ids of its table."""
        if self.candidates is None:
            return False
        source = self.data.id_columns.get(self.candidates)
        return source is not None and source.negatives is not None and source.negatives.ranks_all

    def _check_numbers(self) -> None:
        """Raises `JobError` for numbers that no run can have."""
        if self.batch_size < 1 or self.num_epochs < 1 or self.num_lanes < 1:
            raise JobError(
                f"Found batch_size={self.batch_size}, num_epochs={self.num_epochs}, num_lanes={self.num_lanes}. "
                f"Expected whole numbers of at least 1."
            )
        if not 0 < self.initial_accumulator_value < math.inf:
            raise JobError(
                f"Found initial_accumulator_value={self.initial_accumulator_value}. Expected a finite number above 0, "
                "since updates divide by its root. Leave it out."
            )
        if self.batch_size % self.num_lanes:
            raise JobError(
                f"Found batch_size={self.batch_size} and num_lanes={self.num_lanes}. Expected the lanes to divide the "
                f"batch. Use a batch size that is a multiple of {self.num_lanes}, or another num_lanes."
            )

    def _check_candidates(self) -> None:
        """Raises `JobError` for candidates that are no sequence, or negatives that there is no room for."""
        shapes = self.activation_shapes
        problem = None if self.candidates is None else candidates_problem(self.candidates, shapes)
        columns = {name: source for name, source in self.data.id_columns.items() if name in shapes}
        problems = (room_problem(name, source, shapes[name]) for name, source in columns.items())
        problem = problem or next((found for found in problems if found), None)
        ranked = [name for name, source in columns.items() if source.negatives and source.negatives.ranks_all]
        if ranked and not problem and (self.candidates is None or not {*ranked} <= {*self.candidate_features}):
            problem = (
                f"Found Negatives(evaluation='all') of feature {ranked[0]!r}, whose ids are no candidates. Expected a "
                f"feature of candidates. Write JobConfig(candidates={ranked[0]!r})."
            )
        if problem:
            raise JobError(f"{problem} That is in the JobConfig {self.name!r}.")

    def _check_metrics(self) -> None:
        """Raises `JobError` for metrics of one name, or one that groups by a feature that is not there."""
        names = [metric.name for metric in self.metrics]
        if len(set(names)) != len(names):
            raise JobError(f"Found metrics {names}. Expected distinct names. Leave out the repetition.")
        for metric in self.metrics:
            # `LogLoss` is what evaluations have by that name.
            if metric.name in self._own_figures and not isinstance(metric, LogLoss):
                raise JobError(
                    f"Found a metric {metric.name!r} of type {type(metric).__name__}. Expected another name, since "
                    f"evaluations of this job have a figure of that name, which it would replace. Call it "
                    f"'own_{metric.name}'. That is in the JobConfig {self.name!r}."
                )
            if self.ranks_all and metric.group_by is None:
                raise JobError(
                    f"Found metric {metric.name} beside candidates of an evaluation that are all ids of a table. "
                    "Expected metrics that rank candidates. Write HitRateAt(10), NDCGAt(10), MRR() or GroupedAUC(), or "
                    "RecallAt(10, group_by='user')."
                )
            if self.ranks_all and isinstance(metric, RecallAt) and metric.group_by == SAMPLE:
                raise JobError(
                    f"Found metric {metric.name} without group_by beside a full ranking, where it would be the hit "
                    f"rate: each sample has one held-out item. Expected the feature of the users over whom recall is "
                    f"averaged. Write RecallAt({metric.k}, group_by='user'), or HitRateAt({metric.k})."
                )
            if metric.group_by == SAMPLE and self.candidates is None and SAMPLE not in self.features:
                raise JobError(
                    f"Found metric {metric.name} without group_by in a job without candidates. Expected a feature to "
                    "group samples by. Write group_by='user', or JobConfig(candidates='item')."
                )
            if metric.group_by not in (None, SAMPLE, *self.features):
                raise JobError(
                    f"Found metric {metric.name} that groups by '{metric.group_by}'. Expected a feature of the job, "
                    f"one of {list(self.features)}. Name one that has one id a sample."
                )

    @property
    def _own_figures(self) -> tuple[str, ...]:
        """Names of all figures that an evaluation may have without metrics, also as it prints them."""
        if self.ranks_all:
            return ()
        loss = () if self.has_own_loss else ("loss",)
        if self.tasks:
            return (*loss, *(name for task in self.tasks for name in task.figure_names))
        return ("auc", "AUC", *loss, *(("log_loss", "log loss") if self.has_logits else ()))

    @property
    def group_features(self) -> tuple[str, ...]:
        """The features whose ids the metrics need, each once; and `sample` for the candidates of each sample."""
        return tuple(dict.fromkeys(metric.group_by for metric in self.metrics if metric.group_by is not None))

    @property
    def resolved_data(self) -> InputData:
        """The data with exactly the features of the model, in its order, the tables' vocabulary sizes, and labels as
        the loss takes them.

        Raises:
          DataConfigError: the data declares a feature that the model does not have, or another vocabulary size.
        """
        sizes = {name: feature.table.vocabulary_size for name, feature in self.features.items()}
        outside: Any = {
            name: feature.table.invalid_ids if feature.table.dynamic_keys is None else "any"
            for name, feature in self.features.items()
        }
        data = self.data.resolved(sizes, outside=outside)
        if self.tasks:
            return replace(data, labels=with_classes(self.tasks, data.label_columns))
        return replace(data, binary_labels=data.binary_labels or (self.loss is None and not self.has_own_loss))

    @property
    def column_shapes(self) -> dict[str, Any]:
        """The `ColumnShape` of each named column of a batch: those of the data, and what models get to know of drawn
        ids.
        """
        return self.data.column_shapes | chance_shapes(self.data.id_columns, self.activation_shapes)

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """The distinct tables, in the order in which the features first use them."""
        return tuple({id(feature.table): feature.table for feature in self.features.values()}.values())

    @property
    def table_names(self) -> tuple[str, ...]:
        """A table's own name, or `table_<position>`.

        Raises:
          JobError: two tables have one name.
        """
        names = tuple(table.name or f"table_{at}" for at, table in enumerate(self.tables))
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise JobError(
                f"Multiple tables with name {doubles[0]} found. Expected distinct names. Give each TableConfig its "
                "own, or use one TableConfig object where features share a table."
            )
        return names

    @property
    def widths(self) -> dict[str, int]:
        """The width of each feature's activation, its last axis, in the features' order."""
        return {name: feature.table.dim for name, feature in self.features.items()}

    @property
    def trained_features(self) -> tuple[bool, ...]:
        """Per feature, whether the rows that it looks up are updated."""
        return tuple(feature.table.trainable for feature in self.features.values())

    @property
    def device_features(self) -> dict[str, FeatureConfig]:
        """The features whose tables live on devices."""
        return {name: feature for name, feature in self.features.items() if feature.table.is_on_devices}

    @property
    def host_features(self) -> dict[str, FeatureConfig]:
        """The features that hosts look up."""
        return {name: feature for name, feature in self.features.items() if not feature.table.is_on_devices}

    @property
    def sequences(self) -> dict[str, int]:
        """The features whose samples keep their vectors apart, with the most that a sample keeps."""
        found = self.features.items()
        return {name: feature.max_sequence_length for name, feature in found if feature.is_sequence}

    @property
    def activation_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each feature's activation behind the axis of the samples, in the features' order: `(width,)`, or
        `(max_sequence_length, width)` of a sequence.

        Raises:
          ValueError: an `output_shape` does not fit the batch.
        """
        return {
            name: (*inner_shape(name, feature, batch_size=self.batch_size), feature.table.dim)
            for name, feature in self.features.items()
        }
