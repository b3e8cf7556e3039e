"""`CustomRowOptimizer`: a rule of the user, compiled by numba if it can, and otherwise run row by row in Python."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba import njit
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from podembed.embedding.row_optimizers.base import (
    ClipValue,
    LearningRate,
    Optimizer,
    SlotSpec,
    is_number,
    not_a_number,
    refuse,
)
from podembed.embedding.row_optimizers.row_step import NO_LIMITS, RowStep

_MAX_COMPILED_SLOTS = 4


@dataclass(frozen=True)
class CustomRowOptimizer(Optimizer):
    """An update rule of your own, called once for every touched row.

    Args:
      update: `update(gradient, row, slots, learning_rate, hyperparameters) -> (new_row, new_slots)`. `gradient` and
        `row` are float32 `[dim]`, `slots` a tuple of float32 arrays `[dim]` or `[1]` in the order of `slots`.
        `hyperparameters` has one float attribute for each name. It must not write into its arguments. It is compiled by
        numba if numba understands it and runs in Python if not. Of a table on devices it is traced by JAX, with the
        functions of `jax.numpy` where it calls those of numpy.
      slots: the state of a row; with more than 4 slots the rule is not compiled.
      hyperparameters: names and values of constants.

    ```python
    def update(gradient, row, slots, learning_rate, hyperparameters):
        velocity = hyperparameters.momentum * slots[0] + gradient
        return row - learning_rate * velocity, (velocity,)

    velocity = SlotSpec(name="velocity", width="element")
    CustomRowOptimizer(update, slots=(velocity,), hyperparameters={"momentum": 0.9}, learning_rate=0.1)
    ```
    """

    update: Callable[..., Any]
    slots: tuple[SlotSpec, ...] = ()  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    hyperparameters: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    learning_rate: LearningRate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: ClipValue | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.update):
            raise refuse(
                f"update={self.update!r}",
                "a function of (gradient, row, slots, learning_rate, hyperparameters)",
                "Write one.",
            )
        names = [slot.name for slot in self.slots]
        if len(set(names)) < len(names):
            raise refuse(f"slots named {names}", "different names", "Rename one.")
        pairs = tuple(sorted(dict(self.hyperparameters).items()))
        for name, value in pairs:
            if not is_number(value):
                raise ValueError(not_a_number(f"hyperparameter {name!r}", value))
            if not name.isidentifier() or name.startswith("_") or not math.isfinite(value):
                raise refuse(
                    f"hyperparameter {name!r}={value!r}", "an identifier and a finite number", "Rename or change it."
                )
        object.__setattr__(self, "hyperparameters", pairs)
        object.__setattr__(self, "slots", tuple(self.slots))

    @property
    def is_compiled(self) -> bool:
        """False: a rule of the user may run in Python, and then it may keep something between two rows."""
        return False

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        """See `Optimizer.oracle`, for arrays of JAX."""
        import jax  # host workers never load it for a rule

        rule, constants = _with_functions_of(xp, self.update), _named(tuple(dict(self.hyperparameters).items()))

        def of_row(weight: Any, slots: tuple[Any, ...], gradient: Any) -> Any:
            return rule(gradient, weight, slots, rate, constants)

        new, after = jax.vmap(of_row)(weight, tuple(slots), gradient)
        return new.astype(weight.dtype), [slot.astype(weight.dtype) for slot in after]

    def why_not_on_devices(self, dim: int) -> str | None:
        """Why JAX cannot trace the rule for rows of so many columns; None if it can. No device is touched."""
        import jax
        import jax.numpy as jnp

        def shape(width: int) -> Any:
            return jax.ShapeDtypeStruct((1, width), jnp.float32)

        slots = [shape(slot.columns(dim)) for slot in self.slots]
        try:
            new, after = jax.eval_shape(
                lambda weight, slots, gradient, rate: self.oracle(weight, slots, gradient, rate, xp=jnp),
                shape(dim),
                slots,
                shape(dim),
                jax.ShapeDtypeStruct((), jnp.float32),
            )
        except Exception as error:  # whatever the user's function raises
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        found, expected = [one.shape[1:] for one in (new, *after)], [one.shape[1:] for one in (shape(dim), *slots)]
        return None if found == expected else f"it returned arrays of shapes {found} in the place of {expected}"

    def run(self, step: RowStep) -> None:
        summed = step.summed_gradients()
        if len(step.touched.rows):
            rule = custom_rule(self, step.rows.shape[1])
            limits = (step.limits or NO_LIMITS)[2:]
            rule(step.rows, tuple(step.slots), step.touched.rows, summed, step.learning_rate, limits)


def custom_rule(optimizer: CustomRowOptimizer, dim: int) -> Callable[..., None]:
    """The function that runs a custom rule over rows: compiled if numba can, otherwise in Python.

    Tried once on a row of zeros, so that an error of the rule itself shows before any row of the table has changed.

    Raises:
      ValueError: the rule returns something else than a row and its slots.
    """
    widths = tuple(slot.columns(dim) for slot in optimizer.slots)
    return _custom_rule(optimizer.update, tuple(dict(optimizer.hyperparameters).items()), dim, widths)


def _named(constants: tuple[tuple[str, float], ...]) -> Any:
    """The hyperparameters as rules see them."""
    names = [name for name, _ in constants]
    return namedtuple("hyperparameters", names)(*(float(value) for _, value in constants))


def _with_functions_of(xp: Any, update: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with another module in the place of numpy."""
    if not isinstance(update, FunctionType):
        return update
    names = {name: xp if value is np else value for name, value in update.__globals__.items()}
    made = FunctionType(update.__code__, names, update.__name__, update.__defaults__, update.__closure__)
    made.__kwdefaults__ = update.__kwdefaults__
    return made


