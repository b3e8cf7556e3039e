"""Learning rate schedules with Keras' names, arguments and float32 results.

A schedule is a value: arguments in, a rate for every step out, no state. Calling it with a step (a number, an array or
a tracer) gives a float32 scalar, so each one is an optax schedule as well. `serialize` and `deserialize` carry it
through a configuration. The formulas are those documented for `tf.keras.optimizers.schedules` of TensorFlow 2.9; all
arithmetic is float32, as there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from podembed.embedding.tf.keras.array_operators import described, plain


class LearningRateSchedule:
    """A function of the step. Write your own by overriding `__call__`, and `get_config` if it should be saved."""

    def __call__(self, step: Any) -> jax.Array:
        """Returns the rate at `step`, counted from 0.

        Raises:
          NotImplementedError: a subclass that does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override __call__(step).")

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments.

        Raises:
          NotImplementedError: a subclass that does not override it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override get_config().")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LearningRateSchedule:
        """Returns the schedule with these constructor arguments."""
        return cls(**config)


class FunctionSchedule(LearningRateSchedule):
    """A function of the step, such as a schedule of optax, as a schedule that an optimizer follows."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, step: Any) -> jax.Array:
        return _float32(self._function(plain(step)))

    def get_config(self) -> dict[str, Any]:
        """Raises TypeError: what a function does cannot be written down."""
        raise TypeError(
            f"Found {self._function!r} as the learning rate of an optimizer to be described. Expected a number or a "
            "LearningRateSchedule, since a function cannot be written into a configuration. Use one of "
            "keras.schedules, or a subclass of LearningRateSchedule with get_config."
        )


class _DeclaredSchedule(LearningRateSchedule):
    """A schedule whose fields are its configuration."""

    def get_config(self) -> dict[str, Any]:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: described(getattr(self, field.name)) for field in fields}


@dataclass(frozen=True)
class ExponentialDecay(_DeclaredSchedule):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`; the exponent rounded down with `staircase`."""

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> jax.Array:
        periods = _float32(step) / _divisor(self.decay_steps)
        if self.staircase:
            periods = jnp.floor(periods)
        return _float32(self.initial_learning_rate) * jnp.power(_float32(self.decay_rate), periods)


