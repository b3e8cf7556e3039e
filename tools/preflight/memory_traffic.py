"""Bytes that a compiled program moves to and from the chip's memory.

The compiler's own count is of all that operations read and write, also in the fast memory within the chip, where most
arrays of a step lie. Here only arrays in the chip's large memory count. What SparseCores move does not: the text says
which tables they use, and not how many rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from podembed.tools.preflight.program_text import array_bytes

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<kind>.+?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}
_BY_SPARSE_CORES = 'async_execution_thread="sparsecore"'
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_PARTIAL = {"slice", "dynamic-slice", "gather"}


class _Instruction(NamedTuple):
    name: str
    kind: str
    op: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool


class _Program:
    """The text of a program by its computations."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry, current = "", {}
        for line in text.splitlines():
            if (begins := _COMPUTATION.match(line)) is not None:
                current = self.computations.setdefault(begins["name"], {})
                self.entry = begins["name"] if begins["entry"] else self.entry
            elif (found := _INSTRUCTION.match(line)) is not None:
                operands = tuple(_OPERAND.findall(found["rest"].partition("), ")[0]))
                current[found["name"]] = _Instruction(
                    found["name"], found["kind"], found["op"], operands, found["rest"], bool(found["root"])
                )

    def moved(self, name: str) -> int:
        """Bytes of a computation, with those that it calls."""
        within = self.computations.get(name, {})
        return sum(self._moved_by(instruction, within) for instruction in within.values())

    def _moved_by(self, one: _Instruction, within: Mapping[str, _Instruction]) -> int:
        called = _CALLED.search(one.rest)
        if one.op in _FREE or one.op.endswith(("-done", "-update")) or _BY_SPARSE_CORES in one.rest:
            return 0
        if one.op == "while" and called is not None:
            trips = _TRIPS.search(one.rest)
            return self.moved(called[1]) * (int(trips[1]) if trips else 1)
        if one.op == "conditional":
            names = [name for many, name in _BRANCHES.findall(one.rest) for name in (_OPERAND.findall(many) or [name])]
            return max(map(self.moved, names), default=0)
        if one.op in ("call", "async-start") and called is not None:
            return self.moved(called[1])
        operands = [within[name] for name in one.operands if name in within]
        if one.op in ("copy-start", "slice-start"):
            return _moved_ahead(one, operands)
        if one.op == "fusion" and called is not None:
            return self._moved_by_fusion(one, operands, self.computations.get(called[1], {}))
        if one.op in _PARTIAL:
            # What else they read are indices.
            return array_bytes(one.kind, is_main=True) + _is_main(operands[:1]) * array_bytes(one.kind)
        if one.op in _IN_PLACE and len(operands) > 1:
            return array_bytes(operands[-1 if one.op == "scatter" else 1].kind, is_main=True) + (
                _is_main(operands[:1]) * array_bytes(_written(one, operands).kind)
            )
        return array_bytes(one.kind, is_main=True) + sum(array_bytes(of.kind, is_main=True) for of in operands)

    def _moved_by_fusion(
        self, one: _Instruction, operands: list[_Instruction], inner: Mapping[str, _Instruction]
    ) -> int:
        """Of an operand that a fusion only takes slices of, those slices; of a result that it updates in place, what
        it writes there.
        """
        total, parameters = 0, [of for of in inner.values() if of.op == "parameter"]
        by_number = {int(of.rest.partition(")")[0]): of.name for of in parameters}
        updated: set[str] = set()
        root = _behind_bitcasts(next((of for of in inner.values() if of.is_root), None), inner)
        written = array_bytes(one.kind, is_main=True)
        if root is not None and root.op in _IN_PLACE and written:
            target = _behind_bitcasts(inner.get(root.operands[0]), inner)
            updated = {target.name} if target is not None else updated
            written = array_bytes(_written(root, [inner[name] for name in root.operands if name in inner]).kind)
            # A scatter reads what it adds to.
            written *= 2 if root.op == "scatter" else 1
        for number, operand in enumerate(operands):
            size, name = array_bytes(operand.kind, is_main=True), by_number.get(number, "")
            if not size or name in updated:
                continue
            names = {name} | {of.name for of in inner.values() if of.op == "bitcast" and name in of.operands}
            users = [of for of in inner.values() if names & {*of.operands} and of.op != "bitcast"]
            if users and all(of.op in _PARTIAL and of.operands[0] in names for of in users):
                size = min(size, sum(array_bytes(of.kind) for of in users))
            total += size
        return total + written


def accessed_in_memory(text: str) -> int:
    """Bytes that a program reads and writes in the chip's memory in one run."""
    program = _Program(text)
    return program.moved(program.entry)


def _written(one: _Instruction, operands: list[_Instruction]) -> _Instruction:
    """The operand with what an operation writes into another one: a scatter has indices between them."""
    return operands[2 if one.op == "scatter" and len(operands) > 2 else 1]


def _behind_bitcasts(one: _Instruction | None, inner: Mapping[str, _Instruction]) -> _Instruction | None:
    while one is not None and one.op == "bitcast":
        one = inner.get(one.operands[0])
    return one


def _is_main(operands: list[_Instruction]) -> bool:
    return any(array_bytes(of.kind, is_main=True) for of in operands)


def _moved_ahead(one: _Instruction, operands: list[_Instruction]) -> int:
    """Bytes of a copy between both memories that runs beside other operations. Its result names source and target."""
    whole, main = array_bytes(one.kind), array_bytes(one.kind, is_main=True)
    source = sum(array_bytes(of.kind) for of in operands[:1])
    target = max(0, whole - source)
    is_from_main = _is_main(operands[:1])
    return (target if is_from_main else 0) + (target if main > (source if is_from_main else 0) else 0)
