"""The forward pass of a job as a program of JAX that runs anywhere: with any number of samples, and without this
package.

It is not the program of training. Kernels of ours are replaced by plain JAX, so that scores may differ in the last
bits. `podembed predict` and exported models run this one, with the same number of samples, and agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from podembed.serving.predict.exported_program import FEWEST_SAMPLES, Program, padded_size
from podembed.serving.predict.model_inputs import batch_of, context_of
from podembed.serving.predict.pooled_rows import LookedUp
from podembed.serving.predict.trained_forward import SCORED_PARTS, check_dense
from podembed.workers.data.extra_columns import batch_shapes
from podembed.workers.device.dense_half import DenseStateError, initial, model_spec, outputs_of, scores_of
from podembed.workers.device.dense_leaves import by_key, numbers_of, replaced
from podembed.workers.job.job import JobConfig
from podembed.workers.model.portable import portable

PLATFORMS = ("cpu", "cuda", "tpu")
SCORE = "score"
SCORES = "scores"

Arrays = dict[str, Any]

# Of a size that is a symbol, such as the number of samples. Earlier versions of JAX have it in `jax.core`.
_NAME = "InconclusiveDimensionOperation"
_INCONCLUSIVE: type[Exception] = getattr(jax.errors, _NAME, None) or getattr(jax.core, _NAME)


def export_forward(job: JobConfig, *, step: int, wanted: Sequence[str] = ()) -> jax.export.Exported:
    """The program `(dense, inputs) -> outputs`, of dictionaries of arrays.

    `dense` has the leaves of parameters and state by their keys, as commits have them. `inputs` has `dense` `[n,
    num_dense]`, `activations/<feature>` and, of sequences, `lengths/<feature>`. Extra columns are `columns/<name>`, as
    batches of the job have them. `outputs` has `score` `[n]`. Of a model that returns a mapping it has all arrays of
    samples, with the names that the model gives them.

    Features and extra columns that no output depends on are not among the inputs. Such are those that only a loss
    reads.

    Args:
      step: step of the commit.
      wanted: names of outputs, which alone are computed; without any, all.

    Raises:
      DenseStateError: the model returns no scores, or no output of such a name, or depends on the number of samples.
    """
    params, state = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
    shapes = {"params": params, "state": state}
    spec, columns = model_spec(job), batch_shapes(job.data.extra_columns)

    def forward(dense: Arrays, inputs: Arrays) -> Arrays:
        num_samples = inputs["dense"].shape[0]
        values = replaced(shapes, dense, parts=SCORED_PARTS)
        activations = {
            name: inputs[f"activations/{name}"] if f"activations/{name}" in inputs else jnp.zeros((num_samples, *shape))
            for name, shape in spec.activation_shapes.items()
        }
        lengths = {
            name: inputs[f"lengths/{name}"] if f"lengths/{name}" in inputs else jnp.zeros(num_samples, jnp.int32)
            for name in job.sequences
        }
        batch = batch_of(
            job,
            dense=inputs["dense"],
            activations=activations,
            lengths=lengths,
            columns={
                name: inputs.get(f"columns/{name}", jnp.zeros((num_samples, *one.inner), one.dtype))
                for name, one in columns.items()
            },
        )
        context = context_of(job, batch, step=step, params=values["params"], state=values["state"])
        outputs, _ = outputs_of(job, values["params"], batch, context)
        if not (isinstance(outputs, Mapping) and isinstance(outputs.get("scores"), Mapping)):
            # Scores of several tasks are a mapping themselves.
            scores_of(job, outputs, num_samples)
        return _wanted(_named(outputs, num_samples), wanted)

    inputs = _input_shapes(job)
    leaves = {key: jax.eval_shape(numbers_of, leaf) for key, leaf in by_key(shapes).items()}
    with portable(), _without_places():
        try:
            read = _inputs_read(jax.make_jaxpr(forward)(leaves, inputs), inputs, job)
            return jax.export.export(jax.jit(forward), platforms=PLATFORMS)(leaves, read)
        except (TypeError, ValueError, NotImplementedError, _INCONCLUSIVE) as error:
            if isinstance(error, DenseStateError):
                raise
            text = str(error).split("\n", 1)[0]
            raise DenseStateError(
                f"Found a model that cannot be exported ({text}). Expected functions of JAX for any number of samples. "
                "Take sizes from shapes, and call no kernel of one platform alone."
            ) from error


@contextmanager
def _without_places() -> Iterator[None]:
    """Leaves the lines of the code that traced a program out of it. So equal models have equal bytes, whoever exports
    them, and no path of a machine leaves it.
    """
    name = "jax_traceback_in_locations_limit"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _input_shapes(job: JobConfig) -> Arrays:
    """All that a model may read of a batch, for any number of samples."""
    (n,) = jax.export.symbolic_shape("n")
    inputs: Arrays = {"dense": jax.ShapeDtypeStruct((n, job.data.num_dense), jnp.float32)}
    for name, shape in job.activation_shapes.items():
        inputs[f"activations/{name}"] = jax.ShapeDtypeStruct((n, *shape), jnp.float32)
        if name in job.sequences:
            inputs[f"lengths/{name}"] = jax.ShapeDtypeStruct((n,), jnp.int32)
    for name, column in batch_shapes(job.data.extra_columns).items():
        inputs[f"columns/{name}"] = jax.ShapeDtypeStruct((n, *column.inner), column.dtype)
    return inputs


def _inputs_read(program: Any, inputs: Arrays, job: JobConfig) -> Arrays:
    """The inputs without those of features and extra columns that no output depends on."""
    needed = {one for one in program.jaxpr.outvars if not isinstance(one, Literal)}
    for step in reversed(program.jaxpr.eqns):
        if needed.intersection(step.outvars):
            needed.update(one for one in step.invars if not isinstance(one, Literal))
    # JAX flattens dictionaries by rising names.
    variables = program.jaxpr.invars[-len(inputs) :]
    read = {name for name, one in zip(sorted(inputs), variables, strict=True) if one in needed}
    together = [{f"activations/{name}", f"lengths/{name}"} for name in job.features]
    together += [{f"columns/{name}" for name in batch_shapes([one])} for one in job.data.extra_columns]
    unread = set().union(*(both for both in together if not both & read))
    return {name: shape for name, shape in inputs.items() if name not in unread}


def read_features(exported: jax.export.Exported) -> tuple[str, ...]:
    """The features among the inputs of a program, by rising names."""
    return _inputs_of(exported, "activations/")


def read_by_scores(job: JobConfig, *, step: int) -> tuple[frozenset[str], frozenset[str]]:
    """The features and the extra columns that the scores of a job depend on; all where its model cannot be exported.

    Args:
      step: step of the commit.
    """
    try:
        exported = export_forward(job, step=step)
        if SCORES in output_shapes(exported):
            exported = export_forward(job, step=step, wanted=(SCORES,))
    except DenseStateError:
        return frozenset(job.features), frozenset(batch_shapes(job.data.extra_columns))
    return frozenset(read_features(exported)), frozenset(read_columns(exported))


def read_columns(exported: jax.export.Exported) -> tuple[str, ...]:
    """The extra columns among the inputs of a program, and the lengths of their lists."""
    return _inputs_of(exported, "columns/")


def _inputs_of(exported: jax.export.Exported, beginning: str) -> tuple[str, ...]:
    (_, inputs), _ = jax.tree_util.tree_unflatten(exported.in_tree, exported.in_avals)
    return tuple(name.removeprefix(beginning) for name in inputs if name.startswith(beginning))


def _named(outputs: Any, num_samples: Any) -> Arrays:
    """Those outputs that belong to samples, by their names."""
    if not isinstance(outputs, Mapping):
        return {SCORE: outputs}
    leaves = jax.tree_util.tree_leaves_with_path(dict(outputs))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if jnp.ndim(leaf) and leaf.shape[0] == num_samples}


def _wanted(outputs: Arrays, names: Sequence[str]) -> Arrays:
    missing = [name for name in names if name not in outputs]
    if missing:
        raise DenseStateError(
            f"Found no output {missing[0]!r} of the model. Expected one of {sorted(outputs)}. Name one of these, or "
            "let apply return a mapping that has it."
        )
    return {name: outputs[name] for name in names} if names else outputs


def output_shapes(exported: jax.export.Exported) -> dict[str, tuple[int, ...]]:
    """By output, its shape behind the axis of the samples."""
    return {name: tuple(int(axis) for axis in aval.shape[1:]) for name, aval in _avals(exported).items()}


def _avals(exported: jax.export.Exported) -> dict[str, Any]:
    return jax.tree_util.tree_unflatten(exported.out_tree, exported.out_avals)


class PortableForward:
    """The program with the dense arrays of a commit, compiled once for each number of samples.

    Attributes:
      features: features that are looked up for it.
      columns: the extra columns that it reads, and the lengths of their lists.
    """

    def __init__(
        self, job: JobConfig, dense: Mapping[str, np.ndarray], *, step: int, wanted: Sequence[str] = ()
    ) -> None:
        """Args:
        wanted: as for `export_forward`.

        Raises:
          DenseStateError: as `export_forward`, or the arrays are not those of the job.
        """
        check_dense(job, dense)
        self.exported = export_forward(job, step=step, wanted=wanted)
        self.features = frozenset(read_features(self.exported))
        self.columns = frozenset(read_columns(self.exported))
        self._dense = {key: jnp.asarray(values) for key, values in dense.items()}
        self._program = Program(self.exported)
        self._most_samples = padded_size(job.batch_size)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By output, its shape behind the axis of the samples."""
        return output_shapes(self.exported)

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """By output, the type of its numbers."""
        return {name: np.dtype(aval.dtype) for name, aval in _avals(self.exported).items()}

    def outputs(self, found: LookedUp, names: tuple[str, ...], num_samples: int) -> dict[str, np.ndarray]:
        """By name `[num_samples, ...]`, for the first samples of a batch.

        Args:
          names: names of the features, in the job's order.
        """
        arrays: Arrays = {"dense": found.batch.dense}
        for name, block in zip(names, found.activations, strict=True):
            if name in self.features:
                arrays[f"activations/{name}"] = block
        for name, lengths in found.lengths.items():
            if name in self.features:
                arrays[f"lengths/{name}"] = lengths.astype(np.int32)
        arrays |= {f"columns/{name}": values for name, values in found.batch.columns.items() if name in self.columns}
        most = FEWEST_SAMPLES
        if num_samples > most:
            most = self._program.most_samples(self._dense, self._most_samples)
        parts = []
        for start in range(0, num_samples, most):
            count = min(most, num_samples - start)
            size = padded_size(count)
            cut = {name: _of_size(values[start : start + count], size) for name, values in arrays.items()}
            parts.append({name: values[:count] for name, values in self._program(self._dense, cut).items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_size(values: np.ndarray, size: int) -> np.ndarray:
    """The first `size` samples, zeros where there are fewer."""
    missing = size - len(values)
    return (
        values[:size]
        if missing <= 0
        else np.concatenate([values, np.zeros_like(values, shape=(missing, *values.shape[1:]))])
    )
