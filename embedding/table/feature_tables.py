"""`FeatureTables`: the tables of the features that a host pools, for work on all of them at once.

Between Python and the kernels, a feature is a line of numbers: where its bags, its rows and its vectors lie. What is
the same in every step is found out once. So hundreds of small tables cost little more than one of their size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES, STREAMING_FLOATS, aligned_empty, matrix_of
from podembed.embedding.kernels.bag_frames import NUM_BAGS, NUM_IDS, SPLITS, WEIGHTS
from podembed.embedding.kernels.crew import Crew, cut_into_runs
from podembed.embedding.kernels.many_tables import SPLIT_BYTES, divide_gradients, pool_tables
from podembed.embedding.kernels.pool import COMBINER_CODES
from podembed.embedding.table.table import Table
from podembed.embedding.table.together import GroupedTables, TableUpdates, group_together

_FLOAT_BYTES = 4
_LINE_FLOATS = CACHE_LINE_BYTES // _FLOAT_BYTES


class BlockLines:
    """Finds where blocks lie: int64 `[n, 4]`, of each matrix its address, the bytes from row to row, rows and columns.

    Blocks of the buffers of a run are the same objects in every step, so they are looked at once. They are not kept
    alive: whoever uses the lines does that.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[weakref.ref[np.ndarray]], np.ndarray]] = {}

    def of(self, blocks: Sequence[np.ndarray]) -> np.ndarray:
        """Lines of some blocks, not to be written to.

        Raises:
          ValueError: as `matrix_of`.
        """
        key = id(blocks[0]) if blocks else 0
        found = self._found.get(key)
        if found is not None and len(found[0]) == len(blocks) and all(map(_is_at, found[0], blocks)):
            return found[1]
        lines = np.array([(*matrix_of(block), *block.shape) for block in blocks], np.int64).reshape(-1, 4)
        if len(self._found) >= self._MOST:
            self._found.clear()
        self._found[key] = [weakref.ref(block) for block in blocks], lines
        return lines


def _is_at(reference: weakref.ref[np.ndarray], block: np.ndarray) -> bool:
    return reference() is block


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFeature:
    """A feature that this host pools.

    Attributes:
      table: position in the list of tables.
      pooling: the combiner of `pool`: a sum, where this host has a part of each bag.
      combiner: of the whole bag.
    """

    table: int
    pooling: str
    combiner: str


@dataclass(slots=True, eq=False)
class ScaledGradients:
    """Gradients as they enter the sums of a step, where those are not the bags' own.

    Attributes:
      where: (host, feature) of each, by number.
      lines: int64 `[n, 3]`: the address of each, the bytes from row to row, and its rows.
      is_weighted: bool `[n]`: one gradient an id. The others have one a bag.
      memory: float32 in which all of them lie.
    """

    where: np.ndarray
    lines: np.ndarray
    is_weighted: np.ndarray
    memory: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    def weighted(self, dims: np.ndarray) -> Iterable[tuple[int, int, np.ndarray]]:
        """Of each with weights the host, the number of the feature, and the gradients of its ids, to be filled."""
        start = self.memory.ctypes.data
        for at in np.flatnonzero(self.is_weighted):
            (host, number), (address, _, count) = self.where[at].tolist(), self.lines[at].tolist()
            first, dim = (address - start) // _FLOAT_BYTES, int(dims[number])
            yield host, number, self.memory[first : first + count * dim].reshape(count, dim)


NOTHING_SCALED = ScaledGradients(np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int64), np.zeros(0, bool))


