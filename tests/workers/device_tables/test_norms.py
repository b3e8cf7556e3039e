"""Norms of samples of tables on devices beside numpy over whole tables of commits. test_runs.py has them beside those
of runs with all tables on hosts.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.driver import windows
from podembed.tools.metrics.point import Point
from podembed.tools.metrics.reading import StreamReader
from podembed.workers.device.tables.held import rows_here, rows_there
from podembed.workers.device.tables.lines import shape_in_lines
from podembed.workers.host import row_norms
from podembed.workers.host.row_norms import QUANTILES, sampled_ids
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.run_state import committed_state
from tests.workers.device_tables.jobs import SIZES, placed_job, train, write_rows

SERIES = ("table_trained_ratio", "table_row_norm", "table_row_growth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return folder


def sample_each_window(monkeypatch: pytest.MonkeyPatch, *, often: bool = False) -> None:
    """With `often`, hosts in this process look at their rows in each."""
    monkeypatch.setattr(windows, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(windows, "LOOK_SHARE", 0.0)
    if often:
        monkeypatch.setattr(row_norms, "FIRST_LOOK", 0)
        monkeypatch.setattr(row_norms, "LOOK_EVERY", 1)


def looks(path: str) -> dict[int, Point]:
    """By step the points that say something of tables."""
    points = StreamReader(Store(path)).read().windows
    return {point.step: point for point in points if list(point.each("table_row_norm"))}


def assert_said_of_all_rows(path: str, folder: Path, storage: Path) -> None:
    """The last look of a run has the figures of all rows at that step, as a run in this process leaves them."""
    step, point = max(looks(path).items())
    assert step > 5
    after = committed_state(train(folder, storage, "again", max_steps=step).path)
    for name in SIZES:
        assert_said_of_the_rows(point, name, after)


def assert_said_of_the_rows(point: Point, name: str, after: dict[str, np.ndarray]) -> None:
    """Of a table with a rule that has an accumulator or nothing, by all its rows after the last step."""
    declared = next(table for table in placed_job("", list(SIZES)).tables if table.name == name)
    spec = TableSpec.of(declared, seed=placed_job("", list(SIZES)).seed)
    rows, sample = after[f"{name}/rows"], sampled_ids(spec)
    if f"{name}/accumulator" in after:
        initial = spec.optimizer.slots[0].initial_value  # type: ignore[union-attr]
        is_trained = (after[f"{name}/accumulator"] != initial).any(axis=1)[sample]
        assert point.value("table_trained_ratio", table=name) == pytest.approx(is_trained.mean())
        sample = sample[is_trained]
    norms = np.linalg.norm(rows[sample], axis=1)
    for quantile in QUANTILES:
        labels = {"table": name, "quantile": f"{quantile:g}"}
        assert point.value("table_row_norm", **labels) == pytest.approx(np.quantile(norms, quantile), rel=1e-4)


# In make test a host in this process and two hosts are looked at in test_runs.py.
@is_long
@pytest.mark.ray
@pytest.mark.parametrize(("num_hosts", "devices"), [(1, {}), (2, {}), (2, {"mesh": {"data": 1, "model": 2}})])
def test_norms_are_those_of_all_rows(
    folder: Path,
    tmp_path: Path,
    ray_cluster: None,
    num_hosts: int,
    devices: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample_each_window(monkeypatch)
    found = train(
        folder,
        tmp_path,
        "run",
        num_hosts=num_hosts,
        in_process=False,
        on_devices=list(SIZES),
        **devices,  # type: ignore[arg-type]
    )
    assert_said_of_all_rows(found.path, folder, tmp_path)


def assert_the_same_is_said(found: str, expected: str, *, tables: set[str]) -> None:
    """Two runs have the same figures of these tables, and of no others."""
    numbers, others = looks(found), looks(expected)
    steps = sorted(numbers.keys() & others.keys())
    assert {5, 10, 15, 20} <= {*steps}
    for step in steps:
        assert said(numbers[step]) == {
            key: pytest.approx(value, rel=5e-3, abs=1e-6) for key, value in said(others[step]).items()
        }
    assert {table for _, table, _ in said(numbers[steps[-1]])} == tables


def said(point: Point) -> dict[tuple[str, str, str], float]:
    return {
        (name, one.labels["table"], one.labels.get("quantile", "")): one.value
        for name in SERIES
        for one in point.each(name)
    }


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_rows_are_the_same_from_any_device(count: int) -> None:
    """Where devices are no CPUs, a compiled program gathers them."""
    random = np.random.default_rng(1)
    values = {"rows": random.normal(size=(50, 4)).astype(np.float32), "accumulator": np.zeros((50, 1), np.float32)}
    # In lines of 128 numbers, the last of which has padding.
    arrays = {name: jnp.asarray(np.resize(one, shape_in_lines(*one.shape))) for name, one in values.items()}
    rows = random.integers(0, 50, count).astype(np.int32)
    for found in (rows_here(arrays, rows, (4, 1)), rows_there(arrays, rows, (4, 1))):
        for name, one in values.items():
            np.testing.assert_array_equal(found[name], one[rows])
