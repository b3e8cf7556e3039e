"""Narrow rows side by side in *lines* of up to 128 numbers, as the memory of a TPU has them.

A TPU moves 128 numbers at once. Left to itself, its compiler lays a table of 64 columns out by columns and copies it in
each step, or by rows with as much padding. With two rows in a line it takes the memory of its numbers, and a step
touches the lines of its rows alone. On CPUs and GPUs the bytes are those of rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LINE = 128


def rows_a_line(width: int) -> int:
    """How many rows of so many columns lie in a line."""
    return max(1, LINE // width)


def shape_in_lines(num_rows: int, width: int) -> tuple[int, int]:
    """Of the lines of a table. What is left of the last one is padding."""
    return -(-num_rows // rows_a_line(width)), rows_a_line(width) * width


def as_rows(lines: Any, width: int) -> Any:
    """The rows of lines, with those of the padding: `[n, width]`, of numpy or JAX."""
    return lines.reshape(-1, width)


def rows_at(lines: jax.Array, rows: jax.Array, width: int, *, fill: float) -> jax.Array:
    """Some rows, `[..., width]`; `fill` for those behind the lines.

    Args:
      lines: rows of `width` columns, one or several in a line.
      rows: int32 `[...]`.
    """
    if lines.shape[1] == width:
        return lines.at[rows].get(mode="fill", fill_value=fill)
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    found = jax.lax.gather(lines, _places(lines, rows, width), numbers, (1, width), mode="fill", fill_value=fill)
    return found.reshape(*rows.shape, width)


def with_rows(lines: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """The lines with other values in some rows, each named once. Those behind the lines are dropped.

    Args:
      rows: int32 `[n]`.
      values: `[n, width]`.
    """
    width = values.shape[1]
    if lines.shape[1] == width:
        return lines.at[rows].set(values, mode="drop", unique_indices=True)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return jax.lax.scatter(lines, _places(lines, rows, width), values, numbers, unique_indices=True, mode="drop")


def _places(lines: jax.Array, rows: jax.Array, width: int) -> jax.Array:
    """int32 `[n, 2]`: line and column where each row begins."""
    line, place = jnp.divmod(rows.reshape(-1), lines.shape[1] // width)
    return jnp.stack([line, place * width], axis=1)