@cache
def _custom_rule(
    update: Callable[..., Any], constants: tuple[tuple[str, float], ...], dim: int, widths: tuple[int, ...]
) -> Callable[..., None]:
    hyperparameters = _named(constants)
    _check_rule(update, hyperparameters, dim, widths)
    in_python = _rule_over_rows(update, hyperparameters, _take_slots, _put_slots)
    if len(widths) > _MAX_COMPILED_SLOTS:
        return in_python
    take, put = _TAKE_AND_PUT[len(widths)]
    compiled = njit(nogil=True)(_rule_over_rows(njit(update), hyperparameters, njit(take), njit(put)))
    trial = tuple(np.zeros((1, width), np.float32) for width in widths)
    row = np.zeros((1, dim), np.float32)
    try:
        compiled(row, trial, np.zeros(1, np.int64), row.copy(), 0.0, (0.0, 0.0, 0.0))
    except (NumbaError, UnsupportedBytecodeError):
        # The second one, as of an import within the rule, is none of the first.
        return in_python
    return compiled


def _check_rule(update: Callable[..., Any], hyperparameters: Any, dim: int, widths: tuple[int, ...]) -> None:
    slots = tuple(np.zeros(width, np.float32) for width in widths)
    with np.errstate(all="ignore"):
        result = update(np.zeros(dim, np.float32), np.zeros(dim, np.float32), slots, 0.0, hyperparameters)
    fits = (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[1], tuple)
        and len(result[1]) == len(widths)
    )
    if (
        not fits
        or np.shape(result[0]) != (dim,)
        or [np.shape(slot) for slot in result[1]] != [(width,) for width in widths]
    ):
        raise ValueError(
            f"The rule {update!r} returned {result!r} for a row of {dim} columns with slots of {widths} columns. "
            "Expected (new_row, (new_slot, ...)) of the same shapes. Return a tuple of slots even for one or none."
        )


def _rule_over_rows(
    update: Callable[..., Any], hyperparameters: Any, take: Callable[..., Any], put: Callable[..., Any]
) -> Callable[..., None]:
    def run(table, slots, rows, gradients, learning_rate, limits):
        for u in range(len(rows)):
            row = rows[u]
            weight = table[row] - np.float32(limits[0]) * table[row]
            new_weight, new_slots = update(gradients[u], weight, take(slots, row), learning_rate, hyperparameters)
            table[row] = np.minimum(np.maximum(new_weight, np.float32(limits[1])), np.float32(limits[2]))
            put(slots, row, new_slots)

    return run


def _take_slots(slots, row):
    return tuple(slot[row] for slot in slots)


def _put_slots(slots, row, new):
    for number in range(len(slots)):
        slots[number][row] = new[number]


def _put_nothing(slots, row, new):
    pass


# Numba builds a tuple only of a number of parts that it can see.
_TAKE_AND_PUT = (
    (lambda slots, row: (), _put_nothing),
    (lambda slots, row: (slots[0][row],), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row]), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row], slots[2][row]), _put_slots),
    (lambda slots, row: (slots[0][row], slots[1][row], slots[2][row], slots[3][row]), _put_slots),
)
