"""`DenseHalf`: the model and the loss of a job under one interface, whichever form the model has.

What a model returns is checked while it is traced, so before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podembed.workers.job.candidates import chance_columns
from podembed.workers.job.job import JobConfig
from podembed.workers.job.job_errors import JobError
from podembed.workers.model.batch import Losses, ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec, has_short_form
from podembed.workers.model.losses import pointwise


class DenseStateError(JobError):
    """A model, a loss or dense arrays that do not fit the job."""


class OtherPrecision(DenseStateError):
    """Dense arrays of 64 bits where JAX has 32, or the other way round. The job may be the same."""


def sigmoid_binary_cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Per-sample binary cross entropy of logits `[n]`; stable for large scores of either sign."""
    return optax.sigmoid_binary_cross_entropy(scores, labels)


def model_spec(job: JobConfig) -> ModelSpec:
    """What the model of a job gets to know."""
    return ModelSpec(
        num_dense=job.data.num_dense,
        activation_shapes=job.activation_shapes,
        batch_size=job.batch_size,
        label=job.data.label,
        labels=tuple(label.name for label in job.data.label_columns),
        sequences={one.name: one.max_length for one in job.data.list_columns.values()} | job.sequences,
        columns={column.name: column.shape for column in job.data.extra_columns},
        negatives={
            name: source.negatives.count
            for name, source in job.data.id_columns.items()
            if source.negatives is not None and source.negatives.only
        },
        **{kind: tuple(by_feature) for kind, by_feature in chance_columns(job.data.id_columns).items()},
    )


def initial(job: JobConfig, key: jax.Array) -> tuple[Any, Any]:
    """Parameters and state; the state of a model without any is an empty dict.

    Raises:
      DenseStateError: something among them is no array of numbers, or a parameter has no gradient.
    """
    made: Any
    if has_short_form(job.model):
        made = job.model.init(key, job.data.num_dense, job.widths)  # type: ignore[call-arg]
    else:
        made = job.model.init(key, model_spec(job))  # type: ignore[call-arg]
    params, state = (made.value, made.state) if isinstance(made, WithState) else (made, {})
    _require_numbers("model.init", "parameter", params)
    _require_numbers("model.init", "state", state)
    wrong = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if wrong:
        raise DenseStateError(
            f"Found the parameter {wrong[0][0]} of type {jnp.result_type(wrong[0][1])}. Expected floating point, since "
            "parameters are trained. Return what is not trained as state: WithState(params, state)."
        )
    return params, state


def outputs_of(job: JobConfig, params: Any, batch: ModelBatch, context: StepContext) -> tuple[Any, Any]:
    """What the model returns for a batch, and its state after it. Both are float32, whatever the model computes with.

    Raises:
      DenseStateError: the model returns None, or the state has other arrays than before.
    """
    is_narrow = job.compute_dtype != "float32"
    if is_narrow:
        params, batch = cast(params, job.compute_dtype), cast_batch(batch, job.compute_dtype)
    outputs, state = _applied(job, params, batch, context)
    if outputs is None:
        raise DenseStateError(
            "Found model.apply returning None. Expected the scores of the batch, or a mapping with `scores`. Its last "
            "line, or one of its branches, may lack a `return`."
        )
    return (widened(outputs) if is_narrow else outputs), state


def _applied(job: JobConfig, params: Any, batch: ModelBatch, context: StepContext) -> tuple[Any, Any]:
    if has_short_form(job.model):
        return job.model.apply(params, batch.dense, batch.activations), context.state  # type: ignore[call-arg]
    made: Any = job.model.apply(params, batch, context)  # type: ignore[call-arg]
    has_state = bool(jax.tree.leaves(context.state))
    if not isinstance(made, WithState):
        if has_state and context.training and made is not None:
            raise DenseStateError(
                f"Found model.apply returning {_kind_of(made)}, of a model that has state. Expected "
                "WithState(outputs, state). Return context.state where nothing changed."
            )
        return made, context.state
    _require_numbers("model.apply", "state", made.state)
    kept = made.state if job.compute_dtype == "float32" else with_types_of(made.state, context.state)
    before, after = _shapes(context.state), _shapes(kept)
    if before != after:
        raise DenseStateError(
            f"Found model.apply returning the state {after}. Expected {before}, as model.init made it. Keep names, "
            "shapes and types."
        )
    # As `init` made it, where a list came back as a tuple, or an array as a number.
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(kept)]
    return made.value, jax.tree.unflatten(jax.tree.structure(context.state), leaves)


