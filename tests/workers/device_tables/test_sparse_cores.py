"""Sharded tables on SparseCores: as the package makes its lists, as hosts train, and where there are none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts
from podembed.workers.device import device_mesh
from podembed.workers.device.device_mesh import num_cores_of
from podembed.workers.device.gang_errors import GangError
from podembed.workers.device.options import DeviceOptions
from tests.long_tests import is_long, long_case
from tests.workers.device_tables.jobs import placed_job

ROOT = Path(__file__).parents[3]
PACKAGE = "jax-tpu-embedding"
HAS_PACKAGE = importlib.util.find_spec("jax_tpu_embedding") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="no jax-tpu-embedding: pip install -e '.[sparsecore]'")
# Since 0.2 the rule of an update comes as text, which the emulation cannot run.
needs_programs = pytest.mark.skipif(
    HAS_PACKAGE and importlib.metadata.version(PACKAGE) >= "0.2", reason="cores are emulated with jax-tpu-embedding 0.1"
)


def printed(module: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.workers.device_tables.{module}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_package
@needs_programs
@pytest.mark.parametrize("kinds", ["few", long_case("all")])
def test_cores_do_what_hosts_do(kinds: str, tmp_path: Path) -> None:
    """Beside the package: the same lists. Beside hosts: the same losses and committed arrays, to the order of sums."""
    found = printed("cores_process", str(tmp_path), kinds)
    assert found["lists"] == [[]] * (2 if kinds == "few" else 6)
    assert len(found["runs"]) == (1 if kinds == "few" else 2)
    for job, one in found["runs"].items():
        assert one["losses"] < 2e-6, job
        # Sums of both signs that nearly cancel are divided by their size.
        assert {name: worst for name, worst in one["arrays"].items() if worst > 2e-5} == {}, job
        assert one["rounds"] == 1, job


@needs_package
@needs_programs
@is_long
def test_cores_lose_no_id_whatever_the_ids(tmp_path: Path) -> None:
    """With room for eight rows: dozens of rounds."""
    found = printed("adversaries_process", str(tmp_path), "cores")
    assert len(found) == 5
    for kind, one in found.items():
        assert one["losses"] < 1e-5, kind
        assert one["arrays"] < 1e-5, kind
    assert found["a sample of 10,000 ids"]["rounds"] > 10


def test_where_there_are_no_cores_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = DeviceOptions(has_sparse_cores=True)
    with pytest.raises(GangError, match="Found sparse_cores on TPU v5 lite. Expected devices with SparseCores: v5p, v"):
        num_cores_of("TPU v5 lite", options)
    cut = DeviceOptions(has_sparse_cores=True, mesh=(("data", 2), ("model", 2)))
    with pytest.raises(GangError, match="Found sparse_cores beside mesh=data=2,model=2"):
        num_cores_of("TPU v6 lite", cut)
    monkeypatch.setattr(device_mesh.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GangError, match=r"without the package jax-tpu-embedding.*pip install 'podembed\[sparsecore\]'"):
        num_cores_of("TPU v6 lite", options)


def test_where_no_table_is_for_cores_a_run_is_refused(tmp_path: Path) -> None:
    cores = ScalingConfig(sparse_cores=True)
    check_hosts(placed_job(str(tmp_path), sharded=["many"]), cores)
    check_hosts(placed_job(str(tmp_path), auto=["many"]), cores)
    check_hosts(placed_job(str(tmp_path), on_devices=["many"]), ScalingConfig())
    with pytest.raises(ConfigurationError, match="Found sparse_cores, and no table of job 'placed' on the chips"):
        check_hosts(placed_job(str(tmp_path), on_devices=["many"]), cores)
