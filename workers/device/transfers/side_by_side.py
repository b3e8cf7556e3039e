"""Which gradients of a step are columns of one array.

A model that lays activations side by side gets one array of their gradients. JAX then cuts it into an array for each
feature, which costs as much as the copy to the host. A step that returns that array itself spares this. Its gradients
are the same up to the rounding of what XLA fuses. Where another release of JAX writes a step in another way, nothing is
found. Each gradient then is an array of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# An array with more other columns costs more than it spares: its host copies all of it where devices are several.
_LEAST_SHARE = 0.5


class Run(NamedTuple):
    """Gradients that lie next to each other in the columns of an array.

    Attributes:
      first_column: where the first of them begins.
      positions: positions of the gradients, in the order in which they lie.
    """

    first_column: int
    positions: tuple[int, ...]


Together = tuple[tuple[Run, ...], ...]
"""The runs in each array."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A step that also returns the arrays of which gradients are columns.

    Attributes:
      together: what lies in these arrays; empty if nothing does.
      step: of the leaves of all arguments, as one device sees them. Returns the leaves of all results, then the arrays.
    """

    together: Together = ()
    step: Callable[..., Sequence[jax.Array]] | None = None


def side_by_side(step: ClosedJaxpr, outputs: range) -> SideBySide:
    """The runs that a step has side by side.

    Args:
      step: a map over all devices.
      outputs: which of its results are asked about; positions are counted from the first.
    """
    inner, constants = _as_one_device_sees_it(step)
    if inner is None:
        return SideBySide()
    equations, results = _inlined(inner)
    positions = {results[at]: at - outputs.start for at in outputs if not isinstance(results[at], Literal)}
    found = [(whole, runs) for whole, runs in _cuts(equations, positions) if runs]
    if not found:
        return SideBySide()
    arrays, together = zip(*found, strict=True)
    flat = inner.replace(eqns=equations, outvars=[*results, *arrays])
    run = jaxpr_as_fun(ClosedJaxpr(flat, ()))
    return SideBySide(together, lambda *leaves: run(*constants, *leaves))


def _as_one_device_sees_it(step: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """The step within the map, and the constants that it gets before its arguments; None if it is not only a map."""
    outer = step.jaxpr
    if [equation.primitive.name for equation in outer.eqns] != ["shard_map"]:
        return None, []
    (mapped,) = outer.eqns
    values = dict(zip(outer.constvars, step.consts, strict=True))
    constants = [values[one] for one in mapped.invars if one in values]
    if [*mapped.invars[len(constants) :]] != [*outer.invars] or [*mapped.outvars] != [*outer.outvars]:
        return None, []
    return mapped.params["jaxpr"], constants


def _inlined(step: Any) -> tuple[list[Any], list[Any]]:
    """The equations of a step, in which what is compiled by itself and cuts or hands through arrays is written out.
    And its results.
    """
    equations: list[Any] = []
    written = {*step.constvars, *step.invars}.union(*(equation.outvars for equation in step.eqns))

    def walk(within: Any, same: dict[Any, Any]) -> list[Any]:
        """The results, in terms of the step. `same` has what each argument is there."""
        for equation in within.eqns:
            equation = equation.replace(invars=[_of(same, one) for one in equation.invars])
            inner = _worth_a_look(equation)
            # JAX gives variables to several functions, and one may be called twice. Two meanings cannot be written out.
            own = {result for one in inner.eqns for result in one.outvars} if inner is not None else set()
            if inner is None or not own.isdisjoint(written):
                equations.append(equation)
                continue
            written.update(own)
            results = walk(inner, dict(zip(inner.invars, equation.invars, strict=True)))
            same.update(zip(equation.outvars, results, strict=True))
        return [_of(same, one) for one in within.outvars]

    results = walk(step, {})
    return equations, results


def _worth_a_look(equation: Any) -> Any:
    """The program that an equation compiles by itself, if it cuts arrays or hands them through, as `jnp.hstack`
    does.
    """
    if equation.primitive.name != "jit" or equation.params["jaxpr"].consts:
        return None
    inner = equation.params["jaxpr"].jaxpr
    hands_through = not {*inner.invars}.isdisjoint(one for one in inner.outvars if not isinstance(one, Literal))
    return inner if hands_through or any(_cuts_columns(one) or _worth_a_look(one) for one in inner.eqns) else None


def _cuts_columns(equation: Any) -> bool:
    return equation.primitive.name == "split" and equation.params["axis"] == 1 and _is_matrix(equation.outvars[0])


def _cuts(equations: Sequence[Any], positions: dict[Any, int]) -> Iterator[tuple[Any, tuple[Run, ...]]]:
    """Arrays that equations cut into what has a position, with the runs in them."""
    for equation in equations:
        if _cuts_columns(equation):
            (whole,), runs, column, num_wanted = equation.invars, [], 0, 0
            for is_asked, run in groupby(equation.outvars, key=lambda piece: piece in positions):
                pieces = [*run]
                num_columns = sum(piece.aval.shape[1] for piece in pieces)
                if is_asked:
                    runs.append(Run(column, tuple(positions[piece] for piece in pieces)))
                    num_wanted += num_columns
                column += num_columns
            if num_wanted >= _LEAST_SHARE * column:
                yield whole, tuple(runs)


def _is_matrix(variable: Any) -> bool:
    return len(variable.aval.shape) == 2


def _of(same: dict[Any, Any], variable: Any) -> Any:
    """The variable that this one is."""
    return variable if isinstance(variable, Literal) else same.get(variable, variable)