def scores_of(job: JobConfig, outputs: Any, num_samples: int) -> jax.Array:
    """The scores among what a model returns: `[n]`, or `[n, c]` of a job with candidates, or those of all tasks side by
    side.

    Raises:
      DenseStateError: there are none, or not one a sample or candidate.
    """
    if job.tasks:
        return jnp.concatenate([one.reshape(num_samples, -1) for one in task_scores(job, outputs, num_samples)], axis=1)
    scores = outputs
    if isinstance(outputs, Mapping):
        if "scores" not in outputs:
            raise DenseStateError(
                f"Found model.apply returning {sorted(outputs)}. Expected `scores` among them, one number a sample, by "
                "which evaluations judge. Add it."
            )
        scores = outputs["scores"]
    if job.candidates is None:
        return require_column("model.apply", scores, num_samples)
    inner = job.activation_shapes[job.candidates][:-1]
    if getattr(scores, "shape", None) not in ((num_samples, *inner), (num_samples, job.num_candidates)):
        raise DenseStateError(
            f"Found model.apply returning {_kind_of(scores)} for {num_samples} samples of {job.num_candidates} "
            f"candidates {job.candidates!r}. Expected {[num_samples, *inner]}, one score a candidate. "
            f"Its vectors are batch.activations[{job.candidates!r}], {[num_samples, *inner, 'width']}."
        )
    return scores.reshape(num_samples, job.num_candidates)


def losses_of(job: JobConfig, outputs: Any, batch: ModelBatch, context: StepContext) -> Losses:
    """The losses of a batch.

    Raises:
      DenseStateError: the loss has another shape than one number, or one a sample.
    """
    num_samples = batch.weights.shape[0]
    own = getattr(job.model, "loss", None)
    if own is None and job.tasks:
        return Losses(per_sample=_loss_of_tasks(job, outputs, batch))
    if own is None:
        return Losses(per_sample=_loss_of_label(job, outputs, batch))
    found: Any = own(outputs, batch, context)
    if found is None or isinstance(found, (tuple, Mapping)):
        raise DenseStateError(
            f"Found model.loss returning {_kind_of(found)}. Expected one number a sample, or one number, or "
            "podembed.Losses with both. Return one of these."
        )
    if not isinstance(found, Losses):
        _require_number("model.loss", found)
        found = Losses(batch=found) if jnp.shape(found) == () else Losses(per_sample=found)
    for name, part in (("per_sample", found.per_sample), ("batch", found.batch)):
        _require_number(f"model.loss, as {name} of Losses,", part)
    if jnp.shape(found.per_sample) not in ((), (num_samples,)) or jnp.shape(found.batch) != ():
        raise DenseStateError(
            f"Found model.loss returning the shape {list(jnp.shape(found.per_sample))} for samples and "
            f"{list(jnp.shape(found.batch))} for the batch, of {num_samples} samples. Expected [{num_samples}] and []. "
            "Return one number a sample, or one number, or podembed.Losses with both."
        )
    for part in (found.per_sample, found.batch):
        _require_floating("model.loss", part)
    return found


def scheduled(schedule: Callable[[Any], Any], step: jax.Array) -> jax.Array:
    """The factor of all learning rates in a step, as hosts have it of their tables.

    Raises:
      DenseStateError: the schedule is no function of JAX, or returns something else than one number.
    """
    try:
        # Schedules subtract steps, so the type has a sign.
        factor: Any = schedule(step.astype(jnp.int32))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise DenseStateError(
            "Found a schedule that asks for the value of a step while it is traced. Expected a function of JAX, since "
            "it is part of the compiled step. Choose between numbers with jnp.where, or take one of optax's schedules."
        ) from error
    if jnp.shape(factor) != ():
        raise DenseStateError(
            f"Found a schedule returning {_kind_of(factor)}. Expected one number. Return a factor of "
            "the learning rates."
        )
    return jnp.asarray(factor, jnp.float32)


