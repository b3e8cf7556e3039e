"""The entrypoints of `deploy/kuberay`, submitted as KubeRay submits them, to a cluster of some nodes on this machine.

A signal stops an attempt at a random moment. The next one, submitted with the same line, goes on to the bytes of a run
that nothing disturbed. The folders of the pods are folders of the test. No pod and no KubeRay is there.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from podembed.tools.fsck.check import check_run
from podembed.workers.storage.store import Store
from tests.architecture.test_imports import ROOT
from tests.dashboard import WorkerNode, cluster_for_jobs, ray_job
from tests.deploy.files import KUBERAY
from tests.deploy.files import ray_job as job_of_file
from tests.long_tests import is_long
from tests.run_state import assert_same_bytes, committed_state

pytestmark = [pytest.mark.ray, pytest.mark.slow, is_long]
CLICKS = """
from podembed import JobConfig
from tests.small_job import small_job


def clicks(*, folder: str) -> JobConfig:
    return small_job(folder=folder, audit=False, epochs={epochs})
"""
EPOCHS = 60
END_S, STEP_S = 900, 0.2


# Of a head without processors for hosts, as in the files, and worker pods.
CPU_NODES = [WorkerNode(num_cpus=4)] * 2
TPU_NODES = [
    WorkerNode(
        num_cpus=100,
        resources={"TPU": 4},
        variables={
            "TPU_NAME": "slice-0",
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": "v6e-16",
            "TPU_TOPOLOGY": "4x4",
        },
    )
    for worker in range(4)
]


class Pod:
    """Folders in the place of the volumes of a RayJob's pods, and its entrypoint with their names."""

    def __init__(self, name: str, data: str, folder: Path, dashboard: str) -> None:
        self._spec, self._dashboard = job_of_file(KUBERAY / name), dashboard
        # It takes two seconds to import, and each process of a run of the tests imports this file.
        from ray.job_submission import JobSubmissionClient

        self._client = JobSubmissionClient(dashboard)
        self._places = {"/data": data, "/runs": str(folder / "runs"), "/job": f"{folder / 'job'}:{ROOT}"}
        (folder / "job").mkdir()
        (folder / "job" / "clicks.py").write_text(CLICKS.format(epochs=EPOCHS))

    def submit(self, attempt: str, run: str) -> None:
        """As the submitter of KubeRay: `ray job submit` with the line and the environment of the file."""
        environment = yaml.safe_load(self._spec["runtimeEnvYAML"])
        environment["env_vars"]["PYTHONPATH"] = self._places[environment["env_vars"]["PYTHONPATH"]]
        line = self._spec["entrypoint"].split()
        line = [self._placed(word) for word in line]
        line[line.index("--name") + 1] = run
        if "--topology" in line:
            # No chip is there, and two processors in the place of 400.
            line[line.index("--threads-per-host") + 1] = "1"
            line += ["--platform", "cpu"]
        self._ray(
            "submit",
            "--submission-id",
            attempt,
            "--no-wait",
            "--runtime-env-json",
            json.dumps(environment),
            *("--", *line),
        )

    def _placed(self, word: str) -> str:
        for place in ("/data", "/runs"):
            word = word.replace(place, self._places[place])
        return word

    def run(self, name: str) -> str:
        return f"{self._places['/runs']}/{name}"

    def stop(self, attempt: str) -> None:
        self._ray("stop", "--no-wait", attempt)

    def ended(self, attempt: str) -> str:
        deadline = time.monotonic() + END_S
        while not (found := self._client.get_job_status(attempt)).is_terminal():
            assert time.monotonic() < deadline, self.logs(attempt)[-3000:]
            time.sleep(STEP_S)
        return found.value

    def logs(self, attempt: str) -> str:
        return self._client.get_job_logs(attempt)

    def _ray(self, verb: str, *arguments: str) -> str:
        return ray_job(Path(sys.executable), verb, "--address", self._dashboard, *arguments, end_s=END_S)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("rayjob-cpu.yaml", CPU_NODES), ("rayjob-spot.yaml", CPU_NODES), ("rayjob-tpu-v6e-4x4.yaml", TPU_NODES)],
    ids=["cpu", "spot", "tpu"],
)
def test_a_stopped_attempt_is_continued_by_the_next(
    name: str, nodes: list[WorkerNode], small_data: str, tmp_path: Path
) -> None:
    with cluster_for_jobs(Path(sys.executable), num_cpus=0, workers=nodes) as address:
        stop_and_continue(Pod(name, small_data, tmp_path, address))


def stop_and_continue(pod: Pod) -> None:
    began = time.monotonic()
    pod.submit("whole", "undisturbed")
    assert pod.ended("whole") == "SUCCEEDED", pod.logs("whole")[-3000:]
    whole_s = time.monotonic() - began

    pod.submit("first", "clicks")
    store, deadline = Store(pod.run("clicks")), time.monotonic() + END_S
    while not store.exists("RUN.json"):
        assert time.monotonic() < deadline
        time.sleep(STEP_S)
    seed = random.randrange(1000)
    time.sleep(random.Random(seed).uniform(0.1, 0.5) * whole_s)
    pod.stop("first")
    assert pod.ended("first") != "SUCCEEDED", f"seed {seed}: too late to stop it"
    # A moment may lie before the first step: a busy machine takes longer to start.
    told = re.search(r"stopped by SIGTERM (at step|before a step was trained)", pod.logs("first"))
    assert told, f"seed {seed}: {pod.logs('first')[-3000:]}"
    pod.submit("second", "clicks")
    assert pod.ended("second") == "SUCCEEDED", pod.logs("second")[-3000:]
    assert_same_bytes(committed_state(pod.run("clicks")), committed_state(pod.run("undisturbed")))
    assert check_run(pod.run("clicks")).is_intact
