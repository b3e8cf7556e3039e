"""Measurements of what hosts saw of their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from podembed.orchestrator.metrics.point import Measurement
from podembed.workers.host.table_looks.figures import QUANTILES, TableFigures


def table_measurements(tables: Sequence[TableFigures], rates: Collection[str]) -> Iterator[Measurement]:
    """As the catalog has them.

    Args:
      rates: names of tables whose learning rate in that step was not zero. The updates of others say nothing.
    """
    for found in tables:
        by_table = {"table": found.table}
        if found.num_rows and found.num_trained is not None:
            yield Measurement("table_trained_ratio", found.num_trained / found.num_rows, by_table)
        yield from _quantiles("table_row_norm", found.norms, by_table)
        yield from _quantiles("table_row_growth", found.growth, by_table)
        if found.table in rates:
            yield from _quantiles("table_update_ratio", found.changes, by_table)
            if found.num_updated is not None:
                yield Measurement("table_updated_rows", found.num_updated, by_table)
        if found.effective_rank is not None:
            yield Measurement("table_effective_rank", found.effective_rank, by_table)


def _quantiles(name: str, values: Sequence[float], labels: Mapping[str, str]) -> Iterator[Measurement]:
    for quantile, value in zip(QUANTILES, values, strict=False):
        yield Measurement(name, value, {**labels, "quantile": f"{quantile:g}"})
