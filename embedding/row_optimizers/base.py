"""`Optimizer`: what the row optimizers have in common, as values: arguments, checks, slots and one step.

They have the arguments, order, defaults and checks of `tf.tpu.experimental.embedding`, and are compared and hashed by
their attributes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np

from podembed.embedding.row_optimizers.row_step import NO_LIMITS, Limits, RowStep, TouchedRows, run_kernel
from podembed.embedding.row_optimizers.table_rules import MOST_SLOTS, Rule, has_name, rule_of, update_tables

LearningRate: TypeAlias = float | Callable[..., Any]
ClipValue: TypeAlias = float | tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpec:
    """One piece of optimizer state of a row: one number ("row") or one number a column ("element")."""

    name: str
    width: Literal["row", "element"]
    initial_value: float = 0.0

    def __post_init__(self) -> None:
        check_number(f"initial_value of slot {self.name!r}", self.initial_value)
        if self.width not in ("row", "element") or not self.name.isidentifier() or self.name == "rows":
            raise ValueError(
                f"Found slot {self.name!r} of width {self.width!r}. Expected an identifier other than 'rows' and width "
                "'row' or 'element'. Rename the slot or its width."
            )

    def columns(self, dim: int) -> int:
        """Columns of this slot in a table with rows of `dim` columns."""
        return 1 if self.width == "row" else dim


class DefaultAccumulator(float):
    """The first accumulator of an optimizer that was given none: TensorFlow's number, which a job replaces by its own.
    A type, so that the same number given by a user stays what it is.
    """

    __slots__ = ()


TENSORFLOW_ACCUMULATOR = DefaultAccumulator(0.1)


def refuse(found: str, expected: str, remedy: str) -> ValueError:
    """The error for an argument, in the words of all of them."""
    return ValueError(f"Found {found}. Expected {expected}. {remedy}")


def is_number(value: Any) -> bool:
    """Whether a value is one number, also of numpy or JAX."""
    if isinstance(value, int | float):
        return True
    try:
        float("" if isinstance(value, str | bytes) else value)
    except (TypeError, ValueError):
        return False
    return True


def not_a_number(name: str, value: object) -> str:
    """The message for an argument that should be a number."""
    return f"Found {name}={value!r}. Expected a number. Pass one, such as 0.1."


def check_number(
    name: str, value: Any, *, least: float = -math.inf, most: float = math.inf, may_be_infinite: bool = False
) -> None:
    """Raises for an argument that is no number, not finite in float32, or out of its range.

    Raises:
      TypeError: it is no number.
      ValueError: it is out of its range.
    """
    if not is_number(value) or isinstance(value, bool | np.bool_):
        raise TypeError(not_a_number(name, value))
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    # Rows, slots and constants of the kernels are float32. Its largest number, in few digits, is a little above it.
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.float32(number))) or (may_be_infinite and math.isinf(number))
    if not is_finite:
        raise refuse(f"{name}={value!r}", "a finite number that float32 can hold", "Pass a smaller number.")
    if not least <= number <= most:
        expected = f"a number from {least:g} to {most:g}"
        if most == math.inf:
            expected = f"a number of at least {least:g}"
        elif least == -math.inf:
            expected = f"a number of at most {most:g}"
        raise refuse(f"{name}={value!r}", expected, "Change it, or leave it out for its default.")


class Optimizer:
    """What the row optimizers have in common.

    Common arguments:
      learning_rate: a number of at least 0, a callable without arguments, or a schedule of the step (as optax's).
      use_gradient_accumulation: sum the gradients of a row before one update; False applies them one after another,
        in order.
      clip_weight_min, clip_weight_max: limits of a row after its update; slots are not limited.
      weight_decay_factor: at least 0; touched rows become `w - factor * w` before the rule.
      multiply_weight_decay_factor_by_learning_rate: use `factor * learning_rate` instead.
      slot_variable_creation_fn: accepted for compatibility; slots are created by the table.
      clipvalue: c limits the summed gradient to `-c..c`; a tuple gives both limits, either may be None.
      low_dimensional_packing_status: accepted for compatibility; rows are never packed.
    """

    learning_rate: LearningRate
    use_gradient_accumulation: bool
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: ClipValue | None = None

    # The message of `TPUEmbeddingConfiguration` that chooses this optimizer. By field of it, the attribute that it
    # holds. "not name" is the opposite of a bool attribute. None where the format has none.
    tpu_message: ClassVar[tuple[str, dict[str, str]] | None] = None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots of a row, in the order of the checkpoint and of the update rule."""
        return ()

    @property
    def clip_gradient_min(self) -> float | None:
        return self.clipvalue[0] if isinstance(self.clipvalue, tuple) else None

    @property
    def clip_gradient_max(self) -> float | None:
        return self.clipvalue[1] if isinstance(self.clipvalue, tuple) else None

    @property
    def touches_all_rows(self) -> bool:
        """Whether a step also changes rows that no sample named."""
        return False

    @property
    def is_compiled(self) -> bool:
        """Whether `run` is a kernel, which several threads may call at once for rows of their own."""
        return True

    @property
    def updates_together(self) -> bool:
        """Whether `table_rule` serves it: its rule is a kernel of a module, and a step updates each named row once."""
        if self.touches_all_rows or not self.use_gradient_accumulation or not self.is_compiled:
            return False
        is_kernel = type(self).run is Optimizer.run and has_name(_kernel(self)[0])
        return is_kernel and len(self.slots) <= MOST_SLOTS

    def table_rule(self, learning_rate: float) -> Callable[[int, np.ndarray, np.ndarray], None]:
        """One step for many tables: takes `(dim, matrices, touched)` of `table_rules.update_tables`."""
        (rule, constants), limits = _table_rule(self), _limits(self, learning_rate)

        def update(dim: int, matrices: np.ndarray, touched: np.ndarray) -> None:
            update_tables(rule, dim, matrices, touched, float(learning_rate), limits, constants)

        return update

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The compiled rule and the constants of its update, the last arguments of the rule.

        The rule takes `(width, dim, table, *slots, rows, head, following, gradients, learning_rate, limits,
        *constants)`; see `kernels.updates`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override kernel() or run(step).")

    def oracle(
        self, weight: Any, slots: Sequence[Any], gradient: Any, rate: Any, xp: Any = np
    ) -> tuple[Any, list[Any]]:
        """What the rule means, in numpy: the new weights and slots of touched rows. In float32 it gives the kernel's
        bits, powers aside. Tables on devices are updated by the same lines, in JAX.

        Args:
          weight: `[n, dim]`, decayed.
          slots: `[n, dim or 1]` each.
          gradient: `[n, dim]`, summed and limited.
          xp: numpy, or `jax.numpy` for arrays of JAX.
        """
        raise NotImplementedError(f"{type(self).__name__} has no oracle: its update is its own.")

    def run(self, step: RowStep) -> None:
        """Updates the touched rows and their slots in place."""
        kernel, constants = _kernel(self)
        run_kernel(step, kernel, constants)

    def apply(
        self,
        *,
        rows: np.ndarray,
        slots: Sequence[np.ndarray],
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
    ) -> None:
        """Updates the touched rows and their slots in place.

        Args:
          rows: float32 `[R, dim]`.
          slots: in the order of `slots`, float32 `[R, dim or 1]` each.
          touched: which rows, and which gradients belong to them.
          gradients: float32 matrices with m rows of `dim` columns in all, or int64 `[m]`, the address of each row.
          learning_rate: learning rate of this step.

        Raises:
          ValueError: a matrix of another dtype or width.
        """
        limits = _limits(self, learning_rate)
        self.run(RowStep.of(rows, slots, touched, gradients, learning_rate, limits))

    def with_accumulator(self, value: float) -> Self:
        """The same, with `value` as the first accumulator if it has one and was given none."""
        if not isinstance(getattr(self, "initial_accumulator_value", None), DefaultAccumulator):
            return self
        return replace(self, initial_accumulator_value=value)  # pyright: ignore[reportArgumentType]  # as above

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` columns with its slots."""
        return 4 * (dim + sum(slot.columns(dim) for slot in self.slots))

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            if not is_number(self.learning_rate) or isinstance(self.learning_rate, bool):
                raise ValueError(not_a_number("learning_rate", self.learning_rate))
            check_number("learning_rate", self.learning_rate, least=0.0)
        for argument in fields(self):  # pyright: ignore[reportArgumentType]  # every optimizer is a dataclass
            name, value = argument.name, getattr(self, argument.name)
            kind, _, or_none = str(argument.type).partition(" | ")
            if value is None and or_none == "None":
                continue
            if kind == "float" and or_none in ("", "None"):
                check_number(name, value, may_be_infinite=name.startswith("clip_weight_"))
            elif kind == "bool" and not isinstance(value, bool | np.bool_):
                raise TypeError(f"Found {name}={value!r}. Expected True or False. Pass one of them.")
        if self.weight_decay_factor is not None:
            check_number("weight_decay_factor", self.weight_decay_factor, least=0.0)
        if not self.use_gradient_accumulation and self.clipvalue is not None:
            raise refuse(
                f"clipvalue={self.clipvalue!r} with use_gradient_accumulation=False",
                "no clipvalue, since only a summed gradient can be clipped",
                "Leave clipvalue out or accumulate.",
            )
        object.__setattr__(self, "clipvalue", _both_limits(self.clipvalue))
        _check_order("clipvalue", self.clip_gradient_min, self.clip_gradient_max)
        _check_order("clip_weight", self.clip_weight_min, self.clip_weight_max)
        creation = getattr(self, "slot_variable_creation_fn", None)
        if creation is not None and not callable(creation):
            raise refuse(f"slot_variable_creation_fn={creation!r}", "None or a callable", "Leave it out.")


def _both_limits(clipvalue: Any) -> tuple[float | None, float | None] | None:
    """(lowest, highest), None for no limit at all, so that optimizers that do the same are equal."""
    if clipvalue is None:
        return None
    if is_number(clipvalue):
        check_number("clipvalue", clipvalue, least=0.0, may_be_infinite=True)
        return (-1.0 * clipvalue, clipvalue)
    if not isinstance(clipvalue, tuple) or not all(limit is None or is_number(limit) for limit in clipvalue):
        raise TypeError(
            f"Found clipvalue={clipvalue!r}. Expected a number, or a tuple of two numbers or None. Pass "
            "tuple(clipvalue)."
        )
    if len(clipvalue) != 2:
        raise refuse(f"clipvalue={clipvalue!r}", "two limits", "Pass (lowest, highest).")
    for limit in clipvalue:
        if limit is not None:
            check_number("clipvalue", limit, may_be_infinite=True)
    return None if clipvalue == (None, None) else clipvalue


def _check_order(name: str, lowest: float | None, highest: float | None) -> None:
    if lowest is not None and highest is not None and not lowest <= highest:
        raise refuse(
            f"{name} limits {lowest!r} and {highest!r}", "the lower limit not above the upper one", "Swap them."
        )


@cache
def _kernel(optimizer: Optimizer) -> tuple[Callable[..., None], tuple[Any, ...]]:
    return optimizer.kernel()


@cache
def _table_rule(optimizer: Optimizer) -> tuple[Rule, tuple[Any, ...]]:
    kernel, constants = _kernel(optimizer)
    return rule_of(kernel, len(optimizer.slots)), constants


def _limits(optimizer: Optimizer, learning_rate: float) -> Limits | None:
    """(lowest gradient, highest gradient, decay, lowest weight, highest weight), or None where there is nothing to
    do.
    """
    decay = float(optimizer.weight_decay_factor or 0.0)
    if optimizer.multiply_weight_decay_factor_by_learning_rate:
        decay *= learning_rate
    limits = (
        -math.inf if optimizer.clip_gradient_min is None else float(optimizer.clip_gradient_min),
        math.inf if optimizer.clip_gradient_max is None else float(optimizer.clip_gradient_max),
        decay,
        -math.inf if optimizer.clip_weight_min is None else float(optimizer.clip_weight_min),
        math.inf if optimizer.clip_weight_max is None else float(optimizer.clip_weight_max),
    )
    return None if limits == NO_LIMITS else limits


def learning_rate_at(learning_rate: LearningRate, step: int) -> float:
    """The rate of one step: the number itself, a callable's result, or a schedule's value at `step`.

    Args:
      step: 0 for the first update. Given to callables that need an argument, as optax schedules do.

    Raises:
      TypeError: a callable returned something else than one number.
      ValueError: it returned a number below 0 or one that is not finite.
    """
    if not callable(learning_rate):
        return float(learning_rate)
    rate = learning_rate(step) if needs_step(learning_rate) else learning_rate()
    if not is_number(rate):
        raise TypeError(
            f"Found {rate!r} from the learning rate {learning_rate!r}. Expected one number. Return a float."
        )
    if not 0.0 <= float(rate) < math.inf:
        raise refuse(
            f"{float(rate)!r} from the learning rate {learning_rate!r} at step {step}",
            "a finite number of at least 0",
            "Change the schedule.",
        )
    return float(rate)


def needs_step(function: Callable[..., Any]) -> bool:
    """Whether a learning rate is a function of the step: one argument at least has no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def check_accumulator(initial: float, epsilon: float) -> None:
    """Raises ValueError if a row could be divided by zero."""
    if not epsilon >= 0:
        raise refuse(f"epsilon={epsilon!r}", "0 or more", "Leave it out.")
    if not (initial > 0 or (epsilon > 0 and initial == 0)):
        raise refuse(
            f"initial_accumulator_value={initial!r} with epsilon={epsilon!r}",
            "an initial accumulator above 0, since without epsilon a zero accumulator divides by zero",
            "Raise it, or pass an epsilon above 0 with 0.",
        )
