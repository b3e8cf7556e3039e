"""`InputFile` and `RowGroup`: a data file as it was when the run began, and the parts in which it is read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was when the index was built.

    Attributes:
      path: path as fsspec opens it; local paths are absolute and carry no protocol.
      size_bytes: length of the file.
      version: what the filesystem tells of the last change: an etag or a time.
      row_group_rows: rows of each row group or block.
      group_offsets: position in the unpacked text at which each block begins, and the end; empty where the file itself
        knows.
      content: what of the content may not change under a run. That is the kinds of the id columns as the file has them,
        or the digest of a vocabulary's values. Empty where the declaration says it all.
      extra_content: the kinds of the extra columns. Not compared, since runs of older versions did not record them.
      lengths: columns of lists, each with the mean number of ids of a row, as far as the file says without being read.
        Not recorded with a run, since it follows from the file.
    """

    path: str
    size_bytes: int
    version: str
    row_group_rows: tuple[int, ...]
    group_offsets: tuple[int, ...] = ()
    content: str = ""
    extra_content: str = field(default="", compare=False)
    lengths: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    @property
    def num_rows(self) -> int:
        return sum(self.row_group_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """One row group: the `group_in_file`-th of `file`; its first row is row `first_row` of the file and
    `first_position` of all data.
    """

    file: InputFile
    group_in_file: int
    num_rows: int
    first_row: int
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """What is found out about a file before it is read: see `InputFile`."""

    row_group_rows: tuple[int, ...]
    group_offsets: tuple[int, ...] = ()
    content: str = ""
    extra_content: str = ""
    lengths: tuple[tuple[str, float], ...] = ()
