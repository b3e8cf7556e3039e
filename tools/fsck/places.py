"""What each file of a commit holds, in words."""

from __future__ import annotations

from collections.abc import Iterable

from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import describe_changes, describe_file


def places_of(tables: Iterable[TableFiles], dense: Iterable[DenseFile]) -> dict[str, str]:
    """File of a table or a dense array → what it holds."""
    places: dict[str, str] = {}
    for table in tables:
        for array in table.arrays:
            places[f"{array.path}/zarr.json"] = f"table '{table.name}', {array.name}, shape of all buckets"
        for chunk in table.chunks:
            places[chunk.name] = describe_file(table, chunk)
        for delta in table.deltas:
            for part in delta.parts:
                for file in part.files:
                    for name in file.file_sizes():
                        places[name] = describe_changes(table, delta, part, name)
    for leaf in dense:
        places[f"{leaf.path}/zarr.json"] = f"dense '{leaf.key}', shape"
        places[leaf.chunk_file] = f"dense '{leaf.key}'"
    return places
