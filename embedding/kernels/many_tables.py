"""Kernels that work on the features of many tables in one call.

A kernel for one feature takes microseconds to call from Python, and as long to prepare. With hundreds of tables of a
few thousand ids each, that is a quarter of what a host computes. Here arrays travel as numbers: their addresses and
lengths, one line of an int64 matrix a feature. The work itself is that of `pool` and `grouped`, so the bits are the
same. Whoever makes the lines answers for them: nothing is checked here but row numbers, and all memory must live during
the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types
from numba.np import arrayobj

from podembed.embedding.kernels import grouped
from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.bag_frames import DIVISORS, NUM_BAGS, NUM_IDS, ROWS, SPLITS, WEIGHTS
from podembed.embedding.kernels.ids import bad_local_row
from podembed.embedding.kernels.pool import denominator, pool_bags
from podembed.embedding.kernels.row_numbers import dense_row
from podembed.embedding.kernels.row_vectors import columns_of, inlined, intrinsic, jit, load, splat, store, width_of

SPLIT_BYTES = 8
NUM_LIST_COLUMNS = 7
_START, _STRIDE = 5, 6

_COUNTED, _HASHED, _MARKED = 0, 1, 2
_LINE, _MOST = 10, 5
_BITS_OF_ONE = np.int64(np.float32(1).view(np.int32))


def _array_over(context, builder, array_type, address, shape):
    array = context.make_array(array_type)(context, builder)
    size_bytes = ir.Constant(shape[0].type, array_type.dtype.bitwidth // 8)
    strides = [size_bytes]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(address, array.data.type)
    arrayobj.populate_array(array, data=data, shape=shape, strides=strides, itemsize=size_bytes, meminfo=None)
    return array._getvalue()


@intrinsic
def array_at(typing_context, address, count, dtype):
    """An array over memory that is there already."""
    array_type = types.Array(dtype.instance_type, 1, "C")

    def generate(context, builder, sig, args):
        return _array_over(context, builder, array_type, args[0], [args[1]])

    return array_type(types.int64, types.int64, dtype), generate


@intrinsic
def entries_at(typing_context, address, count, is_weighted):
    """As `array_at`, the addresses of gradients: int64 `[count]`, or `[count, 2]` unless `is_weighted` is None."""
    num_columns = 1 if isinstance(is_weighted, types.NoneType) else 2
    array_type = types.Array(types.int64, num_columns, "C")

    def generate(context, builder, sig, args):
        return _array_over(context, builder, array_type, args[0], [args[1], ir.Constant(args[1].type, 2)][:num_columns])

    return array_type(types.int64, types.int64, is_weighted), generate


def pool_tables(
    dim: int, asked: np.ndarray, tables: np.ndarray, combiners: np.ndarray, streams: np.ndarray, out: np.ndarray
) -> None:
    """As `kernels.pool.pool` for many features of one width.

    Args:
      asked: int64 `[n, BAGS]`; the splits of a feature may be a run of those of its batch.
      tables, out: int64 `[n, 2]`, matrices of rows and of vectors, as `kernels.arrays.matrix_of` gives them.
      combiners: int64 `[n]`, codes of `kernels.pool`.
      streams: bool `[n]`, whether vectors are written past the caches.
    """
    # Kernels are compiled for each order in memory that they meet.
    lines = (np.ascontiguousarray(array) for array in (asked, tables, combiners, streams, out))
    _pool_tables(width_of(dim), dim, *lines)


@jit
def _pool_tables(width, dim, asked, tables, combiners, streams, out):
    for at in range(asked.shape[0]):
        num_ids, num_bags, is_weighted = asked[at, NUM_IDS], asked[at, NUM_BAGS], asked[at, WEIGHTS] != 0
        pool_bags(
            width,
            dim,
            (tables[at, 0], tables[at, 1]),
            array_at(asked[at, ROWS], num_ids, np.int32),
            array_at(asked[at, SPLITS], num_bags + 1, np.int64),
            array_at(asked[at, WEIGHTS], num_ids if is_weighted else 0, np.float32),
            is_weighted,
            combiners[at],
            streams[at],
            (out[at, 0], out[at, 1]),
        )


def resolve_dense(keys: np.ndarray, tables: np.ndarray, asked: np.ndarray) -> tuple[int, int] | None:
    """Writes the rows of the keys of many features of dense tables.

    Args:
      keys: int64 `[n, 2]`: address of the keys of each feature, and the bytes of a key, 4 or 8. Keys may lie where the
        rows go.
      tables: int64 `[n, 4]`, as of `row_index.DenseIndex.line`.
      asked: int64 `[n, BAGS]`; rows are written to its int32 rows.

    Returns:
      A feature and a key of it that is not held here, or None.
    """
    bad = np.zeros(2, np.int64)
    is_good = _resolve_dense(np.ascontiguousarray(keys), tables, np.ascontiguousarray(asked), bad)
    return None if is_good else (int(bad[0]), int(bad[1]))


@jit
def _resolve_dense(keys, tables, asked, bad):
    for at in range(asked.shape[0]):
        count, num_buckets, rows_per_bucket = asked[at, NUM_IDS], tables[at, 1], tables[at, 2]
        rows, places = array_at(asked[at, ROWS], count, np.int32), array_at(tables[at, 0], num_buckets, np.int32)
        is_wide, is_in_place = keys[at, 1] == 8, keys[at, 0] == asked[at, ROWS]
        wide = array_at(keys[at, 0], count if is_wide else 0, np.int64)
        narrow = array_at(keys[at, 0], 0 if is_wide else count, np.int32)
        shift, mask = 0, num_buckets - 1
        while num_buckets >> shift > 1:
            shift += 1
        if tables[at, 3] != 0 and (is_wide != is_in_place):
            # A table that is here whole. Loops without branches, for every id of a batch of most jobs comes through.
            worst = np.uint64(0)
            for j in range(wide.shape[0]):
                worst = max(worst, np.uint64(wide[j]))
            for j in range(narrow.shape[0]):
                worst = max(worst, np.uint64(np.uint32(narrow[j])))
            if worst >> np.uint64(shift) < np.uint64(rows_per_bucket):
                for j in range(wide.shape[0]):
                    rows[j] = np.int32(wide[j] & mask) * rows_per_bucket + np.int32(wide[j] >> shift)
                for j in range(narrow.shape[0]):
                    rows[j] = (rows[j] & mask) * rows_per_bucket + (rows[j] >> shift)
                continue
        for j in range(count):
            key = wide[j] if is_wide else np.int64(narrow[j])
            row = dense_row(key, places, shift, rows_per_bucket)
            if row < 0:
                bad[0], bad[1] = at, key
                return False
            rows[j] = row
    return True


def divide_gradients(
    dim: int, asked: np.ndarray, gradients: np.ndarray, combiners: np.ndarray, out: np.ndarray
) -> None:
    """The gradients of bags, each divided by the denominator of its bag, for many features of one width; 0 where the
    denominator is 0.

    Args:
      asked: int64 `[n, BAGS]`.
      gradients, out: int64 `[n, 2]`, matrices of one vector a bag.
      combiners: int64 `[n]`, mean or sqrtn.
    """
    lines = (np.ascontiguousarray(array) for array in (asked, gradients, combiners, out))
    _divide_gradients(width_of(dim), dim, *lines)


@jit
def _divide_gradients(width, dim, asked, gradients, combiners, out):
    step = columns_of(width)
    for at in range(asked.shape[0]):
        num_bags, num_ids, is_given = asked[at, NUM_BAGS], asked[at, NUM_IDS], asked[at, DIVISORS] != 0
        is_weighted = asked[at, WEIGHTS] != 0
        weights = array_at(asked[at, WEIGHTS], num_ids if is_weighted else 0, np.float32)
        splits = array_at(asked[at, SPLITS], num_bags + 1, np.int64)
        given = array_at(asked[at, DIVISORS], num_bags if is_given else 0, np.float32)
        source, target = (gradients[at, 0], gradients[at, 1]), (out[at, 0], out[at, 1])
        for bag in range(num_bags):
            if is_given:
                divisor = given[bag]
            else:
                divisor = denominator(splits[bag], splits[bag + 1], weights, is_weighted, combiners[at])
            for column in range(0, dim, step):
                if divisor == 0:
                    store(target, bag, column, splat(width, np.float32(0)))
                else:
                    store(target, bag, column, load(width, source, bag, column) / splat(width, divisor))


@dataclass(frozen=True, slots=True, eq=False)
class BagLists:
    """Lists of bags, each with the matrix of its bags' gradients, in the order in which those are to be summed.

    Attributes:
      lines: int64 `[p, 7]`, the first five columns of what is asked, then the matrix.
      kept: arrays that they lie in.
    """

    lines: np.ndarray
    kept: Sequence[np.ndarray] = ()

    @staticmethod
    def of(
        rows: Sequence[np.ndarray],
        row_splits: Sequence[np.ndarray],
        gradients: Sequence[tuple[int, int]],
        weights: Sequence[np.ndarray | None] | None = None,
    ) -> BagLists:
        """Lists in arrays of their own.

        Args:
          rows: of each list, int32.
          row_splits: of each list int64 `[B + 1]`, beginning with 0.
          gradients: of each list the matrix of its bags' gradients, as `kernels.arrays.matrix_of` gives it.
          weights: of each list float32, what each row's gradient is multiplied by, or None; None if no list has any.

        Raises:
          ValueError: the bags do not have as many entries as there are rows.
        """
        kept, lines = [], np.zeros((len(rows), NUM_LIST_COLUMNS), np.int64)
        weights = weights or [None] * len(rows)
        for at, (own, splits, matrix, factors) in enumerate(zip(rows, row_splits, gradients, weights, strict=True)):
            if splits[-1] != len(own):
                raise ValueError(
                    f"Found {len(own)} rows in bags of {splits[-1]}. Expected as many. Pass the row splits of these "
                    "rows."
                )
            own, splits = plain(own, np.int32), plain(splits, np.int64)
            kept += [own, splits]
            own_factors = 0
            if factors is not None:
                kept.append(plain(factors, np.float32))
                own_factors = kept[-1].ctypes.data
            lines[at] = own.ctypes.data, len(own), splits.ctypes.data, len(splits) - 1, own_factors, *matrix
        return BagLists(lines, kept)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 `[n]`, all rows, and int64 `[n]`, the address of the gradient of each; `[n, 2]` if a list has weights,
        see `kernels.updates`.
        """
        count, is_weighted = int(self.lines[:, NUM_IDS].sum()), bool(self.lines[:, WEIGHTS].any())
        rows, addresses = np.empty(count, np.int32), np.empty((count, 1 + is_weighted), np.int64)
        _copy_entries(self.lines, rows, addresses)
        return rows, addresses if is_weighted else addresses[:, 0]


