"""What is wrong with the rates of a transformation of optax, as far as that can be seen.

Such a transformation is made of functions that keep their numbers in their closures. Nothing is computed, since a job
is also declared where no device may be used. Other packages' functions, and rates that are schedules, are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_RATES = ("step_size", "learning_rate")


def rate_problem(transformation: Any) -> str | None:
    """What is wrong, and what to do; None if nothing is, or it cannot be seen."""
    found = list(_kept(transformation, set()))
    remedy = "Write a finite learning rate above 0, such as optax.adam(1e-3)."
    for name, value in found:
        if isinstance(value, float) and (math.isnan(value) or (name in _RATES and math.isinf(value))):
            return f"Found a dense_optimizer with {name}={value}. Expected finite numbers. {remedy}"
    if any(name == _FOREIGN for name, _ in found):
        return None
    # A rate becomes a negative factor, since steps go down. Other factors, of gradients for example, are above 0.
    factors = [value for name, value in found if name == "step_size"]
    factors += [-value for name, value in found if name == "learning_rate"]
    if factors and min(factors) > 0:
        return f"Found a dense_optimizer with the learning rate {-factors[-1]:g}, which goes uphill. {remedy}"
    return None


_FOREIGN = "a function that is not of optax, or a schedule"


def _kept(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """All numbers in the closures of functions, by the name that they have there."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple | list | Mapping):
        parts = value.items() if isinstance(value, Mapping) else ((None, part) for part in value)
        for name, part in parts:
            yield from ((name, float(part)),) if name is not None and _is_number(part) else _kept(part, seen)
        return
    if not callable(value):
        return
    module = getattr(value, "__module__", None) or ""
    # Some of optax.contrib, such as cocob, take the sign into their own hands.
    if not module.startswith("optax.") or module.startswith("optax.contrib.") or not hasattr(value, "__code__"):
        yield _FOREIGN, None
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            part = cell.cell_contents
        except ValueError:  # A function that refers to itself, while it is made.
            continue
        yield from ((name, float(part)),) if _is_number(part) else _kept(part, seen)


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if getattr(value, "shape", None) != ():
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
