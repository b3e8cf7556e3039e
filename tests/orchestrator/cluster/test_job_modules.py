"""Modules of a job that machines of a cluster lack, named before anything is started there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.cluster.job_modules import packages_of, require_modules
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.search_path import SearchPath
from tests.long_tests import is_long
from tests.small_job import small_job

MODEL = """
import far_away_helper
class Far:
    def init(self, key, num_dense, widths):
        return {}
    def apply(self, params, dense, activations):
        return far_away_helper.zero(dense)
"""


@pytest.fixture
def far_job(tmp_path: Path, small_data: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobConfig]:
    """A job whose model lies in a folder of its own."""
    (tmp_path / "far_away_model.py").write_text(MODEL)
    (tmp_path / "far_away_helper.py").write_text("def zero(dense):\n    return dense.sum(axis=1) * 0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield replace(small_job(folder=small_data), model=importlib.import_module("far_away_model").Far())
    # Other tests in this process ask which modules are found, and one that is loaded always is.
    for name in ("far_away_model", "far_away_helper"):
        sys.modules.pop(name, None)


def test_a_job_names_the_packages_that_it_travels_with(far_job: JobConfig) -> None:
    found = packages_of(far_job)
    assert "far_away_model" in found
    # Ours, and those of Python, are not the job's business.
    assert not {"podembed", "ray", "builtins", "collections"} & {*found}
    assert packages_of(JobReference(function="far_away_model.parts:job")) == ("far_away_model",)
    assert packages_of(JobReference(function="podembed.jobs.criteo:criteo")) == ()


def test_what_the_script_itself_defines_travels_by_value(far_job: JobConfig) -> None:
    """Its class goes along, and what that refers to is needed."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(MODEL, script)
    found = packages_of(replace(far_job, model=script["Far"]()))
    assert "far_away_model" not in found
    assert "far_away_helper" in found


@is_long
@pytest.mark.ray
def test_a_machine_without_a_module_is_named_before_anything_starts(
    ray_cluster: None, far_job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    nodes = ray.nodes()
    require_modules(far_job, SearchPath())
    elsewhere: list[dict[str, Any]] = [node | {"NodeManagerAddress": "10.0.0.9"} for node in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: elsewhere)
    with pytest.raises(ConfigurationError, match=r"no module 'far_away_model' on the machine 10\.0\.0\.9.*working-dir"):
        require_modules(far_job, SearchPath())
    require_modules(far_job, SearchPath(after=(str(tmp_path),)))
