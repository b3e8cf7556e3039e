"""Topologies: the numbers are those of Ray, which reserves by them."""

from __future__ import annotations

import pytest
from ray._private.accelerators import tpu

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.topology import TOPOLOGIES, Topology


def test_all_topologies_are_those_of_ray_and_have_as_many_machines() -> None:
    assert {generation: set(shapes) for generation, shapes in TOPOLOGIES.items()} == tpu.VALID_TPU_TOPOLOGY
    for generation, shapes in TOPOLOGIES.items():
        for shape in shapes:
            found = Topology.of(shape, f"TPU-{generation.upper()}")
            chips, a_host = tpu.get_num_chips_from_topology(shape), tpu.get_chips_per_host(shape, generation)
            assert (found.chips, found.chips_per_host, found.hosts) == (chips, a_host, max(1, chips // a_host))
            assert found.pod_type == tpu.infer_tpu_pod_type_from_topology(shape, found.accelerator_type)


@pytest.mark.parametrize("name", ["TPU-V6E", "v6e", " tpu-v6e ", "V6E"])
def test_a_generation_has_several_spellings(name: str) -> None:
    found = Topology.of(" 4X4", name)
    assert (found.shape, found.generation, found.hosts, found.pod_type) == ("4x4", "v6e", 4, "v6e-16")
    assert str(found) == "4x4 TPU-V6E"


def test_google_and_ray_call_one_generation_differently() -> None:
    assert Topology.of("4x4", "v5e").generation == Topology.of("4x4", "TPU-V5LITEPOD").generation == "v5litepod"
    assert Topology.of("2x2x1", "tpu7x").generation == "v7x"


@pytest.mark.parametrize(
    ("topology", "accelerator_type", "message"),
    [
        ("4x5", "TPU-V6E", r"Found topology='4x5' .*\. Expected one of 1x1, 2x2, .*\. Choose .*--topology"),
        ("4x4", "TPU-V5P", r"Expected one of 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, .* and \d+ larger ones"),
        ("4x4", "H100", r"Found accelerator_type='H100'\. Expected one of TPU-V2, .*--accelerator-type"),
        ("", "TPU-V6E", r"Found topology=''"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(topology: str, accelerator_type: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology.of(topology, accelerator_type)
