"""Settings and readings of prepared sets that tests share."""

from __future__ import annotations

from pathlib import Path

from podembed.jobs.prepare.settings import CRITEO_FIELDS, IdKind, PrepareSettings, criteo_dense, field_plans


def criteo_settings(
    *,
    ids: IdKind = "vocabulary",
    hashed: tuple[str, ...] = ("c3",),
    max_rows: int | None = None,
    min_count: int = 3,
    piece_bytes: int = 20_000,
) -> PrepareSettings:
    """Click logs in small pieces and row groups of 64."""
    return PrepareSettings(
        form="criteo",
        label="label",
        dense=criteo_dense(),
        fields=field_plans(
            CRITEO_FIELDS,
            ids=ids,
            hashed=hashed if ids == "vocabulary" else (),
            max_rows=max_rows,
            min_count=min_count,
        ),
        rows_per_group=64,
        piece_bytes=piece_bytes,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Path below the folder to the bytes of every file."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
