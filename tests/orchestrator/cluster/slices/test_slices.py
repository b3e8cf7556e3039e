"""What labels say of machines, and what device processes are told of their slices. No cluster is needed for that."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.cluster.places import Place
from podembed.orchestrator.cluster.slices.backend import gang_variables
from podembed.orchestrator.cluster.slices.holding import demanded
from podembed.orchestrator.cluster.slices.labels import domain_of, part_of, selectors
from podembed.orchestrator.cluster.worker_environment import worker_environment
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Slice, SliceMember

CUBE = Topology.of("2x2x2", "TPU-V4")
ONE_MACHINE = Topology.of("2x4", "TPU-V6E")


def node(**labels: str) -> dict[str, Any]:
    return {
        "NodeID": "0123456789",
        "NodeManagerAddress": "10.0.0.7",
        "Labels": {f"ray.io/tpu-{name.replace('_', '-')}": value for name, value in labels.items()},
    }


MEMBER = node(slice_name="a", worker_id="1", pod_type="v4-16")


def test_machines_of_a_slice_fail_as_one_where_the_run_uses_slices() -> None:
    assert domain_of(MEMBER, CUBE) == FailureDomain("a")
    assert domain_of(MEMBER, CUBE).label == "slice a"
    alone = FailureDomain.of_machine("0123456789", "10.0.0.7")
    assert domain_of(MEMBER, None) == domain_of(node(), CUBE) == domain_of(MEMBER, ONE_MACHINE) == alone


@pytest.mark.parametrize(
    ("labels", "topology", "part"),
    [
        ({"slice_name": "a", "worker_id": "1", "pod_type": "v4-16"}, CUBE, SliceMember(pod_type="v4-16", worker=1)),
        ({"slice_name": "a", "worker_id": "1", "pod_type": "v4-32"}, CUBE, SliceMember(pod_type="v4-32", worker=1)),
        ({"slice_name": "a", "worker_id": "1", "pod_type": "v4-16"}, None, None),
        ({"slice_name": "a", "worker_id": "x", "pod_type": "v4-16"}, CUBE, None),
        ({"worker_id": "1", "pod_type": "v4-16"}, CUBE, None),
        ({}, CUBE, None),
        # A slice that is one machine needs no name and no number.
        ({"pod_type": "v6e-8"}, ONE_MACHINE, SliceMember(pod_type="v6e-8", worker=0)),
    ],
)
def test_a_machine_is_a_part_if_its_labels_say_which(
    labels: dict[str, str], topology: Topology | None, part: SliceMember | None
) -> None:
    assert part_of(node(**labels), topology) == part


def test_reservations_name_the_machines_of_a_slice() -> None:
    first, second = selectors(Slice(name="a", machines=("x", "y")), CUBE)
    assert first == {"ray.io/tpu-slice-name": "a", "ray.io/tpu-worker-id": "0"}
    assert second == {"ray.io/tpu-slice-name": "a", "ray.io/tpu-worker-id": "1"}
    assert selectors(Slice(name="x", machines=("x",)), ONE_MACHINE) == [{"ray.io/node-id": "x"}]
    bundles, labels = demanded(CUBE, 2, {"TPU": 4.0})
    assert (bundles, labels) == ([{"TPU": 4.0}] * 4, [{"ray.io/tpu-pod-type": "v4-16"}] * 4)


def test_each_generation_tells_its_devices_which_slices_there_are() -> None:
    a, b = object(), object()
    places = [Place(a, 0, "a0"), Place(a, 1, "a1"), Place(b, 0, "b0"), Place(b, 1, "b1")]
    both = gang_variables(places, {"a0": "10.0.0.1", "b0": "10.0.0.3"})
    assert both[id(a)] == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "0",
    }
    assert both[id(b)] == {**both[id(a)], "MEGASCALE_SLICE_ID": "1"}
    alone = gang_variables(places[2:], {"b0": "10.0.0.3"})
    assert alone[id(b)]["MEGASCALE_NUM_SLICES"] == "1", "what the machine was started with is overwritten all the same"
    assert alone[id(b)]["MEGASCALE_COORDINATOR_ADDRESS"] == "10.0.0.3"


def test_the_run_says_what_its_devices_are_whatever_the_environment_says() -> None:
    def platforms(kind: Any, wanted: str | None) -> str | None:
        found = worker_environment(
            kind, resources={"TPU": 4}, threads=None, environ={"JAX_PLATFORMS": "cuda"}, platforms=wanted
        )
        return found.get("JAX_PLATFORMS")

    assert (platforms("device", "tpu,cpu"), platforms("device", "cpu"), platforms("device", None)) == (
        "tpu,cpu",
        "cpu",
        None,
    )
    assert platforms("host", "tpu,cpu") == "cpu"
