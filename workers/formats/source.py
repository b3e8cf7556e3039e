"""`Source`: one kind of data file. What users write, how the row groups of a file are found and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from podembed.workers.columns.decode import Decoder, RawRows
from podembed.workers.data.config import InputData
from podembed.workers.data.files import file_version
from podembed.workers.data.input_files import FileLayout, RowGroup


class OpenedFile(Protocol):
    """An open data file; one thread at a time."""

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """See the module.

    Attributes:
      declared: the class with which users declare such data.
      layout: (path, data) → what is to be known of a file before it is read. Raises InputError for a file that is
        missing or damaged, or that lacks a declared column.
      open: (file, data) → the file, opened. Raises InputError, too.
      content: data → what its id columns hold, as `InputFile.content` says it; empty where files decide that, and not
        the declaration.
      version: path → size in bytes, and a text that changes with the file and with those that belong to it.
    """

    declared: type[InputData]
    layout: Callable[..., FileLayout]
    open: Callable[..., OpenedFile]
    version: Callable[..., tuple[int, str]] = file_version
    content: Callable[[Any], str] = lambda data: ""

    def fits(self, data: Any) -> bool:
        """Whether such data is read so."""
        return isinstance(data, self.declared)
