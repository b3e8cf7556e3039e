"""Places of rows against the formula of the layout, row by row, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.sparsecore.layout import Stack, check_stack, plan_stacks, stack_name
from podembed.tools.sparsecore.specification import from_bytes, to_bytes

SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=4)


@given(sizes=SIZES, chips=st.integers(1, 5), cores=st.integers(1, 4), batch=st.integers(1, 90))
def test_each_row_has_the_place_that_the_formula_says(sizes, chips: int, cores: int, batch: int) -> None:
    tables = {f"t{at}": size for at, size in enumerate(sizes)}
    (stack,) = plan_stacks(tables, chips=chips, cores=cores, together=[[*tables]])
    taken: set[tuple[int, int]] = set()
    for at, table in enumerate(stack.tables):
        assert (table.num_rows, table.dim) == tables[table.name]
        places = {}
        for first in range(0, table.num_rows, batch):
            count = min(batch, table.num_rows - first)
            for piece in stack.pieces(table, first, count):
                rows = range(first, first + count)[piece.rows]
                assert len(rows) == piece.count
                places |= {row: (piece.core, piece.position + number) for number, row in enumerate(rows)}
        total = chips * cores
        assert places == {
            row: ((row % total + at * cores) % total, table.row_offset + row // total) for row in range(table.num_rows)
        }
        padding = {(p.core, p.position + number) for p in stack.padding(table) for number in range(p.count)}
        assert len(padding) == table.padded_rows - table.num_rows
        for found in (set(places.values()), padding):
            assert not found & taken
            taken |= found
    assert taken == {(core, position) for core in range(stack.num_cores) for position in range(stack.rows_per_core)}


def stacks() -> tuple[Stack, ...]:
    return plan_stacks({"a": (5, 3), "b": (999, 8), "c": (64, 20)}, chips=4, cores=2, together=[["b", "a"]])


def test_sizes_are_padded_and_stacks_are_named_as_the_package_does_it() -> None:
    both, alone = stacks()
    assert (both.name, both.num_rows, both.dim) == ("b_a", 1024 + 64, 8)
    assert [(t.name, t.row_offset, t.rotation) for t in both.tables] == [("b", 0, 0), ("a", 128, 2)]
    assert (alone.name, alone.num_rows, alone.dim) == ("c", 64, 24)
    assert stack_name(["x" * 30, "y" * 30]) == f"{'x' * 30}_{'y' * 19}...{stack_name(['x' * 30, 'y' * 30])[-12:]}"


def test_the_message_says_all_of_a_layout() -> None:
    assert from_bytes(to_bytes(stacks()), "spec") == stacks()


@pytest.mark.parametrize("data", [b"", b"no message", to_bytes(stacks())[:-3], to_bytes([stacks()[0]] * 2)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="Expected an EmbeddingSpecProto"):
        from_bytes(data, "spec")


def test_tables_that_do_not_fit_are_refused() -> None:
    stack = stacks()[0]
    first, second = stack.tables
    for wrong in (
        replace(stack, num_rows=stack.num_rows - 8),
        replace(stack, num_rows=stack.num_rows + 1),
        replace(stack, num_cores=0),
        replace(stack, tables=(first, replace(second, row_offset=127))),
        replace(stack, tables=(replace(first, num_rows=1025), second)),
        replace(stack, tables=(first, replace(second, rotation=8))),
        replace(stack, tables=(first, replace(second, dim=9))),
    ):
        with pytest.raises(ConfigurationError, match="Expected tables that lie side by side"):
            check_stack(wrong)
    with pytest.raises(ConfigurationError, match="ids of jax-tpu-embedding are int32"):
        plan_stacks({"a": (2**31, 8)}, chips=1, cores=1)


@pytest.mark.parametrize("together", [["a", "x"], ["a", "a"]])
def test_groups_that_name_no_table_or_one_twice_are_refused(together: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="at most once"):
        plan_stacks({"a": (4, 4)}, chips=1, cores=1, together=[together])
    with pytest.raises(ConfigurationError, match="Found 0 chips"):
        plan_stacks({"a": (4, 4)}, chips=0, cores=1)
