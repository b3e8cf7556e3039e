"""`Task`: a label that a model learns, with its loss, and the figures that an evaluation has of it.

Numbers only. The losses are written once, for JAX in a step and for numpy in an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from podembed.workers.data.columns import Label
from podembed.workers.declared_types import check_plain_fields, shown
from podembed.workers.job.job_errors import JobError
from podembed.workers.job.quality import Scores, has_logits, weighted_mean

TaskKind = Literal["binary", "regression", "multi_class", "ordinal"]
_OF_CLASSES = ("multi_class", "ordinal")


@dataclass(frozen=True, slots=True)
class Task:
    """One label that a model learns.

    | kind | labels | scores | loss |
    |---|---|---|---|
    | `binary` | 0 and 1 | `[n]`, log odds of 1 | sigmoid cross entropy |
    | `regression` | any numbers | `[n]` | squared error |
    | `multi_class` | 0 to num_classes - 1 | `[n, num_classes]`, logits | softmax cross entropy |
    | `ordinal` | 0 to num_classes - 1 | `[n, num_classes - 1]`, log odds of above 0, 1, ... | the sum of theirs |

    The loss of ordinal labels is that of Cao et al., Rank consistent ordinal regression, 2020. Metrics judge the
    expected label of an ordinal task.

    Attributes:
      label: name of its column, and of the task.
      kind: what its labels are.
      num_classes: number of classes of the kinds with classes.
      weight: of its loss among the others.
      loss: `(scores, labels [n]) -> [n]`, with scores as above, in the place of the loss of the kind. Labels of a
        binary task then are any numbers.
    """

    label: str
    kind: TaskKind = "binary"
    _: KW_ONLY
    num_classes: int = 0
    weight: float = 1.0
    loss: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, JobError)
        if self.kind not in get_args(TaskKind):
            raise JobError(
                f"Found kind={self.kind!r} of task {self.label!r}. Expected one of {get_args(TaskKind)}. Pick one."
            )
        if (self.num_classes >= 2) != (self.kind in _OF_CLASSES) or self.num_classes < 0:
            raise JobError(
                f"Found num_classes={self.num_classes} of task {self.label!r} of kind {self.kind!r}. Expected at least "
                "2 with 'multi_class' and 'ordinal', and none with other kinds. Write "
                "Task('grade', 'multi_class', num_classes=5)."
            )
        if self.loss is not None and (isinstance(self.loss, type) or not callable(self.loss)):
            raise JobError(
                f"Found loss={shown(self.loss)} of task {self.label!r}. Expected a function of scores and labels that "
                "returns [n]. Leave it out for that of the kind."
            )
        if not 0 <= self.weight < np.inf:
            raise JobError(
                f"Found weight={self.weight} of task {self.label!r}. Expected a number of at least 0. Leave it out "
                "for 1."
            )

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes of its scores behind that of the samples."""
        if self.kind == "multi_class":
            return (self.num_classes,)
        return (self.num_classes - 1,) if self.kind == "ordinal" else ()

    @property
    def width(self) -> int:
        """Scores of a sample."""
        return self.inner[0] if self.inner else 1

    @property
    def label_classes(self) -> int | None:
        """As `Label.num_classes`."""
        if self.kind == "binary":
            return 2 if self.loss is None else None
        return self.num_classes or None

    def losses(self, scores: Any, labels: Any, xp: Any = np) -> Any:
        """The loss of each sample, `[n]`.

        Args:
          scores: `[n, *inner]`.
          labels: `[n]`, without NaN.
          xp: numpy, or its double of JAX, of which the arrays are.
        """
        if self.loss is not None:
            return self.loss(scores, labels)
        if self.kind == "regression":
            return (scores - labels) ** 2
        if self.kind == "multi_class":
            largest = xp.max(scores, axis=1, keepdims=True)
            total = xp.log(xp.sum(xp.exp(scores - largest), axis=1)) + largest[:, 0]
            return total - xp.take_along_axis(scores, labels.astype("int32")[:, None], axis=1)[:, 0]
        if self.kind == "ordinal":
            is_above = labels[:, None] > xp.arange(self.num_classes - 1)
            return xp.sum(xp.logaddexp(0.0, scores) - is_above * scores, axis=1)
        return xp.logaddexp(0.0, scores) - labels * scores

    def figures(self, scores: Scores) -> dict[str, float]:
        """What an evaluation has of every task, by name; nothing without any labelled sample. AUC needs both labels."""
        if not (scores.weights > 0).any():
            return {}
        labels = scores.labels[scores.weights > 0]
        if self.kind == "binary" and has_logits(self.loss):
            has_both = len(np.unique(labels)) == 2 and bool(((labels == 0) | (labels == 1)).all())
            auc = {f"{self.label}/auc": scores.auc()} if has_both else {}
            is_binary = bool(((labels == 0) | (labels == 1)).all())
            return auc | ({f"{self.label}/log_loss": scores.log_loss()} if is_binary else {})
        values = _on_host(self)(scores.logits, np.nan_to_num(scores.labels))
        return {f"{self.label}/loss": weighted_mean(values, scores.weights)}

    @property
    def figure_names(self) -> tuple[str, ...]:
        """All that `figures` may have."""
        if self.kind == "binary" and has_logits(self.loss):
            return f"{self.label}/auc", f"{self.label}/log_loss"
        return (f"{self.label}/loss",)


