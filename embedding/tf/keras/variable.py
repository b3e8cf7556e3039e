"""`Variable`, a named mutable holder of an array.

JAX values never change; the Keras way of training is written around values that do. A `Variable` is the one place where
that mutation happens: it holds an immutable array and swaps it. This module also owns what a variable may be for the
length of a block: binding it to tracers, recording its reads, refusing assignments. It knows neither optimizers nor
gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from podembed.embedding.tf.keras.array_operators import ArrayOperators, plain
from podembed.embedding.tf.tracing import current_trace, require_own_trace

# Set while a loss is being differentiated: the reader gets every variable that is read, and assignments are refused.
_on_read: ContextVar[Callable[[Variable], None] | None] = ContextVar("_on_read", default=None)
_is_frozen: ContextVar[bool] = ContextVar("_is_frozen", default=False)
_RETURN_IT = (
    "Return the new value from the function and assign it outside; for a step of an optimizer use optimizer.as_optax() "
    "inside."
)


class Variable(ArrayOperators):
    """A named array whose value can be replaced. Mutable: `assign` and its relatives change `value`, nothing else does.

    Arithmetic and comparison work as on arrays (`3 * variable * variable`) and give arrays. Functions of `jax.numpy`
    take `variable.value`: JAX refuses foreign objects. The hash is that of the object, so variables can be keys.

    A variable changes only in the trace in which it was made, which for most is none: see `assign`.

    JAX holds dtypes of 64 bits only under `jax_enable_x64`. Integers of 64 bits are otherwise kept as a numpy array, so
    that counters do not wrap at 2**31.
    """

    def __init__(
        self, initial_value: Any, trainable: bool = True, name: str | None = None, dtype: Any = None, shape: Any = None
    ) -> None:
        """Holds a copy of `initial_value`, or of what it returns if it is callable without arguments.

        Without `dtype`, Python and float64 numbers become float32 as everywhere in JAX.

        Raises:
          ValueError: `initial_value` is None, has another shape than `shape`, or `dtype` needs `jax_enable_x64`.
        """
        if callable(initial_value) and not isinstance(initial_value, ArrayOperators):
            initial_value = initial_value()
        if initial_value is None:
            raise ValueError(
                "Found no initial value. Expected an array or a number. Pass the value the variable starts with."
            )
        self._name = "Variable" if name is None else str(name)
        self._trainable = bool(trainable)
        self._trace = current_trace()
        self._value = _as_held(plain(initial_value), dtype)
        if shape is not None and tuple(shape) != self.shape:
            raise ValueError(
                f"Found an initial value of shape {self.shape} for variable '{self._name}'. Expected {tuple(shape)}. "
                "Drop `shape` or reshape the value."
            )

    @property
    def value(self) -> Any:
        """The present array."""
        on_read = _on_read.get()
        if on_read is not None:
            on_read(self)
        return self._value

    @property
    def name(self) -> str:
        return self._name

    @property
    def trainable(self) -> bool:
        return self._trainable

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._value.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def numpy(self) -> Any:
        """The value as numpy, a numpy scalar if it has no dimensions."""
        return np.asarray(self.value)[()]

    def assign(self, value: Any) -> Variable:
        """Replaces the value and returns the variable. The dtype stays.

        Raises:
          ValueError: `value` has another shape.
          TypeError: `value` is not of a kind that fits, such as a float for an integer variable.
          RuntimeError: called while a gradient is being taken, or inside a function that JAX traces and that did not
            make the variable.
        """
        if _is_frozen.get():
            raise RuntimeError(
                f"Found an assignment to variable '{self._name}' inside a loss that is being differentiated. Expected "
                "a loss that only reads variables. Assign before or after computing the gradients."
            )
        require_own_trace(self._trace, f"an assignment to variable '{self._name}'", _RETURN_IT)
        array = plain(value)
        if (
            isinstance(array, jax.Array)
            and array.shape == self._value.shape
            and array.dtype == self._value.dtype
            and not array.weak_type
        ):
            self._value = array
            return self
        if np.shape(array) != self.shape:
            raise ValueError(
                f"Found a value of shape {np.shape(array)} for variable '{self._name}'. Expected shape {self.shape}. "
                "Reshape the value."
            )
        self._value = _cast_like(array, self.dtype, self._name)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Adds `delta` and returns the variable."""
        return self.assign(self.value + plain(delta))

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts `delta` and returns the variable."""
        return self.assign(self.value - plain(delta))

    def clone(self) -> Variable:
        """A second variable with the same name, dtype and present value."""
        twin = Variable.__new__(Variable)
        twin._name, twin._trainable, twin._value = self._name, self._trainable, self._value
        twin._trace = current_trace()
        return twin

    def _operand(self) -> Any:
        return self.value

    def __eq__(self, other: object) -> Any:
        return False if other is None else self._operand() == plain(other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else self._operand() != plain(other)

    def __hash__(self) -> int:
        return id(self)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value.item())

    def __bool__(self) -> bool:
        return bool(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __repr__(self) -> str:
        return f"<Variable '{self._name}' shape={self.shape} dtype={self.dtype} value={self._value}>"


def variables_of(given: Variable | Iterable[Variable], *, where: str, remedy: str = "") -> list[Variable]:
    """The variables of an argument that takes several, in their order. One that stands alone is one of them.

    Args:
      where: the method, for the message.
      remedy: what to do with something else, as a sentence.

    Raises:
      TypeError: there is something else.
    """
    if isinstance(given, Variable):
        return [given]
    found: list[Any] = [given] if isinstance(given, str | bytes) or not isinstance(given, Iterable) else list(given)
    for one in found:
        if not isinstance(one, Variable):
            shown = repr(one) if isinstance(one, str) else f"a {type(one).__name__}"
            raise TypeError(
                f"Found {shown:.80} among the variables of {where}. Expected objects of Variable. "
                f"{remedy or 'Pass a list of them.'}"
            )
    return found


@contextmanager
def bound(variables: Sequence[Variable], values: Sequence[Any]) -> Iterator[None]:
    """Lets the variables hold other values, tracers for example, inside the block and puts the old ones back after it.

    They may be assigned to inside the block also where it is traced, since nothing of that stays.
    """
    saved = [(variable._value, variable._trace) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value, variable._trace = value, current_trace()
        yield
    finally:
        # Backwards, so that a variable listed twice ends with what it held first.
        for variable, before in zip(reversed(variables), reversed(saved), strict=True):
            variable._value, variable._trace = before


@contextmanager
def reads_recorded(on_read: Callable[[Variable], None]) -> Iterator[None]:
    """Calls `on_read(variable)` at every read of a value inside the block."""
    token = _on_read.set(on_read)
    try:
        yield
    finally:
        _on_read.reset(token)


@contextmanager
def assignments_refused() -> Iterator[None]:
    """Makes every assignment inside the block a RuntimeError: a tracer kept in a variable would outlive its trace."""
    token = _is_frozen.set(True)
    try:
        yield
    finally:
        _is_frozen.reset(token)


def _needs_x64(dtype: np.dtype) -> bool:
    return dtype.itemsize == 8 and dtype.kind in "iuf" and not jax.config.read("jax_enable_x64")


def _as_held(value: Any, dtype: Any) -> Any:
    # The dtype is always named: JAX would mark a Python number as weakly typed, and its results would change dtype with
    # their partners.
    dtype = jnp.result_type(value) if dtype is None else np.dtype(dtype)
    if not _needs_x64(dtype):
        return jnp.array(value, dtype)
    if dtype.kind == "f":
        raise ValueError(
            "Found dtype float64. Expected at most 32 bits. Set jax_enable_x64 before creating the variable, or use "
            "float32."
        )
    return np.array(value, dtype)


def _cast_like(value: Any, dtype: np.dtype, name: str) -> Any:
    found = jnp.result_type(value)
    # jnp.result_type turns Python and numpy numbers into what JAX would hold, so 1 and np.float64(1.0) fit float32.
    if not _same_kind(found, dtype):
        raise TypeError(
            f"Found a value of dtype {found} for variable '{name}' of dtype {dtype}. Expected the same kind of number. "
            "Cast it first."
        )
    if _needs_x64(dtype):
        # A tracer cannot become numpy; for the length of a trace a counter has the 32 bits JAX gives it.
        return value if isinstance(value, Tracer) else np.array(value, dtype)
    return jnp.asarray(value, dtype)


def _same_kind(found: Any, dtype: np.dtype) -> bool:
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [next(i for i, kind in enumerate(order) if jnp.issubdtype(one, kind)) for one in (found, dtype)]
    return rank[0] <= rank[1]
