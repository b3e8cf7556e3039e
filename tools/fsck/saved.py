"""Checking offline what a program with a loop of its own saved: checkpoints of the step-by-step mode, and embeddings
saved alone.

They are no commits of a run, so there is neither a chain nor a lease to check. The check reads an index and every byte
of the files that it names. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.commit.verification import Damage, file_damages
from podembed.tools.fsck.places import places_of
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.stepwise.checkpoint import read_checkpoint
from podembed.workers.stepwise.saved_index import CHECKPOINT_FILE, INDEX_FILE, read_index
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSave:
    """One save after its check.

    Attributes:
      kind: what it is.
      holds: parts and tables, as far as the index can be read.
      damages: with what the file holds.
      num_unnamed: files that the index does not name: of an interrupted save, or put there by somebody. No reader uses
        them.
    """

    location: str
    kind: str
    holds: str = ""
    num_files: int = 0
    num_bytes: int = 0
    damages: tuple[tuple[Damage, str], ...] = ()
    num_unnamed: int = 0

    @property
    def is_intact(self) -> bool:
        return not self.damages


def check_saves(
    paths: Sequence[str], *, on_save: Callable[[CheckedSave], None] = lambda checked: None
) -> tuple[CheckedSave, ...]:
    """Reads every byte of saves and compares it with their indexes.

    Args:
      paths: paths of `workers.stepwise.checkpoint.saved_paths`.
      on_save: told each one when it has been read.

    Raises:
      StoreUnavailable: the storage does not answer.
    """
    checked = []
    for path in paths:
        checked.append(_check(path))
        on_save(checked[-1])
    return tuple(checked)


def _check(path: str) -> CheckedSave:
    store = Store(path)
    is_checkpoint = store.exists(CHECKPOINT_FILE)
    if not is_checkpoint and not store.exists(INDEX_FILE):
        return CheckedSave(
            location=store.location, kind="interrupted save", num_unnamed=len(store.sizes("data")), holds="no index"
        )
    kind = "checkpoint" if is_checkpoint else "saved embedding"
    try:
        parts, dense, tables = _named(path, is_checkpoint=is_checkpoint)
    except DocumentRefused as error:
        damage = Damage(name=error.name, found=error.found, expected=error.expected)
        return CheckedSave(
            location=store.location, kind=kind, damages=((damage, "the index, without which nothing is read"),)
        )
    damages = [*file_damages(store, tables, dense)]
    place_of = places_of(tables, dense) if damages else {}
    sizes = _sizes(tables, dense)
    return CheckedSave(
        location=store.location,
        kind=kind,
        holds=", ".join([*parts, *(f"table '{table.name}'" for table in tables)]),
        num_files=len(sizes),
        num_bytes=sum(sizes.values()),
        damages=tuple((damage, place_of.get(damage.name, "")) for damage in damages),
        num_unnamed=len(store.sizes("data").keys() - sizes.keys()),
    )


def _named(path: str, *, is_checkpoint: bool) -> tuple[list[str], list[DenseFile], tuple[TableFiles, ...]]:
    """Parts, arrays and tables of an index.

    Raises:
      DocumentRefused: it is damaged or not ours.
    """
    if not is_checkpoint:
        return [], [], read_index(path)[0]
    record, arrays = read_checkpoint(path)
    tables = read_index(path)[0] if record.embedding is not None else ()
    return [f"part '{part}'" for part in record.parts], [*arrays.values()], tables


def _sizes(tables: Sequence[TableFiles], dense: Sequence[DenseFile]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for leaf in dense:
        sizes |= leaf.file_sizes()
    for table in tables:
        sizes |= {f"{array.path}/zarr.json": array.metadata_size_bytes for array in table.arrays}
        sizes.update(table.chunk_sizes())
    return sizes


def render(checked: Sequence[CheckedSave]) -> str:
    """Text of a check, ready to print."""
    rows = [("saved in", "files", "size", "state", "what")]
    rows += [
        (
            save.location,
            f"{save.num_files:,}",
            format_bytes(save.num_bytes),
            _state(save),
            f"{save.kind}: {save.holds}" if save.holds else save.kind,
        )
        for save in checked
    ]
    parts = ["Saved step by step, by Checkpoint or TPUEmbedding.save: no run, so no chain of commits", columns(rows)]
    lines = [
        line
        for save in checked
        for damage, place in save.damages
        for line in (
            f"  {save.location}/{damage.name}",
            *([f"    {place}"] if place else []),
            f"    found {damage.found}; expected {damage.expected}",
            "    to do: restore another one that is intact; nothing restores what is damaged",
        )
    ]
    if lines:
        parts.append("Damage\n" + "\n".join(lines))
    unnamed = [
        f"  {save.location}: {plural(save.num_unnamed, 'file')} below data/" for save in checked if save.num_unnamed
    ]
    if unnamed:
        parts.append("Left over; no reader uses it\n" + "\n".join(unnamed))
    damaged = sum(len(save.damages) for save in checked)
    parts.append(f"{plural(damaged, 'damage')} found" if damaged else "No damage found")
    return printable("\n\n".join(parts))


def _state(save: CheckedSave) -> str:
    if save.kind == "interrupted save":
        return "nothing reads it"
    return "intact" if save.is_intact else f"DAMAGED: {plural(len(save.damages), 'damage')}"
