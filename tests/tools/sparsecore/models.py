"""Models of `jax-tpu-embedding` over sample tables, laid out by the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tests.orchestrator.committed_tables import SampleTable
from tests.tools.sparsecore.package import embedding, embedding_spec, table_stacking


def features(
    tables: Mapping[str, SampleTable], *, chips: int, cores: int, together: Sequence[Sequence[str]]
) -> list[Any]:
    """Features of a model of the package, one a table, laid out by it."""
    made = []
    for name, table in tables.items():
        num_rows, dim = table.arrays["rows"].shape
        spec = embedding_spec.TableSpec(
            name=name,
            vocabulary_size=num_rows,
            embedding_dim=dim,
            initializer=jax.nn.initializers.constant(0.0),
            optimizer=embedding_spec.SGDOptimizerSpec(),
            combiner="sum",
        )
        made.append(
            embedding_spec.FeatureSpec(name=f"f_{name}", table_spec=spec, input_shape=[64, 4], output_shape=[64, dim])
        )
    for group in together:
        table_stacking.stack_tables(made, group, chips, cores)
    embedding.prepare_feature_specs_for_training(made, global_device_count=chips, num_sc_per_device=cores)
    return made
