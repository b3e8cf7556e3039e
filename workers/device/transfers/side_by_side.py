"""Which gradients a step cuts out of one array.

A model that lays activations side by side gets one array of their gradients. JAX then cuts it into an array for each
feature, which costs as much as the copy to the host. A step that leaves them as one array spares that. Its gradients
are the same up to the rounding of what XLA fuses. Where another release of JAX writes a step in another way, nothing is
found. Each gradient then is an array of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

Together = tuple[tuple[int, ...], ...]
"""Groups of gradients, each by its position, in the order in which they lie side by side."""


def cut_from_one(step: Any, outputs: range) -> Together:
    """Groups of outputs that a step only cuts out of the columns of one array, where nothing else lies between them.

    Args:
      step: its jaxpr, that of the arrays of all devices.
      outputs: which ones are asked about; positions are counted from the first.
    """
    while [equation.primitive.name for equation in step.eqns] == ["shard_map"]:
        step = step.eqns[0].params["jaxpr"]
    return _groups(step, {step.outvars[at]: at - outputs.start for at in outputs})


def _groups(step: Any, wanted: Mapping[Any, int]) -> Together:
    """Of variables with these positions. What is compiled by itself is looked into."""
    found: list[tuple[int, ...]] = []
    positions = dict(wanted)
    # From the end, as each variable may be handed through by what follows.
    for equation in reversed(step.eqns):
        if equation.primitive.name == "jit":
            inner = equation.params["jaxpr"].jaxpr
            pairs = zip(inner.outvars, equation.outvars, strict=True)
            within = {own: positions[outer] for own, outer in pairs if outer in positions}
            found += _groups(inner, within)
            # `jnp.hstack` hands each array through one that leaves matrices as they are.
            given = zip(inner.invars, equation.invars, strict=True)
            positions |= {outer: within[own] for own, outer in given if own in within}
        elif equation.primitive.name == "split" and equation.params["axis"] == 1:
            # Pieces apart from each other would be brought together by a copy more.
            for is_asked, run in groupby(equation.outvars, key=lambda piece: _is_matrix(piece) and piece in positions):
                group = tuple(positions[piece] for piece in run) if is_asked else ()
                if len(group) > 1:
                    found.append(group)
    return tuple(found)


def _is_matrix(variable: Any) -> bool:
    return len(variable.aval.shape) == 2