@jit
def _copy_entries(lists, rows, addresses):
    place, is_weighted = 0, addresses.shape[1] > 1
    for at in range(lists.shape[0]):
        given = array_at(lists[at, ROWS], lists[at, NUM_IDS], np.int32)
        splits = array_at(lists[at, SPLITS], lists[at, NUM_BAGS] + 1, np.int64)
        weights = array_at(lists[at, WEIGHTS], lists[at, NUM_IDS] if lists[at, WEIGHTS] else 0, np.int32)
        for bag in range(splits.shape[0] - 1):
            for i in range(splits[bag], splits[bag + 1]):
                rows[place + i] = given[i]
                addresses[place + i, 0] = lists[at, _START] + bag * lists[at, _STRIDE]
                if is_weighted:
                    addresses[place + i, 1] = weights[i] if weights.shape[0] else _BITS_OF_ONE
        place += given.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedEntries:
    """Entries of bags sorted by row, in the order in which they came within each row; of many tables.

    Attributes:
      rows: int64, the distinct rows of all tables, in an order that depends on the entries alone.
      starts: int32, where the addresses of each row begin, and the end.
      addresses: int64, of the gradients. Behind each that of a table with weights has the bits of its weight.
      bounds: int64 `[t, 5]`, where the rows and starts of a table begin, how many rows it has, where its addresses
        begin, how many they are, and whether they have weights.
    """

    rows: np.ndarray
    starts: np.ndarray
    addresses: np.ndarray
    bounds: np.ndarray

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those of one table: `u` rows, `u + 1` starts and its addresses, `[n]`, or `[n, 2]` with weights."""
        at, count, entry, num_entries, is_weighted = self.bounds[number].tolist()
        rows, starts = self.rows[at : at + count], self.starts[at : at + count + 1]
        addresses = self.addresses[entry : entry + num_entries * (1 + is_weighted)]
        return rows, starts, addresses.reshape(-1, 2) if is_weighted else addresses

    def lines(self) -> np.ndarray:
        """int64 `[t, 6]`, what kernels need of each table.

        The address of its rows and how many they are, the address of its starts, the address of its addresses, how many
        those are, and whether they have weights.
        """
        at, count, entry, num_entries, is_weighted = self.bounds.T
        rows, starts, addresses = (array.ctypes.data for array in (self.rows, self.starts, self.addresses))
        lines = rows + 8 * at, count, starts + 4 * at, addresses + 8 * entry, num_entries, is_weighted
        return np.stack(lines, axis=1)


def group_bags(lists: BagLists, marks: np.ndarray) -> GroupedEntries:
    """As `group_tables`, of one table.

    Args:
      marks: int32 `[number of local rows]`, all zero before and after.

    Raises:
      ValueError: a row is not one of the local rows.
    """
    firsts = np.array([0, len(lists.lines)])
    return group_tables(lists.lines, firsts, np.array([len(marks)]), np.array([marks.ctypes.data]))


def group_tables(lists: np.ndarray, firsts: np.ndarray, num_rows: np.ndarray, marks: np.ndarray) -> GroupedEntries:
    """Sorts the entries of bags by row.

    Args:
      lists: int64 `[p, 7]`, as `BagLists.lines`, of one table after another.
      firsts: int64 `[t + 1]`, where the lists of each table begin.
      num_rows, marks: int64 `[t]`, local rows of each table, and the address of its marks: int32, all zero before and
        after.

    Raises:
      ValueError: a row is not one of the local rows of its table.
    """
    num_tables = len(num_rows)
    lines, most = np.empty((num_tables, _LINE), np.int64), np.zeros(_MOST, np.int64)
    # Kernels are compiled for each order in memory that they meet.
    lists, firsts, num_rows, marks = (np.ascontiguousarray(array) for array in (lists, firsts, num_rows, marks))
    limits = grouped.MOST_HASHED, grouped.ROWS_PER_HASHED, grouped.ROWS_PER_COUNTED
    _plan(lists, firsts, num_rows, marks, *limits, lines, most)
    most_entries, most_counted, most_slots, all_rooms, all_entries = most.tolist()
    # Every table uses the same scratch, so that it stays in the caches.
    scratch = np.empty(most_entries, np.int32), np.empty(most_entries, np.int32), np.empty(most_counted, np.int32)
    slots = np.empty(most_slots, np.int64)
    rows, starts = np.empty(all_rooms, np.int64), np.empty(all_rooms, np.int32)
    addresses, bounds = np.empty(all_entries, np.int64), np.zeros((num_tables, 5), np.int64)
    # A width only has numba look for changed kernels in other files.
    bad = _group_tables(width_of(1), lines, lists, *scratch, slots, rows, starts, addresses, bounds)
    if bad >= 0:
        raise bad_local_row(int(rows[lines[bad, 7]]), int(num_rows[bad]))
    return GroupedEntries(rows, starts, addresses, bounds)


@jit
def _plan(lists, firsts, num_rows, marks, most_hashed, rows_per_hashed, rows_per_counted, lines, most):
    # Which way each table takes, and where its rows and addresses go. Each has room for as many rows as it can touch,
    # and for the two beyond that the kernels write.
    rows_at, entries_at = np.int64(0), np.int64(0)
    for at in range(num_rows.shape[0]):
        count, held, is_weighted = np.int64(0), num_rows[at], False
        for part in range(firsts[at], firsts[at + 1]):
            count += lists[part, NUM_IDS]
            is_weighted |= lists[part, WEIGHTS] != 0
        way, num_slots = _MARKED, np.int64(0)
        if held <= rows_per_counted * count:
            way = _COUNTED
            most[1] = max(most[1], held)
        elif count <= most_hashed and held > rows_per_hashed * count:
            way, num_slots = _HASHED, np.int64(grouped.num_slots(count))
            most[2] = max(most[2], num_slots)
        most[0] = max(most[0], count)
        lines[at, 0], lines[at, 1], lines[at, 2] = firsts[at], firsts[at + 1], count
        lines[at, 3], lines[at, 4], lines[at, 5] = held, marks[at], way
        lines[at, 6], lines[at, 7], lines[at, 8], lines[at, 9] = num_slots, rows_at, entries_at, is_weighted
        rows_at += min(count, held) + 2
        entries_at += count * (2 if is_weighted else 1)
    most[3], most[4] = rows_at, entries_at


@inlined
def _clear(array):
    for i in range(array.shape[0]):
        array[i] = 0


@jit
def _group_tables(width, lines, lists, scratch, numbers, counts, slots, out_rows, out_starts, out_addresses, bounds):
    for at in range(lines.shape[0]):
        first, stop, count = lines[at, 0], lines[at, 1], lines[at, 2]
        num_rows, marks, way = lines[at, 3], lines[at, 4], lines[at, 5]
        num_slots, rows_at, entries_at, is_weighted = lines[at, 6], lines[at, 7], lines[at, 8], lines[at, 9]
        room = min(count, num_rows) + 2
        unique, starts = out_rows[rows_at : rows_at + room], out_starts[rows_at : rows_at + room]
        rows = scratch[:count]
        if stop - first == 1:
            rows = array_at(lists[first, ROWS], count, np.int32)
        else:
            place = 0
            for part in range(first, stop):
                given = array_at(lists[part, ROWS], lists[part, NUM_IDS], np.int32)
                for i in range(given.shape[0]):
                    rows[place + i] = given[i]
                place += given.shape[0]
        if way == _COUNTED:
            ends, named = counts[:num_rows], rows
            _clear(ends)
            num_unique = grouped.count_rows(rows, ends, unique, starts)
        else:
            ends, named = starts, numbers
            _clear(ends)
            if way == _HASHED:
                own_slots = slots[:num_slots]
                _clear(own_slots)
                num_unique = grouped.number_by_hash(rows, num_rows, own_slots, unique, starts, numbers)
            else:
                num_unique = grouped.number_by_marks(rows, array_at(marks, num_rows, np.int32), unique, starts, numbers)
            if num_unique > 0:
                grouped.begin(starts, num_unique)
        if num_unique < 0:
            unique[0] = rows[-1 - num_unique]
            return at
        if num_unique == 0:
            starts[0] = 0
        bounds[at, 0], bounds[at, 1], bounds[at, 2], bounds[at, 3] = rows_at, num_unique, entries_at, count
        bounds[at, 4] = is_weighted
        if is_weighted:
            _lay_out_weighted(lists[first:stop], named, ends, out_addresses[entries_at : entries_at + 2 * count])
        else:
            _lay_out(lists[first:stop], named, ends, out_addresses[entries_at : entries_at + count])
    return -1


@jit
def _lay_out(lists, numbers, ends, addresses):
    before = np.int64(0)
    for at in range(lists.shape[0]):
        splits = array_at(lists[at, SPLITS], lists[at, NUM_BAGS] + 1, np.int64)
        address, stride_bytes = lists[at, _START], lists[at, _STRIDE]
        for bag in range(splits.shape[0] - 1):
            for i in range(before + splits[bag], before + splits[bag + 1]):
                number = np.int64(numbers[i])
                addresses[ends[number]] = address
                ends[number] += 1
            address += stride_bytes
        before += lists[at, NUM_IDS]


@jit
def _lay_out_weighted(lists, numbers, ends, addresses):
    before = np.int64(0)
    for at in range(lists.shape[0]):
        splits = array_at(lists[at, SPLITS], lists[at, NUM_BAGS] + 1, np.int64)
        # Their bits.
        weights = array_at(lists[at, WEIGHTS], lists[at, NUM_IDS] if lists[at, WEIGHTS] else 0, np.int32)
        address, stride_bytes = lists[at, _START], lists[at, _STRIDE]
        for bag in range(splits.shape[0] - 1):
            for i in range(splits[bag], splits[bag + 1]):
                number = np.int64(numbers[before + i])
                place = 2 * np.int64(ends[number])
                addresses[place] = address
                addresses[place + 1] = weights[i] if weights.shape[0] else _BITS_OF_ONE
                ends[number] += 1
            address += stride_bytes
        before += lists[at, NUM_IDS]
