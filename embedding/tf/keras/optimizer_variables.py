"""`OptimizerVariables`: what a Keras-style optimizer remembers between steps, and how it is read and set.

The step count, the rate and the variables that a subclass makes. What is done with them in a step is in `optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from podembed.embedding.initializers import initializer_style, table_seed
from podembed.embedding.row_optimizers.base import check_number, is_number, needs_step
from podembed.embedding.tf.keras import functional as keras_functional
from podembed.embedding.tf.keras.module_members import ModuleMembers
from podembed.embedding.tf.keras.schedules import FunctionSchedule, LearningRateSchedule
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.tracing import current_trace, require_own_trace

_FUNCTIONAL = (
    "Inside use the pure form: `transformation = optimizer.as_optax()`, then `transformation.update(gradients, state, "
    "parameters)`."
)


class OptimizerVariables(ModuleMembers):
    """The variables of one optimizer, not the model's. Mutable by every step, outside of functions that JAX traces.

    Args:
      name: prefix of the names of the variables made during `apply_gradients`.
    """

    _learning_rate: Any = None  # a Variable or a schedule; a subclass may keep a plain number

    def __init__(self, name: str) -> None:
        self._name = name
        self._trace = current_trace()
        # Its variables are listed in the order in which these attributes are set: see `functional.own_variables`.
        self._iterations = Variable(0, trainable=False, name="iteration", dtype=np.int64)
        self._built = False
        self._scope = ""
        self._index_dict: dict[int, int] = {}
        self._model_variables: dict[int, Variable] = {}
        self._averages: dict[int, Variable] = {}
        self._created: list[Variable] = []
        self._before_build: dict[str, Any] | None = None

    def _require_own_trace(self, method: str) -> None:
        require_own_trace(self._trace, f"a call of {method} of optimizer '{self._name}'", _FUNCTIONAL)

    @property
    def name(self) -> str:
        """As given to the constructor."""
        return self._name

    @property
    def iterations(self) -> Variable:
        """Steps applied so far, int64. A new value may be set before the first build only.

        Raises:
          RuntimeError: on setting after the first build, or inside a function that JAX traces.
        """
        return self._iterations

    @iterations.setter
    def iterations(self, value: Variable | int) -> None:
        self._require_own_trace("iterations = ...")
        if self._built:
            raise RuntimeError(
                f"Found a new `iterations` ({value}) for an optimizer that is built. Expected it before the first "
                "apply_gradients. Set it right after construction, or change its value with `iterations.assign`."
            )
        self._iterations = (
            value if isinstance(value, Variable) else Variable(value, trainable=False, name="iteration", dtype=np.int64)
        )

    @property
    def learning_rate(self) -> Any:
        """The rate, a float32 variable. With a schedule it holds the rate of the last step, before the first one that
        of step 0.

        Raises:
          ValueError: no rate was ever given, or the one to set is a schedule.
          TypeError: on setting when the rate is a schedule.
        """
        rate = self._required_rate()
        return self._current_learning_rate if isinstance(rate, LearningRateSchedule) else rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        rate = self._required_rate()
        if isinstance(rate, LearningRateSchedule):
            raise TypeError(
                f"Found a rate to set on optimizer '{self._name}', whose rate follows {type(rate).__name__}. "
                "Expected a fixed rate. Construct the optimizer with a number to be able to set it."
            )
        if isinstance(value, LearningRateSchedule):
            raise ValueError(
                f"Found {type(value).__name__} to set as the rate of optimizer '{self._name}'. Expected a number. "
                "Pass a schedule to the constructor."
            )
        _check_rate(value)
        if isinstance(rate, Variable):
            rate.assign(value)
        else:
            self._require_own_trace("learning_rate = ...")
            self._learning_rate = value

    def _required_rate(self) -> Any:
        if self._learning_rate is None:
            raise ValueError(
                f"Found no learning rate in optimizer '{self._name}'. Expected one from the constructor. "
                "Set `self._learning_rate = self._build_learning_rate(learning_rate)` in the subclass."
            )
        return self._learning_rate

    @property
    def lr(self) -> Any:
        """The same as `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def variables(self) -> list[Variable]:  # pyright: ignore[reportIncompatibleMethodOverride]  # as in 2.9
        """All variables of the optimizer: iterations, rate, averages, slots. Not the model's, and none is trainable."""
        return keras_functional.own_variables(self)

    def _build_learning_rate(self, learning_rate: Any) -> Variable | LearningRateSchedule:
        """Returns what to keep as `self._learning_rate`: a schedule as it is, a function of the step, as those of
        optax, as a schedule, and a number or what a callable without arguments returns as a variable.
        """
        if callable(learning_rate) and not isinstance(learning_rate, LearningRateSchedule | Variable):
            learning_rate = FunctionSchedule(learning_rate) if needs_step(learning_rate) else learning_rate
        if isinstance(learning_rate, LearningRateSchedule):
            self._current_learning_rate = Variable(
                learning_rate(self.iterations), trainable=False, name="learning_rate", dtype=np.float32
            )
            return learning_rate
        if isinstance(learning_rate, str | bytes):
            raise TypeError(
                f"Found learning_rate={learning_rate!r}. Expected a number, a schedule or a callable without "
                "arguments. Pass float(...)."
            )
        _check_rate(learning_rate)
        return Variable(learning_rate, trainable=False, name="learning_rate", dtype=np.float32)

    def add_variable(
        self, shape: Any, dtype: Any = None, initializer: str | Callable[..., Any] = "zeros", name: str | None = None
    ) -> Variable:
        """Makes a variable that belongs to no model variable.

        Args:
          shape: None for a scalar.
          dtype: None for float32.
          initializer: initializer of `initial_value_of`. Random ones begin from `name`, the same in every
            process.
          name: prefixed with the optimizer's name when called during `apply_gradients`.

        Raises:
          ValueError: an initializer of another name, or one that makes another shape.
        """
        self._require_own_trace("add_variable")
        own_shape = () if shape is None else tuple(np.atleast_1d(shape).tolist())
        name = f"{self._scope}{name or 'Variable'}"
        value = initial_value_of(initializer, own_shape, np.dtype(dtype or np.float32), name)
        return self._tracked(Variable(value, trainable=False, name=name, dtype=dtype, shape=own_shape))

    def add_variable_from_reference(
        self,
        model_variable: Variable,
        variable_name: str,
        shape: Any = None,
        initial_value: Any = None,
        initializer: str | Callable[..., Any] = "zeros",
    ) -> Variable:
        """Makes a slot of a model variable: its dtype, its shape unless given, not trainable. It begins with
        `initial_value`, else with what the initializer makes.

        It is called "<variable_name>/<model variable's name>", during `apply_gradients` "<optimizer name>/" before it.

        Args:
          initializer: initializer of `add_variable`.

        Raises:
          ValueError: as `add_variable`.
        """
        self._require_own_trace("add_variable_from_reference")
        name = f"{self._scope}{variable_name}/{model_variable.name}"
        if initial_value is None:
            own_shape = model_variable.shape if shape is None else tuple(shape)
            initial_value = initial_value_of(initializer, own_shape, model_variable.dtype, name)
        return self._tracked(Variable(initial_value, trainable=False, name=name, dtype=model_variable.dtype))

    def _held_variables(self) -> tuple[Variable, ...]:
        return tuple(self.variables)

    def _tracked(self, variable: Variable) -> Variable:
        self._created.append(variable)
        return variable

    def _var_key(self, variable: Variable) -> int:
        # Known variables are kept alive in _model_variables, so an id is never given to another one.
        return id(variable)

    @contextmanager
    def _named_scope(self) -> Iterator[None]:
        self._scope = f"{self._name or 'optimizer'}/"
        try:
            yield
        finally:
            self._scope = ""


def _check_rate(rate: Any) -> None:
    """Refuses what is no number of at least 0. Arrays that are traced, variables and callables have none yet."""
    if not callable(rate) and not isinstance(rate, Variable) and is_number(rate):
        check_number("learning_rate", rate, least=0.0)


_jax = jax.nn.initializers
_NAMED: dict[str, Callable[..., Any]] = {
    "random_normal": _jax.normal(0.05),
    "random_uniform": lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -0.05, 0.05),
    "truncated_normal": lambda key, shape, dtype: 0.05 * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype),
    "glorot_normal": _jax.glorot_normal(),
    "glorot_uniform": _jax.glorot_uniform(),
    "he_normal": _jax.he_normal(),
    "he_uniform": _jax.he_uniform(),
    "lecun_normal": _jax.lecun_normal(),
    "lecun_uniform": _jax.lecun_uniform(),
    "orthogonal": _jax.orthogonal(),
    # numpy's, since JAX's would warn about counters of 64 bits.
    "zeros": lambda key, shape, dtype: np.zeros(shape, dtype),
    "ones": lambda key, shape, dtype: np.ones(shape, dtype),
}
# The names of Keras' classes stand for the same.
_BY_NAME = _NAMED | {name.title().replace("_", ""): function for name, function in _NAMED.items()}


def initial_value_of(initializer: str | Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype, name: str) -> Any:
    """The first value of a variable.

    Args:
      initializer: a name of Keras such as "glorot_uniform" or "GlorotUniform", one of `embedding.initializers`, or a
        function of (key, shape, dtype) as JAX's, or of (shape, dtype) as Keras'.
      name: name of the variable, which decides random values.

    Raises:
      ValueError: an unknown name, or parameters of no such function.
    """
    if isinstance(initializer, str):
        if initializer not in _BY_NAME:
            raise ValueError(
                f"Found initializer '{initializer}'. Expected one of {sorted(_NAMED)}. Pass one of them or a function "
                "of (shape, dtype)."
            )
        return _BY_NAME[initializer](_key(name), shape, dtype)
    style = initializer_style(initializer, f"the variable '{name}'")
    if style == "key":
        return initializer(_key(name), shape, dtype)
    if style == "rows":
        # Of tables: rows and columns; a variable of another rank has its last axis as columns.
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        values = initializer(np.arange(num_rows), shape[-1] if shape else 1, table_seed(0, name))
        return np.asarray(values).reshape(shape).astype(dtype)
    return initializer(shape, dtype)


def _key(name: str) -> jax.Array:
    return jax.random.key(table_seed(0, name) & 0x7FFFFFFF)
