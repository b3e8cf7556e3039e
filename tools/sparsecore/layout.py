"""Where each row of a table lies on the SparseCores: the layout of `jax-tpu-embedding`, as values.

Tables are stacked: they lie one behind the other on every core. With S cores row r of a table lies on core
`(r mod S + rotation) mod S`, at position `row_offset + r div S`. A stack is one array, core after core. The package
calls this MOD sharding. Its rules for padding are kept: rows of a table to a multiple of 8 * S, columns to one of 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError

# The package pads to what a core reads at once.
GRANULE = 8
# Its ids are int32.
MAX_STACK_ROWS = 2**31 - 1
_SHOWN_NAME = 50
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRows:
    """Rows of a batch that lie side by side on a core.

    Attributes:
      core, position: where the first of them lies.
      rows: which rows of the batch.
      count: how many.
    """

    core: int
    position: int
    rows: slice
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTable:
    """One table of a stack.

    Attributes:
      padded_rows: a multiple of the number of cores.
      row_offset: where its rows begin on every core.
      rotation: by how many cores its rows are turned.
    """

    name: str
    num_rows: int
    dim: int
    padded_rows: int
    row_offset: int
    rotation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Tables that share one array `[num_rows, dim]`.

    Attributes:
      num_cores: all SparseCores of all chips.
      num_rows, dim: padded.
    """

    name: str
    num_cores: int
    num_rows: int
    dim: int
    tables: tuple[PlacedTable, ...]

    @property
    def rows_per_core(self) -> int:
        return self.num_rows // self.num_cores

    def pieces(self, table: PlacedTable, first_row: int, count: int) -> Iterator[CoreRows]:
        """Where the rows `first_row` to `first_row + count - 1` of a table lie: at most one piece a core."""
        for at in range(min(count, self.num_cores)):
            row = first_row + at
            yield CoreRows(
                core=(row % self.num_cores + table.rotation) % self.num_cores,
                position=table.row_offset + row // self.num_cores,
                rows=slice(at, count, self.num_cores),
                count=-(-(count - at) // self.num_cores),
            )

    def padding(self, table: PlacedTable) -> Iterator[CoreRows]:
        """The positions of a table that no row has, on each core that has some."""
        for residue in range(self.num_cores):
            held = max(0, -(-(table.num_rows - residue) // self.num_cores))
            count = table.padded_rows // self.num_cores - held
            if count:
                core = (residue + table.rotation) % self.num_cores
                yield CoreRows(core=core, position=table.row_offset + held, rows=slice(0, 0), count=count)


def plan_stacks(
    tables: Mapping[str, tuple[int, int]], *, chips: int, cores: int, together: Sequence[Sequence[str]] = ()
) -> tuple[Stack, ...]:
    """The stacks that the package makes of tables: `stack_tables` of each group, and a stack for each other table.

    Args:
      tables: name → rows and columns.
      cores: SparseCores of a chip.
      together: names of tables that share a stack, in their order in it.

    Raises:
      ConfigurationError: there are no cores, or a group names no table or one twice.
    """
    if chips < 1 or cores < 1:
        raise ConfigurationError(
            f"Found {chips} chips with {cores} SparseCores each. Expected at least one of both. Pass what the model "
            "trains on, such as --chips 16 --cores 2."
        )
    named = [name for group in together for name in group]
    wrong = [name for name in named if name not in tables or named.count(name) > 1]
    if wrong:
        raise ConfigurationError(
            f"Found '{wrong[0]}' in --stack, {'twice' if wrong[0] in tables else 'which is no table of the commit'}. "
            f"Expected each of {', '.join(tables)} at most once. Write --stack users,items for two tables in one stack."
        )
    groups = [tuple(group) for group in together] + [(name,) for name in tables if name not in named]
    return tuple(_stack(group, tables, num_cores=chips * cores, rotation=cores) for group in groups)


def stack_name(names: Sequence[str]) -> str:
    """The name that the package gives to a stack of these tables."""
    joined = "_".join(names)
    if len(joined) <= _SHOWN_NAME:
        return joined
    return f"{joined[:_SHOWN_NAME]}...{hashlib.sha256(joined.encode()).hexdigest()[:_HASH_DIGITS]}"


def check_stack(stack: Stack) -> None:
    """Refuses a stack whose tables do not lie side by side in its array.

    Raises:
      ConfigurationError: naming the table.
    """
    cores = stack.num_cores
    if cores < 1 or stack.dim < 1 or stack.num_rows < 1 or stack.num_rows % max(1, cores):
        raise _no_layout(f"stack '{stack.name}' of [{stack.num_rows}, {stack.dim}] on {cores} cores")
    if stack.num_rows > MAX_STACK_ROWS:
        raise ConfigurationError(
            f"Found {stack.num_rows:,} rows in stack '{stack.name}'. Expected at most {MAX_STACK_ROWS:,}, since ids of "
            "jax-tpu-embedding are int32. Stack fewer tables."
        )
    free = 0
    for table in sorted(stack.tables, key=lambda table: table.row_offset):
        is_inside = 0 < table.num_rows <= table.padded_rows and 0 < table.dim <= stack.dim
        is_turned = 0 <= table.rotation < cores and table.padded_rows % cores == 0
        if not is_inside or not is_turned or table.row_offset < free:
            raise _no_layout(f"table '{table.name}' in stack '{stack.name}' as {table}")
        free = table.row_offset + table.padded_rows // cores
    if free > stack.rows_per_core:
        raise _no_layout(f"{free} rows a core in stack '{stack.name}', which has {stack.rows_per_core}")


def _stack(group: Sequence[str], tables: Mapping[str, tuple[int, int]], *, num_cores: int, rotation: int) -> Stack:
    placed, offset = [], 0
    for at, name in enumerate(group):
        num_rows, dim = tables[name]
        padded = _rounded_up(num_rows, GRANULE * num_cores)
        placed.append(
            PlacedTable(
                name=name,
                num_rows=num_rows,
                dim=dim,
                padded_rows=padded,
                row_offset=offset,
                rotation=at * rotation % num_cores,
            )
        )
        offset += padded // num_cores
    stack = Stack(
        name=stack_name(group),
        num_cores=num_cores,
        num_rows=offset * num_cores,
        dim=max(_rounded_up(table.dim, GRANULE) for table in placed),
        tables=tuple(placed),
    )
    check_stack(stack)
    return stack


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _no_layout(found: str) -> ConfigurationError:
    return ConfigurationError(
        f"Found {found}. Expected tables that lie side by side in their stack. Write the specification again, by "
        "create_proto_from_feature_specs of jax-tpu-embedding."
    )