class FeatureTables:
    """See the module. Tables change through `update` only.

    Args:
      tables: all tables of the job.
      features: those pooled here, in the order of the frames that ask for them.
      num_hosts: that ask.

    Attributes:
      dims: int64 `[num_features]`, widths.
      held: positions of the features' tables, in the order of the features.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[PooledFeature], *, num_hosts: int) -> None:
        self._tables = tables
        self.held = list(dict.fromkeys(feature.table for feature in features))
        self._updates = TableUpdates(tables, self.held)
        rows = [tables[feature.table].store.arrays["rows"] for feature in features]
        self._rows = BlockLines().of(rows)[:, :2]
        self.dims = np.array([own.shape[1] for own in rows], np.int64)
        self._pooling = np.array([COMBINER_CODES[feature.pooling] for feature in features], np.int64)
        self._combiners = np.array([COMBINER_CODES[feature.combiner] for feature in features], np.int64)
        self._divides = np.array([feature.combiner != "sum" for feature in features], bool)
        self._divides_any = bool(self._divides.any())
        # Features of one width are worked on by one call.
        self._of_dim: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for dim in np.unique(self.dims).tolist():
            own = np.flatnonzero(self.dims == dim)
            self._of_dim[dim] = own, self._rows[own], self._pooling[own]
        # Lists of bags as they are grouped: table by table, and of each table host by host.
        of_table: dict[int, list[int]] = {table: [] for table in self.held}
        for at, feature in enumerate(features):
            of_table[feature.table].append(at)
        order = [
            host * len(features) + at for table in self.held for host in range(num_hosts) for at in of_table[table]
        ]
        self._list_order = np.array(order, np.int64)
        self._firsts = np.cumsum([0, *(num_hosts * len(of_table[table]) for table in self.held)])

    def pool(self, asked: Sequence[np.ndarray], out: Sequence[np.ndarray], crew: Crew) -> None:
        """Combines the rows of all bags of several hosts.

        Args:
          asked: per host int64 `[num_features, BAGS]`, see `kernels.bag_frames`.
          out: per host, where the vectors go, as `BlockLines` gives it.

        Raises:
          ValueError: a block has not one vector a bag, or another width than the table. Nothing is written then.
        """
        all_asked, all_out = np.stack(asked, axis=1), np.stack(out, axis=1)
        self._check(all_asked, all_out)
        floats = all_asked[:, :, NUM_BAGS] * self.dims[:, None]
        aligned = (all_out[:, :, :2] % CACHE_LINE_BYTES == 0).all(axis=2)
        streams = (floats >= STREAMING_FLOATS) & aligned
        calls, total = [], 0
        for dim, (features, rows, pooling) in self._of_dim.items():
            # Feature by feature, since rows that one host's bags brought into the caches serve those of the others.
            every = len(features) == len(self.dims)
            bags, where, streamed = (
                (array if every else array[features]).reshape(len(features) * len(asked), *array.shape[2:])
                for array in (all_asked, all_out, streams)
            )
            sizes = (bags[:, NUM_IDS] + bags[:, NUM_BAGS]) * dim
            static = (rows, pooling) if len(asked) == 1 else (rows.repeat(len(asked), 0), pooling.repeat(len(asked)))
            calls += _calls(dim, (bags, *static, streamed, where[:, :2]), sizes, crew)
            total += int(sizes.sum())
        crew.run(calls, size=total)

    def group(
        self, asked: Sequence[np.ndarray], gradients: Sequence[np.ndarray], crew: Crew
    ) -> tuple[GroupedTables, ScaledGradients]:
        """Sorts what all hosts ask by row.

        Args:
          asked: as of `pool`, of all hosts.
          gradients: per host, where those of its vectors will lie, as `BlockLines` gives it.

        Returns:
          By table its touched rows. Gradients that `scale` must make before they are used.

        Raises:
          ValueError: a row is not held here, or a block is not one of its bags, as of `pool`.
        """
        bags, lines = np.stack(asked), np.stack(gradients)
        self._check(bags.swapaxes(0, 1), lines.swapaxes(0, 1))
        lists = np.concatenate([bags[:, :, : NUM_BAGS + 1], lines[:, :, :2]], axis=2)
        scaled = self._scaled(bags)
        if len(scaled.where):
            at = tuple(scaled.where.T)
            lists[*at, NUM_BAGS + 1 :] = scaled.lines[:, :2]
            # Each id with a weight has a gradient of its own: it is like a bag of one.
            numbers = np.arange(int(bags[:, :, NUM_IDS].max(initial=0)) + 1)
            weighted = tuple(scaled.where[scaled.is_weighted].T)
            lists[*weighted, SPLITS] = numbers.ctypes.data
            lists[*weighted, NUM_BAGS] = bags[*weighted, NUM_IDS]
        return self._grouped(lists, crew), scaled

    def _grouped(self, lists: np.ndarray, crew: Crew) -> GroupedTables:
        flat = lists.reshape(-1, lists.shape[2])[self._list_order]
        return group_together(self._tables, self.held, flat, self._firsts, crew)

    def _scaled(self, bags: np.ndarray) -> ScaledGradients:
        is_weighted = bags[:, :, WEIGHTS] != 0
        if not self._divides_any and not is_weighted.any():
            return NOTHING_SCALED
        where = np.argwhere(is_weighted | self._divides)
        at = tuple(where.T)
        counts, dims = np.where(is_weighted, bags[:, :, NUM_IDS], bags[:, :, NUM_BAGS])[at], self.dims[where[:, 1]]
        floats = -(-counts * dims // _LINE_FLOATS) * _LINE_FLOATS
        memory = aligned_empty((int(floats.sum()),))
        starts = memory.ctypes.data + _FLOAT_BYTES * (np.cumsum(floats) - floats)
        return ScaledGradients(where, np.stack([starts, _FLOAT_BYTES * dims, counts], 1), is_weighted[at], memory)

    def scale(
        self, scaled: ScaledGradients, asked: Sequence[np.ndarray], gradients: Sequence[np.ndarray], crew: Crew
    ) -> None:
        """Divides the gradients of bags without weights by their denominators, into `scaled`.

        Args:
          asked, gradients: as of `group`, once the gradients are there.

        Raises:
          ValueError: a block is not one of its bags, as of `pool`.
        """
        calls, total = [], 0
        where, is_plain = scaled.where, ~scaled.is_weighted
        if not is_plain.any():
            return
        all_asked, all_gradients, dims = np.stack(asked), np.stack(gradients), self.dims[where[:, 1]]
        self._check(all_asked.swapaxes(0, 1), all_gradients.swapaxes(0, 1))
        for dim in self._of_dim:
            mine = np.flatnonzero(is_plain & (dims == dim))
            if len(mine):
                at = tuple(where[mine].T)
                bags, source = all_asked[at], all_gradients[at][:, :2]
                arguments = bags, source, self._combiners[at[1]], scaled.lines[mine, :2]
                calls.append(partial(divide_gradients, dim, *arguments))
                total += 2 * dim * int(bags[:, NUM_BAGS].sum())
        crew.run(calls, size=total)

    def _check(self, bags: np.ndarray, blocks: np.ndarray) -> None:
        """Of every feature and host, whether its block has one vector a bag, as wide as its table's rows."""
        if (blocks[:, :, 2] == bags[:, :, NUM_BAGS]).all() and (blocks[:, :, 3] == self.dims[:, None]).all():
            return
        found = blocks[:, :, 2:]
        expected = np.stack([bags[:, :, NUM_BAGS], np.broadcast_to(self.dims[:, None], bags.shape[:2])], axis=2)
        at = tuple(np.argwhere((found != expected).any(axis=2))[0].tolist())
        raise ValueError(
            f"Found a block of shape {tuple(found[at].tolist())} for feature {at[0]} of those pooled here. Expected "
            f"{tuple(expected[at].tolist())}: one vector a bag, as wide as a row. Pass the blocks of that batch."
        )

    def update(self, grouped: GroupedTables, learning_rates: Sequence[float], crew: Crew) -> None:
        """Updates each touched row once. The gradients lie where `group` got them from.

        Args:
          learning_rates: one a table of the job.
        """
        self._updates.run(grouped, learning_rates, crew)


def _calls(dim: int, arguments: tuple[np.ndarray, ...], sizes: np.ndarray, crew: Crew) -> list[partial[None]]:
    """Calls of `pool_tables` for the threads of a crew."""
    if crew.num_threads == 1:
        return [partial(pool_tables, dim, *arguments)]
    bags, rows, combiners, streams, out = arguments
    calls = []
    for items, firsts, stops in cut_into_runs(bags[:, NUM_BAGS], sizes, crew.num_threads):
        own, vectors = bags[items], out[items]
        own[:, SPLITS] += SPLIT_BYTES * firsts
        own[:, NUM_BAGS] = stops - firsts
        vectors[:, 0] += firsts * vectors[:, 1]
        calls.append(partial(pool_tables, dim, own, rows[items], combiners[items], streams[items], vectors))
    return calls
