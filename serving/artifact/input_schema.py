"""The schema of an export's input: how columns become what its program takes. docs/inference.md has each field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax.export import Exported

from podembed.embedding.config import TableConfig
from podembed.serving.artifact.export_files import ExportFiles
from podembed.serving.predict.portable_forward import read_columns, read_features
from podembed.workers.data.columns import DenseColumn
from podembed.workers.data.extra_columns import ExtraColumn, IntegerColumn, ListColumn, VectorColumn
from podembed.workers.data.files import read_whole
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import Bags, feature_bindings


def input_schema(job: JobConfig, exported: Exported, files: ExportFiles, *, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the manifest that say how columns are read. Vocabularies are written.

    Args:
      exported: the program. Features and extra columns that it does not read are left out.
      kinds: kinds of values, as `trained_kinds` has them.
    """
    read = read_columns(exported)
    return {
        "dense_columns": [_dense_column(one, kinds) for one in job.resolved_data.dense_columns],
        "extra_columns": [
            _extra_column(one) | {"holds": kinds.get(one.name)} for one in job.data.extra_columns if one.name in read
        ],
        "features": _features(job, read_features(exported), files, kinds),
    }


def _features(
    job: JobConfig, read: Collection[str], files: ExportFiles, kinds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """How each column that is read becomes rows of a table and what the model gets of them."""
    columns, bags = job.resolved_data.id_columns, Bags(job)
    names: dict[str, str] = {}
    for path in job.resolved_data.vocabularies:
        names[path] = f"vocabularies/{len(names)}.txt"
        files.write_bytes(names[path], read_whole(path))
    described = []
    for binding, (name, shape) in zip(feature_bindings(job), job.activation_shapes.items(), strict=True):
        if name not in read:
            continue
        column, table = columns[name], job.tables[binding.table]
        described.append(
            {
                "name": name,
                "column": column.column,
                "holds": kinds.get(column.column),
                "mode": column.mode,
                "vocabulary_size": table.vocabulary_size,
                "missing": column.missing,
                "salt": column.salt,
                "vocabulary": names[column.vocabulary] if column.vocabulary else None,
                "num_reserved": column.num_reserved,
                "unit": column.unit,
                "since": column.since,
                "boundaries": list(column.boundaries),
                "crossed_with": [
                    {
                        "column": one.column,
                        "holds": kinds.get(one.column),
                        "unit": one.unit,
                        "since": one.since,
                        "boundaries": list(one.boundaries),
                    }
                    for one in column.parts[1:]
                ],
                "weights": column.weights,
                "last": column.last,
                "invalid_ids": table.invalid_ids if table.dynamic_keys is None else "any",
                "table": binding.table,
                "combiner": binding.combiner,
                "quantization": _quantization(table),
                "positions": job.sequences.get(name, bags.positions(name)),
                "is_sequence": name in job.sequences,
                "shape": list(shape),
            }
        )
    return described


def _dense_column(column: DenseColumn | VectorColumn, kinds: Mapping[str, str]) -> dict[str, Any]:
    """How a column is read that gives some of the dense numbers."""
    described = _extra_column(column)
    kept = {name: described[name] for name in ("name", "size", "transform", "unit", "since")}
    return kept | {"holds": kinds.get(column.name)}


def _extra_column(column: ExtraColumn) -> dict[str, Any]:
    """How a column that the model gets by name is read."""
    kinds = {DenseColumn: "number", IntegerColumn: "integer", VectorColumn: "vector", ListColumn: "list"}
    size = getattr(column, "size", getattr(column, "max_length", None))
    described = {"name": column.name, "kind": kinds[type(column)], "size": size}
    defaults = {"dtype": "float32", "missing": 0, "transform": "identity", "unit": None, "since": None, "keep": "first"}
    return described | {field: getattr(column, field, default) for field, default in defaults.items()}


def _quantization(table: TableConfig) -> dict[str, Any] | None:
    config = table.quantization_config
    return config and {"num_buckets": config.num_buckets, "lower": config.lower, "upper": config.upper}