def task_scores(job: JobConfig, outputs: Any, num_samples: int) -> list[jax.Array]:
    """The scores of each task among what a model returns, `[n, *inner]`.

    Raises:
      DenseStateError: those of a task are missing, or have another shape.
    """
    by_task = outputs["scores"] if isinstance(outputs, Mapping) and "scores" in outputs else outputs
    names = [task.label for task in job.tasks]
    if not isinstance(by_task, Mapping) or not set(names) <= set(by_task):
        found = sorted(by_task) if isinstance(by_task, Mapping) else _kind_of(by_task)
        raise DenseStateError(
            f"Found model.apply returning {found} for {num_samples} samples. Expected a mapping of the tasks {names} "
            "to their scores. Return {'" + names[0] + "': ...}, or the same as `scores` of a mapping."
        )
    for task in job.tasks:
        shape = getattr(by_task[task.label], "shape", None)
        if shape != (num_samples, *task.inner):
            has_axis_more = not task.inner and shape == (num_samples, 1)
            raise DenseStateError(
                f"Found model.apply returning {_kind_of(by_task[task.label])} for task {task.label!r} of kind "
                f"{task.kind!r}. Expected {[num_samples, *task.inner]}. "
                + ("Drop the last axis with [:, 0]." if has_axis_more else "Return as many scores a sample.")
            )
    return [by_task[name] for name in names]


def _loss_of_label(job: JobConfig, outputs: Any, batch: ModelBatch) -> jax.Array:
    """`[n]`, by the loss of scores and the one label; 0 for samples that do not have it."""
    num_samples, per_sample = batch.weights.shape[0], job.loss or sigmoid_binary_cross_entropy
    scores = _require_floating("model.apply", scores_of(job, outputs, num_samples))
    has_label = batch.label_masks[job.data.label] if job.leaves_out_unlabelled else None
    if has_label is not None:
        scores = _only(has_label, scores)
    if job.candidates is not None:
        # Without a label, what a sample has is what it should have.
        label = batch.label if batch.labels else (batch.weights > 0).astype(scores.dtype)
        losses: Any = pointwise(scores, label, loss=per_sample)
    else:
        found: Any = per_sample(scores, batch.label)
        losses = _require_floating("loss", require_column("loss", found, num_samples))
    return losses if has_label is None else _only(has_label, losses)


def _only(counts: jax.Array, values: jax.Array) -> jax.Array:
    """`values` `[n, ...]` of the samples that count; 0 for the others.

    Both what goes into a loss and what comes out of it: a sample without a label is given one of 0. A loss may be no
    number there, nor may its gradient, and 0 times that is no number either.
    """
    return jnp.where(counts.reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0)


def _loss_of_tasks(job: JobConfig, outputs: Any, batch: ModelBatch) -> jax.Array:
    """`[n]`, the weighted sum over the tasks whose label a sample has."""
    num_samples = batch.weights.shape[0]
    total = jnp.zeros(num_samples)
    for task, scores in zip(job.tasks, task_scores(job, outputs, num_samples), strict=True):
        _require_floating(f"model.apply, for task {task.label!r},", scores)
        has_label = batch.label_masks[task.label]
        losses = task.losses(_only(has_label, scores), batch.labels[task.label], jnp)
        require_column(f"the loss of task {task.label!r}", losses, num_samples)
        total += task.weight * _only(has_label, losses)
    return total


