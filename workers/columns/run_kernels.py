"""Compiled copies of runs of rows between arrays that are given by their addresses.

A window of steps is put together from dozens of blocks with dozens of columns each. Handing every array to a compiled
function costs microseconds apiece, more than the copy itself. A kernel here therefore gets the addresses of all blocks
at once. Whoever takes the addresses keeps the arrays alive during the call, and answers for their types: contiguous, of
the width that is named.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE = ir.IntType(8)
_INT64 = ir.IntType(64)


@intrinsic
def _copy(typing_context, target, source, num_bytes):
    """Copies bytes from one address to another; the two ranges do not overlap."""

    def generate(context, builder, sig, args):
        pointers = [builder.inttoptr(address, _BYTE.as_pointer()) for address in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _pointer(typing_context, address):
    """The address as what `numba.carray` takes."""

    def generate(context, builder, sig, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _load(typing_context, address):
    """The int64 at an address."""

    def generate(context, builder, sig, args):
        return builder.load(builder.inttoptr(args[0], _INT64.as_pointer()), align=8)

    return types.int64(types.int64), generate


# Numba gives the first parameter itself, which type checkers do not know.
copy_bytes: Any = _copy
_int64_at: Any = _load
_pointer_to: Any = _pointer
_carray: Any = getattr(numba, "carray")  # noqa: B009 - a function that numba does not list as its own


@numba.njit(nogil=True, cache=True)
def plan_runs(parts: np.ndarray, per_step: int, step_rows: int, runs: np.ndarray) -> int:
    """Cuts parts of lanes where their steps end.

    Args:
      parts: int64 `[parts, 4]`: first row in the block, number of rows, first row of the lane, where the lane begins in
        a step.
      per_step, step_rows: rows of a lane and of all lanes in a step.
      runs: int64 `[enough, 4]`, written: part, first row in the block, first row in the window, number of rows.

    Returns:
      The number of runs.
    """
    count = 0
    for part in range(len(parts)):
        done = 0
        while done < parts[part, 1]:
            step, within = divmod(parts[part, 2] + done, per_step)
            length = min(parts[part, 1] - done, per_step - within)
            runs[count, 0] = part
            runs[count, 1] = parts[part, 0] + done
            runs[count, 2] = step * step_rows + parts[part, 3] + within
            runs[count, 3] = length
            done += length
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def copy_runs(runs: np.ndarray, sources: np.ndarray, target: int, width: int) -> None:
    """Copies the rows of all runs, of `width` bytes each.

    Args:
      sources: per part, the address of its first row.
    """
    for at in range(len(runs)):
        copy_bytes(target + runs[at, 2] * width, sources[runs[at, 0]] + runs[at, 1] * width, runs[at, 3] * width)


@numba.njit(nogil=True, cache=True)
def _widen(address: int, width: int, target: np.ndarray, start: Any, count: int) -> None:
    """target[start:start + count] = the numbers at an address, signed, of 4 or 8 bytes."""
    if width == 8:
        copy_bytes(target.ctypes.data + 8 * start, address, 8 * count)
    else:
        source = _carray(_pointer_to(address), (count,), np.int32)
        into = target[start : start + count]
        for i in range(count):
            into[i] = source[i]


@numba.njit(nogil=True, cache=True)
def copy_ids(
    runs: np.ndarray, sources: np.ndarray, source_column_bytes: np.ndarray, width: int, target: np.ndarray
) -> None:
    """As `copy_runs` for ids of 4 or 8 bytes, into int64 `[columns, rows]`.

    Args:
      sources, source_column_bytes: per part, the address of its first column, and bytes from one column to the next.
    """
    for column in range(len(target)):
        into = target[column]
        for at in range(len(runs)):
            part = runs[at, 0]
            start = sources[part] + column * source_column_bytes[part] + runs[at, 1] * width
            _widen(start, width, into, runs[at, 2], runs[at, 3])


@numba.njit(nogil=True, cache=True)
def copy_columns(runs: np.ndarray, sources: np.ndarray, source_column_bytes: np.ndarray, target: np.ndarray) -> None:
    """As `copy_runs` for float32 columns, into rows of float32 `[rows, columns]`."""
    for at in range(len(runs)):
        part, row, count = runs[at, 0], runs[at, 2], runs[at, 3]
        # A run of all columns stays in the first cache while it is turned.
        for column in range(target.shape[1]):
            start = sources[part] + column * source_column_bytes[part] + runs[at, 1] * 4
            source = _carray(_pointer_to(start), (count,), np.float32)
            for i in range(count):
                target[row + i, column] = source[i]


@numba.njit(nogil=True, cache=True)
def lay_out_bags(runs: np.ndarray, splits_of_parts: np.ndarray, splits: np.ndarray) -> None:
    """Writes the offsets of the window's bags, int64 `[rows + 1]`; rows of no run have empty ones."""
    splits[:] = 0
    for at in range(len(runs)):
        source = splits_of_parts[runs[at, 0]] + 8 * runs[at, 1]
        previous = _int64_at(source)
        for row in range(runs[at, 3]):
            following = _int64_at(source + 8 * (row + 1))
            splits[runs[at, 2] + row + 1] = following - previous
            previous = following
    for row in range(len(splits) - 1):
        splits[row + 1] += splits[row]


@numba.njit(nogil=True, cache=True)
def copy_bags(
    runs: np.ndarray,
    splits_of_parts: np.ndarray,
    values_of_parts: np.ndarray,
    width: int,
    splits: np.ndarray,
    target: np.ndarray,
) -> None:
    """Copies the ids of all runs, of 4 or 8 bytes, to where `lay_out_bags` has put their bags; `target` is int64."""
    for at in range(len(runs)):
        part = runs[at, 0]
        source = splits_of_parts[part] + 8 * runs[at, 1]
        start, stop = _int64_at(source), _int64_at(source + 8 * runs[at, 3])
        _widen(values_of_parts[part] + width * start, width, target, splits[runs[at, 2]], stop - start)


@numba.njit(nogil=True, cache=True)
def copy_bag_weights(
    runs: np.ndarray, splits_of_parts: np.ndarray, weights_of_parts: np.ndarray, splits: np.ndarray, target: np.ndarray
) -> None:
    """As `copy_bags` for the weights of the ids, float32 on both sides."""
    for at in range(len(runs)):
        part = runs[at, 0]
        source = splits_of_parts[part] + 8 * runs[at, 1]
        start, stop = _int64_at(source), _int64_at(source + 8 * runs[at, 3])
        place = target.ctypes.data + 4 * splits[runs[at, 2]]
        copy_bytes(place, weights_of_parts[part] + 4 * start, 4 * (stop - start))
