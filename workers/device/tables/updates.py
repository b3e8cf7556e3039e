"""One update of each row that a step named, on every device alike.

Gradients of a row are summed over all devices, then the row's rule is applied once, as `embedding.kernels.updates`
does it. Two ways lead to these sums. Of a table with fewer rows than ids come, each device has a sum for each row, and
these are summed over the devices. Of a larger one, ids and gradients of all devices are gathered and sorted. Either
way all devices get the same sums, so their copies stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from podembed.embedding.row_optimizers.base import Optimizer
from podembed.workers.device.tables.lines import LINE, as_rows, rows_at, with_rows

ROWS = "rows"
CHANGED = "changed/"  # no name that a slot may have
Arrays = Mapping[str, jax.Array]
"""Arrays of a table: `rows` and each slot, `[num_rows, width]`, or lines of these rows. And `CHANGED`, bool
`[num_rows]`: the rows that steps named since hosts took them. It is not there if all rows change, or none.
"""


def layout_of(width: int) -> Layout | None:
    """How an array lies in a device's memory: one line after the other, if these are wide; else as the compiler likes.

    A line fills whole registers of 128 numbers on a TPU, so narrow ones would need more than twice their memory. CPUs
    and GPUs have all of them one after the other.
    """
    return Layout((0, 1)) if width >= 64 else None


def laid_out(values: jax.Array) -> jax.Array:
    """An array of a table, within a step, where it shall lie by rows."""
    layout = layout_of(values.shape[1])
    return values if layout is None else with_layout_constraint(values, layout)


class Entries(NamedTuple):
    """Gradients of ids.

    Attributes:
      rows: int32 `[m]`; -1 for none.
      gradients: float32 `[m, dim]`.
    """

    rows: jax.Array
    gradients: jax.Array


def sums_by_row(entries: Entries, num_rows: int) -> jax.Array:
    """Float32 `[num_rows, dim + 1]`: the sum of each row, and how many entries it has."""
    dim = entries.gradients.shape[1]
    counted = jnp.concatenate([entries.gradients, jnp.ones((entries.rows.shape[0], 1))], axis=1)
    places = jnp.where(entries.rows < 0, num_rows, entries.rows)
    return jnp.zeros((num_rows, dim + 1)).at[places].add(counted, mode="drop")


def update_all(
    table: Arrays, sums: jax.Array, optimizer: Optimizer, rate: jax.Array, *, widths: Mapping[str, int]
) -> dict[str, jax.Array]:
    """The table after an update of the rows that have entries, or of all rows if the rule says so.

    Args:
      sums: sums as `sums_by_row`, over all devices.
      widths: columns of a row, by array.
    """
    num_rows = len(sums)
    old = {name: as_rows(table[name], width)[:num_rows] for name, width in widths.items()}
    new = updated_rows(old, sums[:, :-1], optimizer, rate)
    if optimizer.touches_all_rows:
        return new
    is_touched = sums[:, -1:] > 0
    after = {}
    for name, values in new.items():
        rows = jnp.where(is_touched, values, old[name])
        padding = as_rows(table[name], widths[name])[num_rows:]
        after[name] = jnp.concatenate([rows, padding]).reshape(table[name].shape)
    return {**after, CHANGED: table[CHANGED] | is_touched[:, 0]}


def update_named(
    table: Arrays,
    entries: Entries,
    optimizer: Optimizer,
    rate: jax.Array,
    *,
    widths: Mapping[str, int],
    in_a_tree: bool,
) -> dict[str, jax.Array]:
    """The table after an update of the rows that the entries of all devices name.

    Args:
      widths: columns of a row, by array.
      in_a_tree: sums in an order that is fixed also where additions to one place have none, as on GPUs.
    """
    num = entries.rows.shape[0]
    # Behind the padding of the table's last line.
    behind = table[CHANGED].shape[0] + LINE
    rows = jnp.where(entries.rows < 0, behind, entries.rows)
    order = jnp.argsort(rows, stable=True)
    rows = rows[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    number = jnp.cumsum(is_first) - 1
    sums = sums_of_runs(entries.gradients[order], is_first, number, in_a_tree=in_a_tree)
    # Places that no row takes lie behind the table, each at a place of its own, and are dropped.
    places = (behind + 1 + jnp.arange(num, dtype=rows.dtype)).at[number].set(rows)
    # Said before and after: what a loop carries would get another layout, and be copied in each round.
    changed = table[CHANGED].at[places].set(True, mode="drop", unique_indices=True)
    table = {name: laid_out(values) for name, values in table.items() if name != CHANGED}
    old = {name: rows_at(values, places, widths[name], fill=1) for name, values in table.items()}
    new = updated_rows(old, sums, optimizer, rate)
    after = {name: laid_out(with_rows(table[name], places, laid_out(values))) for name, values in new.items()}
    return {**after, CHANGED: changed}


def sums_of_runs(
    values: jax.Array, is_first: jax.Array, number: jax.Array, *, num: int | None = None, in_a_tree: bool
) -> jax.Array:
    """The sum of each run of `values` `[m, dim]`, by the number of the run, and zeros where there is none.

    Args:
      is_first, number: `[m]`: which value begins a run, and the number of its run, rising.
      num: how many sums; others are dropped. None for `m`.
      in_a_tree: sums in an order that is fixed also where additions to one place have none, as on GPUs.
    """
    num = len(number) if num is None else num
    if not in_a_tree:
        return jax.ops.segment_sum(values, number, num_segments=num, indices_are_sorted=True)

    def joined(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begins, total = right
        return left[0] | begins, jnp.where(begins, total, left[1] + total)

    _, running = jax.lax.associative_scan(joined, (is_first[:, None], values))
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    places = jnp.where(is_last, number, num)
    return jnp.zeros((num, values.shape[1]), values.dtype).at[places].set(running, mode="drop")


def updated_rows(old: Arrays, gradients: jax.Array, optimizer: Optimizer, rate: jax.Array) -> dict[str, jax.Array]:
    """Rows and slots after the rule, in the order of the kernels: limit, decay, rule, limit."""
    # By name: compiled programs get the arrays of a table in alphabetical order.
    weight, names = old[ROWS], [slot.name for slot in optimizer.slots]
    if optimizer.clip_gradient_min is not None or optimizer.clip_gradient_max is not None:
        gradients = jnp.clip(gradients, optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    if optimizer.weight_decay_factor:
        decay = jnp.float32(optimizer.weight_decay_factor)
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            decay = decay * rate
        weight = weight - decay * weight
    new, slots = optimizer.oracle(weight, [old[name] for name in names], gradients, rate, xp=jnp)
    if optimizer.clip_weight_min is not None or optimizer.clip_weight_max is not None:
        new = jnp.clip(new, optimizer.clip_weight_min, optimizer.clip_weight_max)
    return {ROWS: new, **dict(zip(names, slots, strict=True))}
