"""One call of a compiled rule for the touched rows of many tables.

A rule is a kernel of its own, so a kernel that calls it must know which one. It gets a `Rule`, whose type has the
rule's name. So numba compiles the loop over tables once for each rule and width, and its file cache works.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from typing import Any

import numpy as np
from numba import extending, types
from numba.core.datamodel import models

from podembed.embedding.kernels.many_tables import array_at, entries_at
from podembed.embedding.kernels.row_vectors import jit, width_of
from podembed.embedding.row_optimizers.row_step import Limits

LINE = 6
"""Numbers of the touched rows of a table: address of the rows (int64) and how many they are. The address of where the
gradients of each begin (int32). The address of the gradients' addresses (int64), how many they are, and whether a
weight comes behind each.
"""
ROWS, NUM_ROWS, STARTS, ADDRESSES, NUM_ADDRESSES, IS_WEIGHTED = 0, 1, 2, 3, 4, 5
ROW_BYTES, START_BYTES = 8, 4
MOST_SLOTS = 3
_rules: dict[str, Any] = {}


class RuleType(types.Type):
    """Numba type of a `Rule`: which one, and the number of its slots, known to the compiler."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.rule_name, self.num_slots = name, num_slots
        super().__init__(name=f"Rule({name}, {num_slots})")


class Rule:
    """Tells a kernel which rule to call. Get one from `rule_of`."""

    __slots__ = ("_numba_type_",)

    def __init__(self, name: str, num_slots: int) -> None:
        self._numba_type_ = RuleType(name, num_slots)


def has_name(kernel: Any) -> bool:
    """Whether the name of a kernel says which one it is.

    It does for a function of a module, compiled by numba, that takes nothing from a function around it.
    """
    function = getattr(kernel, "py_func", None)
    if function is None or function.__closure__ is not None:
        return False
    module = inspect.getmodule(function)
    return getattr(module, "__file__", None) is not None and getattr(module, function.__name__, None) is kernel


@functools.cache
def rule_of(kernel: Any, num_slots: int) -> Rule:
    """The rule that a kernel of an optimizer is. Its source is part of the name, as of all our types.

    Args:
      kernel: one that `has_name`.
    """
    function = kernel.py_func
    source = inspect.getsource(inspect.getmodule(function) or function)
    name = f"{function.__module__}.{function.__qualname__}, {zlib.crc32(source.encode()):08x}"
    _rules[name] = kernel
    return Rule(name, num_slots)


extending.register_model(RuleType)(models.OpaqueModel)


@extending.unbox(RuleType)
def _unbox_rule(rule_type, obj, c):
    return extending.NativeValue(c.context.get_dummy_value())


def _apply(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
    """Calls the rule for one table."""
    raise NotImplementedError


_overload: Any = extending.overload


@_overload(_apply)
def _apply_of(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
    update = _rules[rule.rule_name]

    # Numba knows no tuples of a length that is found out, so each number of slots has its own.
    def no_slot(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
        table = (matrices[0], matrices[1])
        update(width, dim, table, rows, starts, None, addresses, learning_rate, limits, *constants)

    def one_slot(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
        table, first = (matrices[0], matrices[1]), (matrices[2], matrices[3])
        update(width, dim, table, first, rows, starts, None, addresses, learning_rate, limits, *constants)

    def two_slots(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
        table, first, second = (matrices[0], matrices[1]), (matrices[2], matrices[3]), (matrices[4], matrices[5])
        update(width, dim, table, first, second, rows, starts, None, addresses, learning_rate, limits, *constants)

    def three_slots(rule, width, dim, matrices, rows, starts, addresses, learning_rate, limits, constants):
        table, first, second = (matrices[0], matrices[1]), (matrices[2], matrices[3]), (matrices[4], matrices[5])
        third = (matrices[6], matrices[7])
        update(
            width, dim, table, first, second, third, rows, starts, None, addresses, learning_rate, limits, *constants
        )

    return (no_slot, one_slot, two_slots, three_slots)[rule.num_slots]


def update_tables(
    rule: Rule,
    dim: int,
    matrices: np.ndarray,
    touched: np.ndarray,
    learning_rate: float,
    limits: Limits | None,
    constants: tuple[Any, ...],
) -> None:
    """As `Optimizer.apply` for many tables of one width. Nothing is checked.

    Args:
      matrices: int64 `[n, 2 + 2 * slots]`, of rows and slots, as `kernels.arrays.matrix_of` gives them.
      touched: int64 `[n, LINE]`.
      limits, constants: limits and constants of `RowStep` and `Optimizer.kernel`.
    """
    # Kernels are compiled for each order in memory that they meet.
    lines = np.ascontiguousarray(matrices), np.ascontiguousarray(touched)
    arguments = rule, width_of(dim), dim, *lines, learning_rate, limits, constants
    is_weighted = touched[:, IS_WEIGHTED] != 0
    # Two kernels, so that nobody who has no weights compiles for them.
    if not is_weighted.all():
        _update_tables(*arguments, None)
    if is_weighted.any():
        _update_tables(*arguments, True)


@jit
def _update_tables(rule, width, dim, matrices, touched, learning_rate, limits, constants, is_weighted):
    for at in range(matrices.shape[0]):
        num_rows, num_addresses = touched[at, NUM_ROWS], touched[at, NUM_ADDRESSES]
        if (touched[at, IS_WEIGHTED] != 0) != (is_weighted is not None):
            continue
        _apply(
            rule,
            width,
            dim,
            matrices[at],
            array_at(touched[at, ROWS], num_rows, np.int64),
            array_at(touched[at, STARTS], num_rows + 1, np.int32),
            entries_at(touched[at, ADDRESSES], num_addresses, is_weighted),
            learning_rate,
            limits,
            constants,
        )
