"""Columns of which no value is in their vocabulary, so that all samples share row 0; and why that is so, probably."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_VALUES = 20
"""Values of a column, before which it is not judged. By chance so many are rarely all new."""
LOOKED_AT = 10_000
"""Lines of a vocabulary that are compared with a column's values."""
_MOST = 0.9
_COUNTED = re.compile(r".+[\t ,;|:]\d+(\.\d+)?")
_QUOTES = "\"'"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownColumn:
    """One such column.

    Attributes:
      file: where its values were read last.
      vocabulary: path of the file of its values.
      num_values: number of values that this reader had met by then, all of them unknown.
      value, line: one of them, and the first line of the vocabulary.
      cause: what the two look like, and what to do.
    """

    column: str
    file: str
    vocabulary: str
    num_values: int
    value: str
    line: str
    cause: str

    def __str__(self) -> str:
        return (
            f"None of the first {self.num_values:,} values of column {self.column!r} is in its vocabulary "
            f"{self.vocabulary}, so all have row 0: {self.file} has {self.value!r}, and the vocabulary begins with "
            f"{self.line!r}. {self.cause}"
        )


def likely_cause(values: Sequence[str], lines: Sequence[str]) -> str:
    """Why no value is among the lines, in a sentence or two.

    Args:
      values: some of the data's.
      lines: the first ones of the vocabulary.
    """
    if _are(lines, _is_counted) and not _are(values, _is_counted):
        return "Its lines end with a number, such as a count. Write the value alone in each line."
    if _are(lines, _is_quoted) and not _are(values, _is_quoted):
        return "Its lines are in quotes. Write the values without them."
    if _are(values, _is_quoted) and not _are(lines, _is_quoted):
        return "The data's values are in quotes. Write them without, or the vocabulary with them."
    for alike, words in (
        (str.strip, "spaces around them"),
        (lambda one: one.strip().casefold(), "upper and lower case"),
    ):
        if {alike(one) for one in values} & {alike(line) for line in lines}:
            return f"They differ in {words}. Write both alike."
    return "It may be the vocabulary of another column or of other data. Name the right one, or write it anew."


def _are(texts: Sequence[str], is_such: Callable[[str], bool]) -> bool:
    """Whether nearly all are."""
    return sum(map(is_such, texts)) > _MOST * len(texts)


def _is_counted(text: str) -> bool:
    return bool(_COUNTED.fullmatch(text))


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
