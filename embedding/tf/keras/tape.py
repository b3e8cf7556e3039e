"""Gradients of losses written over `Variable`s, and `GradientTape`, which keeps such a loss for later.

JAX differentiates functions, so nothing here watches single operations. A loss is a callable that reads variables, and
its gradient comes from a run of it with tracers in their place. A tape therefore records callables, with the values
their variables had at that moment. The loss must be pure, since it may run twice. It must read variables itself, not
inside a function of its own under `jax.jit`, where JAX would have kept an earlier value as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from podembed.embedding.tf.keras.array_operators import plain
from podembed.embedding.tf.keras.variable import Variable, assignments_refused, bound, reads_recorded, variables_of
from podembed.embedding.tf.tracing import current_trace, require_own_trace


def gradients_of(loss: Callable[[], Any], variables: Sequence[Variable]) -> list[jax.Array | None]:
    """Returns the gradient of the sum of `loss()` for each variable, None where the loss does not depend on it.

    Depending means through differentiable operations: behind `stop_gradient` or a cast to integers there is no
    gradient. A gradient that merely happens to be zero is an array of zeros. Integer variables have none.

    Raises:
      RuntimeError: the loss assigns to a variable.
    """
    inexact = list({id(one): one for one in variables if jnp.issubdtype(one.dtype, jnp.inexact)}.values())

    def value_at(values: list[Any]) -> jax.Array:
        with bound(inexact, values), assignments_refused():
            return jnp.asarray(plain(loss()))

    value, pull_back = jax.vjp(value_at, [one.value for one in inexact])
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return [None] * len(variables)
    seed = jnp.ones_like(value)
    (found,) = pull_back(seed)
    reached = _outputs_depending_on_inputs(jax.make_jaxpr(pull_back)(seed))
    kept = (
        grad if is_reached or _is_constant_not_zero(grad) else None
        for grad, is_reached in zip(found, reached, strict=True)
    )
    by_id = dict(zip(map(id, inexact), kept, strict=True))
    return [by_id.get(id(one)) for one in variables]


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    loss: Callable[[], Any]
    result: jax.Array
    variables: tuple[Variable, ...]
    values: tuple[Any, ...]


class GradientTape:
    """Keeps losses and what they read, so that their gradients can be taken afterwards, any number of times.

    ```python
    with GradientTape() as tape:
        loss = tape.record(lambda: 3 * var1 * var1 + 2 * var2 * var2)
    grads = tape.gradient(loss, [var1, var2])
    ```
    Mutable: `record` and `watch` add to it. It differs from TensorFlow's tape in `record`, see the module's first
    lines.
    """

    def __init__(self) -> None:
        self._trace = current_trace()
        self._records: list[_Record] = []
        self._watched: list[Variable] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def watch(self, variables: Variable | Iterable[Variable]) -> None:
        """Asks for gradients of these even if they are not trainable.

        Raises:
          RuntimeError: as `record`.
          TypeError: something that is no variable.
        """
        self._require_own_trace("watch")
        self._watched.extend(variables_of(variables, where="watch"))

    def record(self, loss: Callable[[], Any]) -> jax.Array:
        """Runs `loss`, keeps it with the variables it read and their values, and returns its result as a new array.

        Raises:
          RuntimeError: called inside a function that JAX traces, on a tape from outside.
        """
        self._require_own_trace("record")
        read: dict[int, tuple[Variable, Any]] = {}

        def remember(variable: Variable) -> None:
            read.setdefault(id(variable), (variable, variable._value))

        with reads_recorded(remember):
            result = jnp.array(plain(loss()))
        variables, values = zip(*read.values(), strict=True) if read else ((), ())
        self._records.append(_Record(loss, result, variables, values))
        return result

    def _require_own_trace(self, method: str) -> None:
        remedy = "Use jax.value_and_grad of a function of arrays inside, or make the tape there."
        require_own_trace(self._trace, f"a call of {method} of a GradientTape", remedy)

    def gradient(self, target: Any, sources: Variable | Sequence[Variable]) -> Any:
        """Returns the gradient of a recorded result for one variable, or a list for several; None where there is no
        dependence.

        Variables count with the values they had when the loss was recorded. Not trainable ones must have been watched.

        Raises:
          ValueError: `target` is not a result of `record` of this tape.
          TypeError: something in `sources` is no variable.
        """
        record = next((one for one in reversed(self._records) if one.result is target), None)
        if record is None:
            raise ValueError(
                "Found a target this tape did not record. Expected a result of `tape.record(loss)`. Put the whole "
                "computation, up to the number to differentiate, into the callable given to `record`."
            )
        listed = variables_of(sources, where="gradient")
        wanted = [one for one in listed if one.trainable or any(one is watched for watched in self._watched)]
        with bound(record.variables, record.values):
            by_id = dict(zip(map(id, wanted), gradients_of(record.loss, wanted), strict=True))
        grads = [by_id.get(id(one)) for one in listed]
        return grads[0] if isinstance(sources, Variable) else grads


def _outputs_depending_on_inputs(closed: ClosedJaxpr) -> list[bool]:
    """For each output whether any input reaches it. JAX fills the gradient of an input without influence with a fresh
    zero.

    An operation with an inner program counts as one: each of its results depends on all its arguments. JAX has dropped
    unused arguments of inner programs by then.
    """
    reached = set(closed.jaxpr.invars)
    for equation in closed.jaxpr.eqns:
        if any(not isinstance(one, Literal) and one in reached for one in equation.invars):
            reached.update(equation.outvars)
    return [not isinstance(one, Literal) and one in reached for one in closed.jaxpr.outvars]


def _is_constant_not_zero(gradient: jax.Array) -> bool:
    # A hand-written backward rule may ignore the gradient that comes in; what it returns is a gradient all the same.
    return not isinstance(gradient, Tracer) and bool(np.any(np.asarray(gradient)))
