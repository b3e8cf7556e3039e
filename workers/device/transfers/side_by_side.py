"""Which gradients a step cuts out of one array.

A model that lays activations side by side gets their gradients side by side. JAX then cuts them apart, each into an
array of its own. That costs as much as the copy to the host, and a call for each. A step whose gradients stay together
spares the former.
"""

from __future__ import annotations

from typing import Any

Together = tuple[tuple[int, ...], ...]
"""Groups of gradients, each by its position, in the order in which they lie side by side."""


def cut_from_one(step: Any, outputs: range) -> Together:
    """Groups of outputs that a step only cuts out of the columns of one array.

    Args:
      step: its jaxpr.
      outputs: which ones are asked about; positions are counted from the first.
    """
    while [equation.primitive.name for equation in step.eqns] == ["shard_map"]:
        step = step.eqns[0].params["jaxpr"]
    positions = {step.outvars[at]: at - outputs.start for at in outputs if len(step.outvars[at].aval.shape) == 2}
    found = []
    for equation in step.eqns:
        if equation.primitive.name == "split" and equation.params["axis"] == 1:
            group = tuple(positions[piece] for piece in equation.outvars if piece in positions)
            if len(group) > 1:
                found.append(group)
    return tuple(found)