@dataclass(frozen=True)
class InverseTimeDecay(_DeclaredSchedule):
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`; the quotient rounded down with `staircase`."""

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> jax.Array:
        periods = _float32(step) / _divisor(self.decay_steps)
        if self.staircase:
            periods = jnp.floor(periods)
        return _float32(self.initial_learning_rate) / (1.0 + _float32(self.decay_rate) * periods)


@dataclass(frozen=True)
class PiecewiseConstantDecay(_DeclaredSchedule):
    """`values[i]` while `step` is above `boundaries[i - 1]` and at most `boundaries[i]`.

    Boundaries take the dtype of the step, so 10.7 is 10 for an integer step.
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str | None = None

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.values) - 1:
            raise ValueError(
                f"Found {len(self.boundaries)} boundaries and {len(self.values)} values. Expected one value more than "
                "boundaries. Give a value for each interval, including the one after the last boundary."
            )
        if any(high <= low for low, high in zip(self.boundaries[:-1], self.boundaries[1:], strict=True)):
            raise ValueError(
                f"Found boundaries {list(self.boundaries)}. Expected rising numbers. Sort them and their values."
            )

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.boundaries), tuple(self.values), self.name))

    def __call__(self, step: Any) -> jax.Array:
        values = jnp.asarray(list(self.values), jnp.float32)
        step = plain(step)
        is_integer = jnp.issubdtype(jnp.result_type(step), jnp.integer)
        boundaries = [int(one) if is_integer else one for one in self.boundaries]
        interval = sum((jnp.asarray(step > one, jnp.int32) for one in boundaries), start=jnp.int32(0))
        return values[interval]


@dataclass(frozen=True)
class PolynomialDecay(_DeclaredSchedule):
    """From `initial_learning_rate` to `end_learning_rate` over `decay_steps`, as `(1 - step / decay_steps) ** power`.

    With `cycle` the duration is the first multiple of `decay_steps` not below the step, so the rate rises again after
    each.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: Any) -> jax.Array:
        now, duration = _float32(step), _divisor(self.decay_steps)
        if self.cycle:
            duration = duration * jnp.where(now == 0, 1.0, jnp.ceil(now / duration))
        else:
            now = jnp.minimum(now, duration)
        end = _float32(self.end_learning_rate)
        return (_float32(self.initial_learning_rate) - end) * jnp.power(
            1.0 - now / duration, _float32(self.power)
        ) + end


@dataclass(frozen=True)
class CosineDecay(_DeclaredSchedule):
    """Half a cosine from `initial_learning_rate` to `alpha` times it over `decay_steps` (Loshchilov & Hutter, 2016).

    With `warmup_target`, as in Keras 3, the rate first rises (or falls) evenly from `initial_learning_rate` to it in
    `warmup_steps`; the cosine begins there and lasts `decay_steps` more.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    name: str | None = None
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)
        if not isinstance(self.warmup_steps, Tracer) and self.warmup_steps < 0:
            raise ValueError(f"Found warmup_steps={self.warmup_steps}. Expected 0 or more. Pass 0 for no warmup.")
        if self.warmup_target is None and self.warmup_steps:
            raise ValueError(
                f"Found warmup_steps={self.warmup_steps} without warmup_target. Expected the rate at which the warmup "
                "ends. Pass warmup_target, and the first rate as initial_learning_rate."
            )

    def __call__(self, step: Any) -> jax.Array:
        initial = _float32(self.initial_learning_rate)
        if self.warmup_target is None:
            return self._cosine(_float32(step), initial)
        target, after = _float32(self.warmup_target), _float32(step) - _float32(self.warmup_steps)
        # Without steps there is nothing to divide by, and no step before them.
        fraction = _float32(step) / _divisor(max(self.warmup_steps, 1))
        return jnp.where(after < 0, initial + (target - initial) * fraction, self._cosine(after, target))

    def _cosine(self, step: jax.Array, peak: jax.Array) -> jax.Array:
        duration = _divisor(self.decay_steps)
        fraction = jnp.minimum(step, duration) / duration
        cosine = 0.5 * (1.0 + jnp.cos(_float32(math.pi) * fraction))
        return peak * ((1.0 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts(_DeclaredSchedule):
    """`CosineDecay` that starts again, each period `t_mul` times longer and its peak `m_mul` times as high (SGDR)."""

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive("first_decay_steps", self.first_decay_steps)
        _require_positive("t_mul", self.t_mul)

    def __call__(self, step: Any) -> jax.Array:
        restarts, fraction = self._restarts_and_fraction(_float32(step) / _divisor(self.first_decay_steps))
        cosine = 0.5 * jnp.power(_float32(self.m_mul), restarts) * (1.0 + jnp.cos(_float32(math.pi) * fraction))
        alpha = _float32(self.alpha)
        return _float32(self.initial_learning_rate) * ((1.0 - alpha) * cosine + alpha)

    def _restarts_and_fraction(self, periods: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many restarts lie behind, and the part of the present period that is done, from time in first periods."""
        growth = _divisor(self.t_mul)
        if self.t_mul == 1.0:
            restarts = jnp.floor(periods)
            return restarts, periods - restarts
        # The k-th restart is at the geometric sum (1 - growth**k) / (1 - growth); solved for k here.
        restarts = jnp.floor(jnp.log(1.0 - periods * (1.0 - growth)) / jnp.log(growth))
        length = jnp.power(growth, restarts)
        return restarts, (periods - (1.0 - length) / (1.0 - growth)) / length


_BY_NAME: dict[str, type[LearningRateSchedule]] = {
    cls.__name__: cls
    for cls in (
        ExponentialDecay,
        PiecewiseConstantDecay,
        PolynomialDecay,
        InverseTimeDecay,
        CosineDecay,
        CosineDecayRestarts,
    )
}


def serialize(schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns `{"class_name": ..., "config": ...}`, which goes through JSON if the schedule's own values do."""
    return {"class_name": type(schedule).__name__, "config": described(schedule.get_config())}


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, type[LearningRateSchedule]] | None = None
) -> LearningRateSchedule:
    """Returns the schedule that `serialize` described; classes of your own come in through `custom_objects`, by name.

    Raises:
      ValueError: the form or the class name is unknown.
    """
    if not {"class_name", "config"} <= set(config):
        raise ValueError(
            f"Found schedule keys {sorted(config)}. Expected 'class_name' and 'config'. Pass what `serialize` returned."
        )
    known = {**_BY_NAME, **(custom_objects or {})}
    name = config["class_name"]
    if name not in known:
        raise ValueError(
            f"Found schedule class '{name}'. Expected one of {', '.join(sorted(known))}. Pass it in `custom_objects`."
        )
    return known[name].from_config(config["config"])


def _float32(value: Any) -> jax.Array:
    return jnp.asarray(plain(value), jnp.float32)


def _divisor(value: Any) -> jax.Array:
    # Under jit XLA multiplies by the reciprocal of a constant divisor, and 30 * (1 / 30) is not 1. Floor and ceil would
    # then be off by a whole period at its end, and 1 - step / steps negative. The barrier hides that the divisor is
    # constant.
    return jax.lax.optimization_barrier(_float32(value))


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, Tracer) and not np.all(np.asarray(plain(value)) > 0):
        raise ValueError(
            f"Found {name}={value}. Expected a number above 0. Give the number of steps or the factor as a positive "
            "value."
        )
