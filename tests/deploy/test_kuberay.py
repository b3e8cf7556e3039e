"""The files in `deploy/kuberay`: their form, and that what one part says fits what another says."""

from __future__ import annotations

import copy
from pathlib import Path

import jsonschema
import pytest
import tyro
import yaml

from podembed.jobs.cli.main import Command, Train
from podembed.jobs.cli.settings import parse_hosts, scaling_config
from podembed.orchestrator.api.topology import Topology
from tests.architecture.test_imports import ROOT
from tests.deploy.files import FILES, JOBS, KUBERAY, documents, flag, groups, pods, ray_job, words
from tests.deploy.schemas import SCHEMAS

NAMES = ["rayjob-cpu.yaml", "rayjob-spot.yaml", "rayjob-tpu-v6e-4x4.yaml"]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
each_job = pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)


def test_the_files_are_there() -> None:
    assert [path.name for path in JOBS] == NAMES
    assert {path.name for path in FILES} == {"kueue.yaml", *NAMES}


@each_file
def test_files_have_the_form_of_their_resources(path: Path) -> None:
    for document in documents(path):
        jsonschema.validate(document, SCHEMAS[document["kind"]])


def test_slips_of_the_pen_are_found() -> None:
    (good,) = documents(JOBS[0])
    for change in (
        lambda spec: spec.update(backofLimit=3),
        lambda spec: spec.update(backoffLimit="3"),
        lambda spec: spec.pop("entrypoint"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(numOfHosts=0),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].update(gracePeriod=3),
    ):
        wrong = copy.deepcopy(good)
        change(wrong["spec"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMAS["RayJob"])


@each_job
def test_attempts_continue_one_run(path: Path) -> None:
    (job,) = documents(path)
    spec, found = job["spec"], words(path)
    assert found[:2] == ["podembed", "train"]
    assert "--resume" in found
    assert flag(path, "--name") == job["metadata"]["name"]
    assert spec["backoffLimit"] > 0
    # KubeRay puts the line into a command of a shell, where these would end it.
    assert not set("&|;<>$`'\"") & set(spec["entrypoint"])
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())
    graces = {pod["terminationGracePeriodSeconds"] for pod in pods(path)}
    assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) < min(graces)


@each_job
def test_the_line_is_a_command(path: Path) -> None:
    command = tyro.cli(Command, args=words(path)[1:])  # pyright: ignore[reportArgumentType]
    assert isinstance(command, Train)
    scaling = scaling_config(command, parse_hosts(command.hosts))
    pods_of_hosts = sum(group["maxReplicas"] * group.get("numOfHosts", 1) for group in groups(path))
    assert scaling.most_hosts == pods_of_hosts


@each_job
def test_all_pods_have_what_the_run_reads_and_one_image(path: Path) -> None:
    assert len({container["image"] for pod in pods(path) for container in pod["containers"]}) == 1
    for pod in pods(path):
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {"/job", "/data", "/runs"}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert flag(path, "--storage") == "/runs"
    assert flag(path, "--set") == "folder=/data"


def test_versions_are_those_that_tests_ran_with() -> None:
    pinned = next(
        line.partition("==")[2] for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("ray==")
    )
    assert {ray_job(path)["rayClusterSpec"]["rayVersion"] for path in JOBS} == {pinned}


@pytest.mark.parametrize("name", ["rayjob-cpu.yaml", "rayjob-spot.yaml"])
def test_a_range_of_hosts_is_that_of_the_pods(name: str) -> None:
    path = KUBERAY / name
    (group,) = groups(path)
    assert parse_hosts(flag(path, "--hosts")) == (group["minReplicas"], group["maxReplicas"])
    assert ray_job(path)["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert "--ask-cluster" in words(path)
    (container,) = group["template"]["spec"]["containers"]
    assert flag(path, "--resources") == f"CPU={container['resources']['limits']['cpu']}"


def test_hosts_of_spot_machines_leave_in_time() -> None:
    head, workers = pods(KUBERAY / "rayjob-spot.yaml")
    assert "nodeSelector" not in head
    assert workers["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    variables = {one["name"]: one["value"] for one in workers["containers"][0]["env"]}
    assert float(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < workers["terminationGracePeriodSeconds"]


def test_a_group_of_tpu_machines_is_a_slice() -> None:
    path = KUBERAY / "rayjob-tpu-v6e-4x4.yaml"
    topology = Topology.of(flag(path, "--topology"), flag(path, "--accelerator-type"))
    (group,) = groups(path)
    pod = group["template"]["spec"]
    assert group["numOfHosts"] == topology.hosts
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == int(flag(path, "--slices"))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": f"tpu-{topology.generation}-slice",
        "cloud.google.com/gke-tpu-topology": topology.shape,
    }
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["google.com/tpu"] == str(topology.chips_per_host)


def test_queues_have_room_for_each_job() -> None:
    found = {document["kind"]: document for document in documents(KUBERAY / "kueue.yaml")}
    groups_of_queue = found["ClusterQueue"]["spec"]["resourceGroups"]
    quotas = {
        one["name"]: float(one["nominalQuota"].removesuffix("Gi"))
        for group in groups_of_queue
        for flavor in group["flavors"]
        for one in flavor["resources"]
    }
    assert found["LocalQueue"]["spec"]["clusterQueue"] == found["ClusterQueue"]["metadata"]["name"]
    flavors = {one["metadata"]["name"] for one in documents(KUBERAY / "kueue.yaml") if one["kind"] == "ResourceFlavor"}
    assert flavors == {flavor["name"] for group in groups_of_queue for flavor in group["flavors"]}
    for path in JOBS:
        counts = [1, *(group["maxReplicas"] * group.get("numOfHosts", 1) for group in groups(path))]
        for name, quota in quotas.items():
            requests = [pod["containers"][0]["resources"]["requests"].get(name, "0") for pod in pods(path)]
            needed = sum(n * float(one.removesuffix("Gi")) for n, one in zip(counts, requests, strict=True))
            assert needed <= quota, (path.name, name)
