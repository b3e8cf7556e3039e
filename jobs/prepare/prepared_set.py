"""`prepared.json`: what training needs to know of a prepared set: its columns, and how many rows the table of each
field has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import fsspec

from podembed.jobs.prepare.settings import FieldPlan, Form, IdKind, PrepareError
from podembed.workers.data.columns import DenseColumn
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.strict_json import parse_strictly

FILE_NAME = "prepared.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedField:
    """One categorical field, whose column holds rows of its table.

    Attributes:
      rows: rows of the table, the reserved ones included.
      salt: salt of the hash.
      min_count: how often a value had to occur to be in the vocabulary.
      vocabulary: path of its file within the folder, None with a hash.
      vocabulary_sha256: vocabulary sha256 of that file.
    """

    name: str
    ids: IdKind
    rows: int
    salt: int
    min_count: int
    vocabulary: str | None = None
    vocabulary_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSet:
    """The columns of a prepared set. Two sets with equal values here can be trained and evaluated together."""

    form: Form
    label: str
    dense: tuple[DenseColumn, ...]
    fields: tuple[PreparedField, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **asdict(self), "dense": dense_to_json(self.dense)}

    @property
    def sha256(self) -> str:
        """Identity of the declaration, and so of the ids."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def plans(self) -> tuple[FieldPlan, ...]:
        """What to ask for so that other text gets the same ids."""
        return tuple(
            FieldPlan(
                name=field.name,
                ids=field.ids,
                max_rows=field.rows if field.ids == "hash" else None,
                min_count=field.min_count,
                salt=field.salt,
            )
            for field in self.fields
        )


def dense_to_json(columns: Sequence[DenseColumn]) -> list[dict[str, str]]:
    """What a prepared set says of its numbers. It has no times, so nothing of those."""
    return [{"name": column.name, "transform": column.transform} for column in columns]


def read_prepared(url: str) -> PreparedSet:
    """Reads a `prepared.json` at a path or URL.

    Raises:
      PrepareError: it is not there, or not of this form.
    """
    try:
        with fsspec.open(url, "rb") as file:
            document = parse_strictly(url, cast(Any, file).read())
        return _from_json(document)
    except FileNotFoundError as error:
        raise PrepareError(
            f"Found no {url}. Expected the {FILE_NAME} of a prepared set. Prepare the text first: podembed prepare."
        ) from error
    except (StorageError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise PrepareError(
            f"Found {url} unreadable ({error!r}). Expected what podembed prepare writes, in format {FORMAT_VERSION}. "
            "Prepare the text again with this version."
        ) from error


def _from_json(document: Mapping[str, Any]) -> PreparedSet:
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version {document['format_version']}")
    return PreparedSet(
        form=document["form"],
        label=document["label"],
        dense=tuple(DenseColumn(**column) for column in document["dense"]),
        fields=tuple(PreparedField(**field) for field in document["fields"]),
    )
