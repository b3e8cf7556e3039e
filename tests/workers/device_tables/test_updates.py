"""The rules of row optimizers on devices beside `Table.update`, whose bits numpy gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.workers.device.tables.lines import as_rows, shape_in_lines
from podembed.workers.device.tables.updates import CHANGED, Entries, sums_by_row, update_all, update_named
from tests.embedding.row_optimizers.test_update_rules import (
    NUM_ROWS,
    OPTIONS,
    RATE,
    RULES,
    a_step,
    make_table,
    with_options,
)
from tests.long_tests import long_case
from tests.workers.device_tables.jobs import OWN

DIM = 8
# Each rule as it is, and each option with the simplest rule.
CASES = [(rule, "plain") for rule in RULES] + [("adagrad", option) for option in OPTIONS if option != "one by one"]


def by_sums(table: Any, entries: Entries, optimizer: Any) -> Any:
    sums = sums_by_row(entries, NUM_ROWS)
    return update_all(table, sums, optimizer, jnp.float32(RATE), widths=widths_of(optimizer))


def by_runs(table: Any, entries: Entries, optimizer: Any) -> Any:
    return update_named(table, entries, optimizer, jnp.float32(RATE), widths=widths_of(optimizer), in_a_tree=False)


def in_a_tree(table: Any, entries: Entries, optimizer: Any) -> Any:
    return update_named(table, entries, optimizer, jnp.float32(RATE), widths=widths_of(optimizer), in_a_tree=True)


def widths_of(optimizer: Any) -> dict[str, int]:
    return {"rows": DIM} | {slot.name: slot.columns(DIM) for slot in optimizer.slots}


# make test has each case with one update, and each update with a third of them.
@pytest.mark.parametrize(
    ("update", "rule", "option"),
    [
        (update, rule, option) if (at + shift) % 3 == 0 else long_case(update, rule, option)
        for at, (rule, option) in enumerate(CASES)
        for shift, update in enumerate([by_sums, by_runs, in_a_tree])
    ],
)
def test_a_rule_on_devices_is_that_of_hosts(update: Any, rule: str, option: str) -> None:
    assert_same_on_devices(update, with_options(rule, option))


@pytest.mark.parametrize("update", [by_sums, by_runs])
def test_a_rule_of_the_user_on_devices_is_that_of_hosts(update: Any) -> None:
    assert_same_on_devices(update, OWN)


def assert_same_on_devices(update: Any, optimizer: Any) -> None:
    if optimizer.touches_all_rows and update is not by_sums:
        pytest.skip("rows that no sample named have no entries")
    table, random = make_table(optimizer, DIM), np.random.default_rng(1)
    # The order in which compiled programs get them.
    widths = dict(sorted(widths_of(optimizer).items()))
    held: dict[str, Any] = {"rows": table.rows, **table.slots}
    if optimizer.touches_all_rows:
        held = {name: jnp.array(held[name]) for name in widths}
    else:
        # In lines of 128 numbers, with something behind the last row.
        held = {name: jnp.array(np.resize(held[name], shape_in_lines(NUM_ROWS, own))) for name, own in widths.items()}
        held[CHANGED] = jnp.zeros(NUM_ROWS, bool)
    behind = {name: np.array(as_rows(held[name], own)[NUM_ROWS:]) for name, own in widths.items()}
    named = set[int]()
    step = jax.jit(lambda held, entries: update(held, entries, optimizer))
    for _ in range(3):
        rows, gradients = a_step(random, NUM_ROWS, DIM, 9)
        table.update(rows, gradients, RATE)
        named.update(rows.tolist())
        # Places without an id, of padding: no row gets their gradients.
        padded = np.concatenate([rows, [-1, -1, -1]]).astype(np.int32)
        some = np.concatenate([gradients, np.full((3, DIM), 7, np.float32)])
        held = step(held, Entries(jnp.array(padded), jnp.array(some)))
    if not optimizer.touches_all_rows:
        assert np.flatnonzero(held[CHANGED]).tolist() == sorted(named)
    for name, expected in {"rows": table.rows, **table.slots}.items():
        found = as_rows(held[name], widths[name])
        np.testing.assert_allclose(found[:NUM_ROWS], expected, rtol=2e-5, atol=2e-7, err_msg=name)
        if not optimizer.touches_all_rows:
            assert np.array_equal(found[NUM_ROWS:], behind[name]), "what is behind the last row stays"