def require_column(what: str, found: Any, num_samples: int) -> Any:
    """`found`, if it is one number a sample.

    Raises:
      DenseStateError: it is not.
    """
    shape = getattr(found, "shape", None)
    if shape == (num_samples,):
        return found
    remedy = "Return one number a sample."
    if shape == (num_samples, 1):
        remedy = "Drop the last axis with [:, 0]."
    elif shape == ():
        remedy = "Leave out the mean or the sum over the samples."
    raise DenseStateError(
        f"Found {what} returning {_kind_of(found)} for {num_samples} samples. "
        f"Expected [{num_samples}], one number a sample. {remedy}"
    )


def _require_numbers(where: str, kind: str, tree: Any) -> None:
    """Raises `DenseStateError` for a leaf of what a model returns that JAX cannot compute with, by its key."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_number(leaf):
            raise DenseStateError(
                f"Found {_kind_of(leaf)} as the {kind} {jax.tree_util.keystr(path)} that {where} returned. Expected "
                "arrays of numbers. Keep functions, text and the like in the model itself."
            )


def _require_number(what: str, found: Any) -> None:
    """Raises `DenseStateError` for something that is no number and no array of numbers."""
    if not _is_number(found):
        raise DenseStateError(
            f"Found {what} returning {_kind_of(found)}. Expected an array of numbers. Return one made by jax.numpy."
        )


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, bool | int | float | complex)
    kinds = jnp.number, jnp.bool_, jax.dtypes.extended
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _require_floating(what: str, found: Any) -> Any:
    """`found`, if it can have a gradient. A number of Python is a constant, which needs none.

    Raises:
      DenseStateError: it is an array of integers or truth values.
    """
    dtype = getattr(found, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return found
    raise DenseStateError(
        f"Found {what} returning numbers of type {dtype}. Expected floating point, since their gradient trains the "
        "model. Leave out what rounds or compares them, or return .astype(jnp.float32)."
    )


def _kind_of(value: Any) -> str:
    """An array by its shape, since its class is one of JAX's inside while it is traced; all else by its class."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"the text {value!r:.60}" if isinstance(value, str) else type(value).__name__
    return f"shape {list(shape)}" if _is_number(value) else f"an array of {value.dtype}"


def _shapes(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in leaves
    }


# Mixed precision. Parameters, optimizer state and the model's own state stay float32. The step casts what the model is
# given, and casts what it returns back. Gradients pass the same casts, so that they are float32 where they arrive.
# Source: Micikevicius et al., Mixed precision training, 2018. bfloat16 has the exponents of float32, so no loss needs
# to be scaled.


def cast(tree: Any, dtype: str) -> Any:
    """Float32 arrays as another type; all other leaves as they are."""

    def one(leaf: Any) -> Any:
        is_wide = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
        return leaf.astype(dtype) if is_wide else leaf

    return jax.tree.map(one, tree)


def cast_batch(batch: ModelBatch, dtype: str) -> ModelBatch:
    """Dense numbers, activations and extra columns as another type. Labels and weights are for the loss."""
    return replace(
        batch,
        dense=cast(batch.dense, dtype),
        activations=cast(batch.activations, dtype),
        sequences=cast(batch.sequences, dtype),
        columns=cast(batch.columns, dtype),
    )


def widened(tree: Any) -> Any:
    """Floating-point arrays of 16 bits as float32; all other leaves as they are."""

    def one(leaf: Any) -> Any:
        is_narrow = isinstance(leaf, jax.Array) and leaf.dtype in (jnp.bfloat16, jnp.float16)
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(one, tree)


def with_types_of(tree: Any, before: Any) -> Any:
    """Floating-point arrays in the types that they had before; as they are if there are more or fewer of them."""

    def one(leaf: Any, dtype: Any) -> Any:
        are_floating = all(jnp.issubdtype(kind, jnp.floating) for kind in (jnp.result_type(leaf), dtype))
        return leaf.astype(dtype) if are_floating and isinstance(leaf, jax.Array) else leaf

    leaves, structure = jax.tree.flatten(tree)
    types = [jnp.result_type(leaf) for leaf in jax.tree.leaves(before)]
    if len(leaves) != len(types):
        return tree
    return jax.tree.unflatten(structure, [one(leaf, dtype) for leaf, dtype in zip(leaves, types, strict=True)])
