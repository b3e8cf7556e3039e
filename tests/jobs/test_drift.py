"""The stream of `drift`, and that its models learn as each alone, at equal memory, and are scored by day."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.hashing import mix64
from podembed.embedding.table_spec import TableSpec
from podembed.jobs.cli.job_choice import job_reference
from podembed.jobs.drift import MEMORY, auc_of, by_day, bytes_of, counts_of, drift
from podembed.jobs.drift_files import DAYS_BEFORE, DriftSpec, days_of
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.quality import area_under_curve
from podembed.workers.job.tables import table_specs
from tests.training import fit_job

SPEC = DriftSpec(days=3, samples_per_day=1_500, users=40, items_per_day=50)


def job_of(cache: Path, **arguments: object) -> JobConfig:
    of_stream = {name: getattr(SPEC, name) for name in ("days", "samples_per_day", "users", "items_per_day")}
    return drift(cache=str(cache / "cache"), **{**of_stream, "capacity": 60, "batch_size": 256, **arguments})


def items_of(job: JobConfig) -> dict[str, TableSpec]:
    specs = table_specs(job, [1] * len(job.tables))
    return {spec.name.removesuffix("_items"): spec for spec in specs if spec.name.endswith("_items")}


def test_items_come_and_go() -> None:
    """A tenth of a day's samples name its new items, nobody did before, and the next day fewer do."""
    spec = DriftSpec(days=4, samples_per_day=20_000, users=10, items_per_day=30)
    days = list(days_of(spec))
    for number in range(spec.days):
        first = (DAYS_BEFORE + number) * spec.items_per_day
        new = mix64(np.arange(first, first + spec.items_per_day), salt=spec.seed).view(np.int64)
        shares = [np.isin(day.item, new).mean() for day in days]
        expected = [0.1 * 0.9**age for age in range(spec.days - number)]
        assert shares[:number] == [0.0] * number
        assert shares[number:] == pytest.approx(expected, abs=0.01)


def test_labels_are_drawn_by_the_odds() -> None:
    (day,) = days_of(DriftSpec(days=1, samples_per_day=50_000))
    for low, high in pairwise((-9, -2, -1, 0, 1, 9)):
        of_bin = (day.odds > low) & (day.odds <= high)
        expected = (1 / (1 + np.exp(-day.odds[of_bin]))).mean()
        assert day.label[of_bin].mean() == pytest.approx(expected, abs=0.02)


def test_models_side_by_side_learn_as_each_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And all samples are counted on their days, which are told at the end."""
    job = job_of(tmp_path)
    counts = counts_of(fit_job(job, tmp_path, name="all").path)
    assert capsys.readouterr().out.split("\n") == ["", *by_day(counts, items_of(job)), ""]
    for day, of_day in zip(days_of(SPEC), counts, strict=True):
        assert of_day.sum(axis=(1, 2)).tolist() == [1_500] * 4
        assert auc_of(of_day[-1]) == pytest.approx(area_under_curve(day.odds, day.label), abs=1e-3)
    *_, last = by_day(counts, items_of(job))
    assert last.split() == ["3", "1,500", *(f"{auc_of(one):.4f}" for one in counts[2])]
    alone = counts_of(fit_job(job_of(tmp_path, models=("dynamic",)), tmp_path, name="alone").path)
    # A score may be rounded in another order, and then fall into the next bin.
    assert np.abs(alone[:, 0] - counts[:, 0]).sum() < 0.01 * alone[:, 0].sum()
    assert np.abs(counts[:, 1] - counts[:, 0]).sum() > 0.5 * alone[:, 0].sum()


@pytest.mark.parametrize("min_count", [1, 2])
def test_tables_take_the_memory_that_the_models_are_compared_at(tmp_path: Path, min_count: int) -> None:
    """To a row."""
    items = items_of(job_of(tmp_path, capacity=500, min_count=min_count))
    one = bytes_of(items["dynamic"])
    for name, times in MEMORY.items():
        row = bytes_of(items[name]) / items[name].num_rows
        assert times * one - row < bytes_of(items[name]) <= times * one
    assert items["hashed"].num_rows > 1.2 * items["dynamic"].num_rows


def test_auc_of_counts() -> None:
    rng = np.random.default_rng(0)
    bins, labels = rng.integers(0, 6, 300), rng.integers(0, 2, 300)
    counts = np.zeros((6, 2), np.float32)
    np.add.at(counts, (bins, labels), 1)
    assert auc_of(counts) == pytest.approx(area_under_curve(bins, labels))
    assert np.isnan(auc_of(counts * [1, 0]))


@pytest.mark.parametrize("arguments", [{"models": ("static",)}, {"models": ()}, {"evict": "oldest"}])
def test_unknown_models_and_policies_are_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(JobError, match=r"Found models=.* and evict='.*'\. Expected some of"):
        job_of(tmp_path, **arguments)


def test_the_stream_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_reference("drift", (), {}).arguments == {"cache": str(tmp_path / ".data/drift")}
    assert job_reference("drift", ("cache=x",), {}).arguments == {"cache": str(tmp_path / "x")}
