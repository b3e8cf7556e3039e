"""Row optimizers as values: which slots a row has, how they start, and the constants of the update rule.

`SGD`, `Adagrad`, `AdagradMomentum`, `FTRL` and `Adam` have the arguments, order, defaults and checks of
`tf.tpu.experimental.embedding`; `RowWiseAdagrad` keeps one number a row; `CustomRowOptimizer` takes a function of
yours. They are compared and hashed by their attributes. The arithmetic is in `kernels_update.py`, chosen in
`update_rules.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

LearningRate: TypeAlias = float | Callable[..., Any]
ClipValue: TypeAlias = float | tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpec:
    """One piece of optimizer state of a row: one number ("row") or one number a column ("element")."""

    name: str
    width: Literal["row", "element"]
    initial_value: float = 0.0

    def __post_init__(self) -> None:
        if self.width not in ("row", "element") or not self.name.isidentifier() or self.name == "rows":
            raise ValueError(
                f"Found slot {self.name!r} of width {self.width!r}. Expected an identifier other than 'rows' and width "
                "'row' or "
                "'element'. Rename the slot or its width."
            )

    def columns(self, dim: int) -> int:
        """Columns of this slot in a table with rows of `dim` columns."""
        return 1 if self.width == "row" else dim


def _refuse(found: str, expected: str, remedy: str) -> ValueError:
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


def _not_a_number(name: str, value: object) -> str:
    return f"Found {name}={value!r}. Expected a number. Pass float({name})."


class Optimizer:
    """What the row optimizers have in common.

    Common arguments: learning_rate: a number, a callable without arguments, or a schedule of the step (as optax's).
      use_gradient_accumulation: sum the gradients of a row before one update; False applies them one after another, in
      order. clip_weight_min, clip_weight_max: limits of a row after its update; slots are not limited.
      weight_decay_factor: touched rows become `w - factor * w` before the rule.
      multiply_weight_decay_factor_by_learning_rate: use `factor * learning_rate` instead. slot_variable_creation_fn:
      accepted for compatibility; slots are created by the table. clipvalue: c limits the summed gradient to `-c..c`; a
      tuple gives both limits, either may be None. low_dimensional_packing_status: accepted for compatibility; rows are
      never packed.
    """

    learning_rate: LearningRate
    use_gradient_accumulation: bool
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: ClipValue | None = None

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

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` columns with its slots."""
        return 4 * (dim + sum(slot.columns(dim) for slot in self.slots))

    def __post_init__(self) -> None:
        if not callable(self.learning_rate) and not is_number(self.learning_rate):
            raise ValueError(_not_a_number("learning_rate", self.learning_rate))
        for argument in fields(self):  # pyright: ignore[reportArgumentType]  # every optimizer is a dataclass
            value = getattr(self, argument.name)
            is_needed = argument.type == "float" or (argument.type == "float | None" and value is not None)
            if is_needed and not is_number(value):
                raise TypeError(_not_a_number(argument.name, value))
        if not self.use_gradient_accumulation and self.clipvalue is not None:
            raise _refuse(
                f"clipvalue={self.clipvalue!r} with use_gradient_accumulation=False",
                "no clipvalue, since only a summed gradient can be clipped",
                "Leave clipvalue out or accumulate.",
            )
        object.__setattr__(self, "clipvalue", _both_limits(self.clipvalue))
        _check_order("clipvalue", self.clip_gradient_min, self.clip_gradient_max)
        _check_order("clip_weight", self.clip_weight_min, self.clip_weight_max)
        creation = getattr(self, "slot_variable_creation_fn", None)
        if creation is not None and not callable(creation):
            raise _refuse(f"slot_variable_creation_fn={creation!r}", "None or a callable", "Leave it out.")


def _both_limits(clipvalue: Any) -> tuple[float | None, float | None] | None:
    """(lowest, highest), None for no limit at all, so that optimizers that do the same are equal."""
    if clipvalue is None:
        return None
    if is_number(clipvalue):
        return (-1.0 * clipvalue, clipvalue)
    if not isinstance(clipvalue, tuple) or not all(limit is None or is_number(limit) for limit in clipvalue):
        raise TypeError(
            f"Found clipvalue={clipvalue!r}. Expected a number, or a tuple of two numbers or None. Pass "
            "tuple(clipvalue)."
        )
    if len(clipvalue) != 2:
        raise _refuse(f"clipvalue={clipvalue!r}", "two limits", "Pass (lowest, highest).")
    return None if clipvalue == (None, None) else clipvalue


def _check_order(name: str, lowest: float | None, highest: float | None) -> None:
    if lowest is not None and highest is not None and not lowest <= highest:
        raise _refuse(
            f"{name} limits {lowest!r} and {highest!r}", "the lower limit not above the upper one", "Swap them."
        )


def learning_rate_at(learning_rate: LearningRate, step: int) -> float:
    """The rate of one step: the number itself, a callable's result, or a schedule's value at `step`.

    Args:
      step: 0 for the first update. Given to callables that need an argument, as optax schedules do.

    Raises:
      TypeError: a callable returned something else than one number.
    """
    if not callable(learning_rate):
        return float(learning_rate)
    rate = learning_rate(step) if _needs_step(learning_rate) else learning_rate()
    if not is_number(rate):
        raise TypeError(
            f"Found {rate!r} from the learning rate {learning_rate!r}. Expected one number. Return a float."
        )
    return float(rate)


def _needs_step(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`."""

    learning_rate: LearningRate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`a += g²; w -= lr * g / (sqrt(a) + epsilon)`; epsilon is 0 unless given, then the accumulator may start at 0."""

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False
    epsilon: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_accumulator(self.initial_accumulator_value, self.epsilon)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="element", initial_value=self.initial_accumulator_value),)


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """`a += mean(g²) over the row; w -= lr * g / (sqrt(a) + epsilon)`: one number of state a row."""

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_accumulator(self.initial_accumulator_value, self.epsilon)

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="row", initial_value=self.initial_accumulator_value),)


def _check_accumulator(initial: float, epsilon: float) -> None:
    if not epsilon >= 0:
        raise _refuse(f"epsilon={epsilon!r}", "0 or more", "Leave it out.")
    if not (initial > 0 or (epsilon > 0 and initial == 0)):
        raise _refuse(
            f"initial_accumulator_value={initial!r} with epsilon={epsilon!r}",
            "an initial accumulator above 0, since without epsilon a zero accumulator divides by zero",
            "Raise it, or pass an epsilon above 0 with 0.",
        )


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """`a += g²` (or its moving average), `s = g * (a + epsilon)^(-1/exponent)`, `m = momentum * m + s`, `w -= lr * m`.

    With `use_nesterov` the step is `lr * (momentum * m + s)`, with the new m.
    """

    learning_rate: LearningRate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon > 0:
            raise _refuse(f"epsilon={self.epsilon!r}", "more than 0", "Leave it out for 1e-10.")
        if not self.exponent > 0:
            raise _refuse(f"exponent={self.exponent!r}", "more than 0", "Leave it out for 2.")

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="accumulator", width="element"), SlotSpec(name="momentum", width="element"))


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader (McMahan et al. 2013, algorithm 1), per touched row, with p = -learning_rate_power:

    `a' = a + g²; z' = z + g - (a'^p - a^p) * w / lr; w = (clamp(z', -l1, l1) - z') / ((a'^p + beta) / lr + 2 * l2)`.
    `multiply_linear_by_learning_rate` stores z * lr instead of z. `allow_zero_accumulator` is accepted and changes
    nothing.
    """

    learning_rate: LearningRate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.initial_accumulator_value > 0:
            found = f"initial_accumulator_value={self.initial_accumulator_value!r}"
            raise _refuse(found, "more than 0", "Leave it out for 0.1.")

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (
            SlotSpec(name="accumulator", width="element", initial_value=self.initial_accumulator_value),
            SlotSpec(name="linear", width="element"),
        )


@dataclass(frozen=True)
class Adam(Optimizer):
    """`m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g²; w -= lr * m / sqrt(v + epsilon²)`, without bias
    correction.

    Without `sum_inside_sqrt` the divisor is `sqrt(v) + epsilon`. Without `lazy_adam` every row of the table takes the
    step, with g = 0 where no sample named it. For textbook Adam pass the rate `lr * sqrt(1 - b2^t) / (1 - b1^t)`, t
    counting from 1.
    """

    learning_rate: LearningRate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-07
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None
    clipvalue: ClipValue | None = None
    low_dimensional_packing_status: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0.0 <= beta < 1.0:
                raise _refuse(f"{name}={beta!r}", "at least 0 and below 1", "Leave it out for the default.")
        if not self.epsilon > 0:
            raise _refuse(f"epsilon={self.epsilon!r}", "more than 0", "Leave it out for 1e-7.")
        if not self.use_gradient_accumulation and not self.lazy_adam:
            raise _refuse(
                "lazy_adam=False with use_gradient_accumulation=False",
                "accumulated gradients, since every row takes exactly one step",
                "Turn one of the two on.",
            )

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"), SlotSpec(name="velocity", width="element"))

    @property
    def touches_all_rows(self) -> bool:
        return not self.lazy_adam


@dataclass(frozen=True)
class CustomRowOptimizer(Optimizer):
    """An update rule of your own, called once for every touched row.

    Args:
      update: `update(gradient, row, slots, learning_rate, hyperparameters) -> (new_row, new_slots)`. `gradient` and
        `row` are float32 `[dim]`, `slots` a tuple of float32 arrays `[dim]` or `[1]` in the order of `slots`,
        `hyperparameters` has one float attribute for each name. It must not write into its arguments. It is compiled by
        numba if numba understands it and runs in Python if not.
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
            raise _refuse(
                f"update={self.update!r}",
                "a function of (gradient, row, slots, learning_rate, hyperparameters)",
                "Write one.",
            )
        names = [slot.name for slot in self.slots]
        if len(set(names)) < len(names):
            raise _refuse(f"slots named {names}", "different names", "Rename one.")
        pairs = tuple(sorted(dict(self.hyperparameters).items()))
        for name, value in pairs:
            if not is_number(value):
                raise ValueError(_not_a_number(f"hyperparameter {name!r}", value))
            if not name.isidentifier() or name.startswith("_") or not math.isfinite(value):
                raise _refuse(
                    f"hyperparameter {name!r}={value!r}", "an identifier and a finite number", "Rename or change it."
                )
        object.__setattr__(self, "hyperparameters", pairs)
        object.__setattr__(self, "slots", tuple(self.slots))