def split_scores(tasks: Sequence[Task], scores: np.ndarray) -> dict[str, np.ndarray]:
    """`[n, sum of widths]` as the scores of each task, `[n, *inner]`."""
    ends = np.cumsum([task.width for task in tasks])
    parts = np.split(scores, ends[:-1], axis=1)
    return {task.label: part.reshape(len(part), *task.inner) for task, part in zip(tasks, parts, strict=True)}


def total_losses(tasks: Sequence[Task]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of scores `[n, sum of widths]` and labels `[n, tasks]`, NaN where one is missing, that returns the
    weighted sum of each sample, `[n]`.
    """
    losses = {task.label: _on_host(task) for task in tasks}

    def total(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
        parts, found = split_scores(tasks, scores), np.zeros(len(scores))
        for at, task in enumerate(tasks):
            of_task = losses[task.label](parts[task.label], np.nan_to_num(labels[:, at]))
            found += task.weight * np.where(np.isnan(labels[:, at]), 0.0, of_task)
        return found

    return total


def _on_host(task: Task) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Its losses as numpy; JAX is loaded for a loss of the user's alone."""
    if task.loss is None:
        # A score that is no number is refused where the figures are made.
        def of_kind(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
            with np.errstate(invalid="ignore", over="ignore"):
                return task.losses(scores.astype(np.float64), labels)

        return of_kind
    import jax

    compiled = jax.jit(task.loss)
    return lambda scores, labels: np.asarray(compiled(scores, labels))


def scores_by_task(
    tasks: Sequence[Task],
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    groups: Mapping[str, np.ndarray],
) -> dict[str, Scores]:
    """What figures of each task are made of. Samples without its label have weight 0.

    Args:
      scores: `[n, sum of widths]`.
      labels: `[n, tasks]`, NaN where one is missing.
    """
    found = {}
    for at, (name, logits) in enumerate(split_scores(tasks, scores).items()):
        of_task = np.where(np.isnan(labels[:, at]), np.float32(0), weights)
        found[name] = Scores(logits, labels[:, at], of_task, groups)
    return found


def predicted(task: Task, scores: Scores) -> Scores:
    """As metrics see them: of an ordinal task the expected label in the place of the logits."""
    if task.kind != "ordinal":
        return scores
    expected = np.exp(-np.logaddexp(0.0, -scores.logits.astype(np.float64))).sum(axis=1)
    return Scores(expected, scores.labels, scores.weights, scores.groups)


def with_classes(tasks: Sequence[Task], labels: Sequence[Label]) -> tuple[Label, ...]:
    """Labels with the classes that their tasks know."""
    classes = {task.label: task.label_classes for task in tasks}
    return tuple(replace(label, num_classes=classes.get(label.name, label.num_classes)) for label in labels)


def tasks_problem(
    tasks: Sequence[Task], labels: Sequence[str], *, metrics: Sequence[Any], rivals: Sequence[str], has_own_loss: bool
) -> str | None:
    """What is wrong with the tasks of a job, in sentences for the user; None if nothing is.

    Args:
      labels: names of the labels of its data.
      rivals: fields of the job that are set and do not go with tasks.
    """
    if not tasks:
        foreign = next((metric for metric in metrics if getattr(metric, "task", None) is not None), None)
        if foreign is not None:
            return (
                f"Found metric {foreign.name} of a task in a job without tasks. Expected tasks. Declare "
                "JobConfig(tasks=...), or leave task out."
            )
        if len(labels) > 1 and not has_own_loss:
            return (
                f"Found labels {[*labels]} and a loss of one label. Expected tasks, or a model with a loss of its own. "
                f"Write tasks=(Task({labels[0]!r}), Task({labels[1]!r})), or declare one label."
            )
        return None
    names = [task.label for task in tasks]
    if rivals:
        return f"Found tasks {names} beside {rivals[0]} in a job. Expected one of them. " + (
            "Write Task(..., loss=...)." if rivals[0] == "loss" else "Leave one out."
        )
    if len(set(names)) != len(names) or not set(names) <= set(labels):
        return (
            f"Found tasks {names} in a job whose data has the labels {[*labels]}. Expected each task once, and a label "
            "for each. Name them in labels of the data."
        )
    for metric in metrics:
        if getattr(metric, "task", None) not in names:
            return (
                f"Found metric {metric.name} of no task. Expected task=... with one of {names}. Write "
                f"{type(metric).__name__}(..., task={names[0]!r})."
            )
    return None
