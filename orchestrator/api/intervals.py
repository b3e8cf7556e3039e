"""Numbers of steps as users give them: `500`, or epochs as text, such as `"1epoch"`, `"0.5epoch"` and `"2epochs"`.

How many steps an epoch has is known only when the data is there. The form is therefore checked when a number is
declared, and it becomes steps when the run is open. Epochs must be whole steps: a commit that drifted from the ends of
epochs would be a surprise.
"""

from __future__ import annotations

import re
from fractions import Fraction

from podembed.workers.declared_types import shown

FORMS = 'steps such as 500, or epochs such as "1epoch" or "0.5epoch"'


def epochs_of(text: str) -> Fraction | None:
    """The number of epochs that a text stands for, which may be 0 or less; None if it is no number of epochs."""
    # Few digits and no exponent: `1e9epochs` is a mistake, and a larger one would fill the memory.
    found = re.fullmatch(r"\s*(-?\d{1,9}(?:\.\d{1,9}|/\d{1,9})?)\s*epochs?\s*", text, re.ASCII)
    try:
        return Fraction(found[1]) if found else None
    except ZeroDivisionError:
        return None


def check_steps(declared: object, name: str, error: type[Exception]) -> None:
    """Checks the form of a field that takes steps, epochs or None.

    Raises:
      error: it is no number of epochs, or less than one step.
    """
    value = getattr(declared, name)
    if isinstance(value, str):
        epochs = epochs_of(value)
        if epochs is None or epochs <= 0:
            raise error(
                f"Found {name}={shown(value)} in {type(declared).__name__}. Expected {FORMS}, or None. Write steps "
                "without quotes, and more than no epochs."
            )
    elif value is not None and value < 1:
        raise error(f"Found {name}={value}. Expected at least 1, or None.")


def in_steps(name: str, value: int | str | None, steps_per_epoch: int, error: type[Exception]) -> int | None:
    """The steps of a value that `check_steps` accepts.

    Raises:
      error: as `whole_steps`.
    """
    epochs = epochs_of(value) if isinstance(value, str) else None
    return known_steps(name, value) if epochs is None else whole_steps(name, epochs, steps_per_epoch, error)


def whole_steps(name: str, epochs: Fraction, steps_per_epoch: int, error: type[Exception]) -> int:
    """The steps of so many epochs.

    Args:
      name: name as the user knows it, for messages.

    Raises:
      error: they are no whole number.
    """
    steps = epochs * steps_per_epoch
    if steps.denominator != 1:
        raise error(
            f"Found {name} of {float(epochs):g} epochs, which is {float(steps):g} steps of an epoch of "
            f"{steps_per_epoch}. Expected whole steps. Give it in steps, such as {name} {max(1, round(steps))}."
        )
    return int(steps)


def known_steps(name: str, value: int | str | None) -> int | None:
    """A value that is steps already.

    Raises:
      TypeError: it is epochs still; whoever opens the run has to call `RunConfig.in_steps` first.
    """
    if isinstance(value, str):
        raise TypeError(f"Found {name}={value!r}. Expected steps here. Call RunConfig.in_steps with the run's epoch.")
    return value
