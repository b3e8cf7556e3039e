"""`Manifest`: one committed state of a run, who owned its buckets, and the names of commits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import numpy as np

from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import TableFiles

FORMAT_VERSION = 4
# Version 1 had one bucket in each file, and version 2 named each file. Up to version 3 names of files were nested.
READABLE_VERSIONS = (1, 2, 3, 4)
_COMMIT_NAME = re.compile(r"s(\d{9,18})-g(\d{8,12})")


@dataclass(frozen=True, slots=True)
class Owners(Sequence[int]):
    """The owner of each bucket of a table, held as int32 in little-endian order: a table may have many buckets."""

    ITEM_BYTES: ClassVar[int] = 4
    data: bytes

    @staticmethod
    def of(owners: Sequence[int] | np.ndarray) -> Owners:
        return owners if isinstance(owners, Owners) else Owners(np.asarray(owners, "<i4").tobytes())

    @property
    def numbers(self) -> np.ndarray:
        """int32 `[num_buckets]`, which cannot be written to."""
        return np.frombuffer(self.data, "<i4")

    def __len__(self) -> int:
        return len(self.data) // self.ITEM_BYTES

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        found = self.numbers[at]
        return tuple(found.tolist()) if isinstance(at, slice) else int(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numbers if dtype is None else self.numbers.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Owners):
            return self.data == other.data
        return NotImplemented if not isinstance(other, tuple) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed state of a run.

    Attributes:
      run_id: id in the run's record; a driver does not start from a manifest of another run.
      format_version: version of the format that the writer knew.
      step: steps applied; training goes on with this step number, whose batch is a function of it.
      generation: generation of the driver that committed.
      parent: the commit before this one in the lineage; None for the first.
      created_unix_s: wall clock of the driver, for people.
      hosts: number of hosts that wrote it.
      cursor: further positions in the data by name, such as `epoch`; the step alone determines them.
      tables, dense: the files.
      placement: per table, the owner of each bucket when it was written; an `Owners` where it was read.
      counters: totals since the run began, such as rows with invalid ids.
      metrics: results of an evaluation of exactly this state, by name, such as `auc`; empty where there was none.
      versions: versions of the packages that wrote it.
    """

    run_id: str
    format_version: int = FORMAT_VERSION
    step: int
    generation: int
    parent: str | None
    created_unix_s: float
    hosts: int
    cursor: Mapping[str, int]
    tables: tuple[TableFiles, ...]
    dense: tuple[DenseFile, ...]
    placement: Mapping[str, Sequence[int]]
    counters: Mapping[str, int]
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        return commit_name(step=self.step, generation=self.generation)

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunk files that a reader needs, those of older attempts included."""
        return sum(table.size_bytes for table in self.tables) + sum(leaf.size_bytes for leaf in self.dense)

    def file_sizes(self) -> dict[str, int]:
        """Name → size of every file that this commit consists of, its own manifest left out."""
        sizes = {
            f"{array.path}/zarr.json": array.metadata_size_bytes for table in self.tables for array in table.arrays
        }
        for table in self.tables:
            sizes.update(table.chunk_sizes())
        for file in (*self.dense, *(file for table in self.tables for file in delta_files(table))):
            sizes |= file.file_sizes()
        return sizes

    @property
    def num_deltas(self) -> int:
        """Incremental commits since the last full one, this one included; 0 for a full one."""
        return max((len(table.deltas) for table in self.tables), default=0)

    @property
    def written_bytes(self) -> int:
        """Bytes of the chunk files that this commit itself wrote."""
        own = f"data/{self.name}/"
        return sum(
            size for name, size in self.file_sizes().items() if name.startswith(own) and not name.endswith("/zarr.json")
        )


def delta_files(table: TableFiles) -> list[DenseFile]:
    """All files with changed rows of a table, in the order in which they apply."""
    return [file for delta in table.deltas for part in delta.parts for file in part.files]


def commit_name(*, step: int, generation: int) -> str:
    """`s000001200-g00000007`: sorts by step, then by generation, as long as both stay within their digits."""
    return f"s{step:09d}-g{generation:08d}"


def parse_commit_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a commit's name, or None for any other text."""
    match = _COMMIT_NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match.group(1)), int(match.group(2))
    return (step, generation) if commit_name(step=step, generation=generation) == name else None


def commit_file(name: str) -> str:
    return f"commit/{name}.json"
