"""Which trace of JAX the present code belongs to, so that objects which change refuse to be changed while something is
traced.

A function under `jax.jit`, `grad`, `vmap` or `scan` runs once with placeholders in the place of numbers. A change that
it makes to an object from outside happens then, not at each call. It may leave a placeholder in it that means nothing
afterwards.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # it moved there after JAX 0.7
    from jax.core import get_opaque_trace_state  # pyright: ignore[reportAttributeAccessIssue]

# Modules are imported outside any traced function; JAX has no public name for this state.
_OUTSIDE = get_opaque_trace_state(convention="flax")
# Its result is a tracer exactly where JAX compiles what is called.
_identity = jax.jit(lambda value: value)


def current_trace() -> Any:
    """The innermost trace that is going on in this thread, to be compared with another one; None where none is."""
    state = get_opaque_trace_state(convention="flax")
    return None if state == _OUTSIDE else state


def require_eager(method: str, remedy: str) -> None:
    """Raises RuntimeError inside a function under jit, scan or the like, where a call would happen once, while tracing.

    Args:
      remedy: a sentence that says what to do instead.
    """
    # Where no trace goes on at all, which costs less to ask, none can be one that compiles.
    if current_trace() is not None and isinstance(_identity(np.float32(0)), Tracer):
        raise RuntimeError(
            f"{method} was called inside a function that JAX traces, or inside its control flow. Expected a call "
            f"outside: inside it would happen once, while tracing. {remedy}"
        )


def require_own_trace(trace: Any, what: str, remedy: str) -> None:
    """Raises RuntimeError unless an object is about to change in the trace in which it was made.

    Args:
      trace: `current_trace()` where the object was made.
      what: the change, as in "an assignment to variable 'w'".
      remedy: a sentence that says how to do it inside a traced function.
    """
    here = current_trace()
    if here == trace:
        return
    if here is None:
        raise RuntimeError(
            f"Found {what}, which was made inside a function that JAX traces. Expected an object made outside, since "
            "that function has ended and its placeholders are no numbers. Make it outside the function."
        )
    raise RuntimeError(
        f"Found {what} inside a function that JAX traces (jit, grad, vmap, scan and the like). Expected it outside: "
        f"inside it would happen once, while tracing, and leave a placeholder instead of a number. {remedy}"
    )
