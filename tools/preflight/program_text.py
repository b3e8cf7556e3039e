"""What the text of a compiled program says: its collectives, and what does not belong there."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_SIZES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "token": 0}
_ARRAY = re.compile(r"\b(pred|bf16|c64|c128|[suf]\d+(?:e\d\w+)?)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_COLLECTIVE = re.compile(
    r" = (?P<result>.+?) (?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?P<begins>-start)?\((?P<rest>.*)"
)
_GROUPS = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[(?P<num>\d+),(?P<size>\d+)\])")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+)")
_COPY = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<result>.*?)\b(?:copy|copy-start|transpose)\(%?(?P<source>[\w.-]*)")
# A callback to Python becomes a message to the host. Looked for before compiling: between slices, the compiler sends
# through hosts of its own accord.
_HOST_CALL = re.compile(r"stablehlo\.(?:infeed|outfeed)|is_host_transfer = true|custom_call @\w*callback")
_DOUBLE = re.compile(r"tensor<(?:[\dx]*x)?(?:f64|complex<f64>)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The collectives of one kind among groups of one size.

    Attributes:
      kind: as XLA calls it, such as `all-reduce`.
      group: devices that take part together.
      count: how many there are in the text. Those of a loop are counted once.
      size_bytes: bytes of their results on a device.
    """

    kind: str
    group: int
    count: int
    size_bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends, at least: each part of a sum travels twice, other parts once."""
        others = (self.group - 1) / self.group
        if self.kind == "all-reduce":
            return 2 * others * self.size_bytes
        if self.kind == "reduce-scatter":
            return (self.group - 1) * self.size_bytes
        return self.size_bytes if self.kind.startswith("collective-") else others * self.size_bytes


def collectives_in(text: str, *, num_devices: int) -> list[Collective]:
    """The collectives of a program, by kind and size of their groups."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        groups = _GROUPS.search(match["rest"])
        group = num_devices
        if groups is not None:
            group = int(groups["size"]) if groups["size"] else groups["first"].count(",") + 1
        sizes = [size for _, size in _arrays(match["result"])]
        # What begins one gives operand and result, and sometimes numbers of its own.
        size = max(sizes, default=0) if match["begins"] and match["kind"] != "all-reduce" else sum(sizes)
        if group > 1:
            count, total = found.get((match["kind"], group), (0, 0))
            found[match["kind"], group] = count + 1, total + size
    return [
        Collective(kind=kind, group=group, count=count, size_bytes=size)
        for (kind, group), (count, size) in sorted(found.items())
    ]


def flaws_in(lowered: str, text: str, *, tables: Collection[tuple[int, ...]]) -> list[str]:
    """What a program of a training step should not contain, a sentence each.

    Args:
      lowered: text of the program before it was compiled.
      text: text of the compiled program.
      tables: shapes of the tables' arrays on a device. Those of one axis say which rows changed, and are no tables.
    """
    found = []
    if _DOUBLE.search(lowered):
        found.append("float64: a TPU computes it in many steps of float32. Use float32, and leave jax_enable_x64 off.")
    if _HOST_CALL.search(lowered):
        found.append("a call to the host: the devices wait for it in each step. Leave callbacks out of the model.")
    copied = {shape for shape in _copied(text) if shape in tables and len(shape) == 2}
    found += [
        f"a copy of a table of {shape[0]} x {shape[1]}: it takes memory for a second one. Is a table part of the "
        "model's own parameters, or computed with as a whole?"
        for shape in sorted(copied)
    ]
    return found


def _copied(text: str) -> Iterator[tuple[int, ...]]:
    """The shapes of arrays that are copied within the chip's large memory. A copy into the fast memory within the chip
    is meant, and so is one back.
    """
    results = {match[1]: match[2] for match in map(_RESULT.match, text.splitlines()) if match}
    for match in filter(None, map(_COPY.match, text.splitlines())):
        # What begins one gives its target, and then its source.
        ends = [*_ARRAY.findall(match["result"])[:2], *_ARRAY.findall(results.get(match["source"], ""))[:1]]
        if not any(space for _, _, space in ends):
            yield tuple(int(side) for side in ends[0][1].split(",") if side)


def array_bytes(text: str, *, is_main: bool = False) -> int:
    """Bytes of all arrays that a piece of text names.

    Args:
      is_main: whether to count only those in the chip's large memory.
    """
    return sum(size for _, size in _arrays(text, is_main=is_main))


def _arrays(text: str, *, is_main: bool = False) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shape and bytes of each array that a piece of text names."""
    for kind, dims, space in _ARRAY.findall(text):
        if space and is_main:
            continue
        shape = tuple(int(side) for side in dims.split(",") if side)
        digits = re.match(r"[suf](\d+)", kind)
        bits = 8 * _SIZES[kind] if kind in _SIZES else int(digits[1]) if digits else 0
        yield shape, -(-math.prod(shape) * bits // 8)
