"""Hosts of whole slices: how many there are, what each reserves, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig

V6E: dict[str, Any] = {"topology": "4x4", "accelerator_type": "TPU-V6E"}


def test_hosts_follow_from_slices() -> None:
    two = ScalingConfig(**V6E, num_slices=2)
    assert (two.least_hosts, two.most_hosts, two.is_range) == (8, 8, False)
    some = ScalingConfig(**V6E, num_slices=(1, 4))
    assert (some.least_hosts, some.most_hosts, some.is_range) == (4, 16, True)
    one_machine = ScalingConfig(topology="2x4", accelerator_type="TPU-V6E")
    assert (one_machine.least_hosts, one_machine.reserved) == (1, {"CPU": 1.0, "TPU": 8.0})


def test_a_host_reserves_all_chips_of_its_machine() -> None:
    assert ScalingConfig(**V6E).reserved == {"CPU": 1.0, "TPU": 4.0}
    assert ScalingConfig(**V6E, resources_per_host={"CPU": 100, "TPU": 4}).reserved == {"CPU": 100, "TPU": 4.0}
    assert ScalingConfig(num_hosts=2).reserved is None
    assert ScalingConfig(resources_per_host={"CPU": 3}).reserved == {"CPU": 3}


def test_devices_of_slices_ask_for_their_chips_unless_they_only_pretend() -> None:
    assert ScalingConfig(**V6E).jax_platforms == "tpu,cpu"
    assert ScalingConfig(**V6E, platform="cpu").jax_platforms == "cpu"
    assert ScalingConfig(num_hosts=2).jax_platforms is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topology": "4x5", "accelerator_type": "TPU-V6E"}, r"Found topology='4x5'.*Expected one of 1x1.*Choose"),
        ({"topology": "4x4"}, r"without an accelerator_type\. Expected.*Give it"),
        ({"topology": ("4x4", "2x2"), "accelerator_type": "TPU-V6E"}, r"Found topology=\('4x4', '2x2'\)"),
        (
            {"accelerator_type": "TPU-V6E"},
            r"Found accelerator_type='TPU-V6E' without a topology\. Expected .*--topology",
        ),
        ({"num_slices": 2}, r"Found num_slices=2 without a topology"),
        ({"accelerator_type": "TPU-V6E", "num_slices": 2}, r"='TPU-V6E' and num_slices=2 without a topology"),
        ({**V6E, "num_hosts": 8}, r"Found num_hosts=8 beside topology='4x4'.*has 4 hosts\. Leave num_hosts"),
        ({**V6E, "num_slices": 0}, r"Found num_slices=0\. Expected at least 1"),
        ({**V6E, "num_slices": (3, 2)}, r"Found num_slices=\(3, 2\)\. Expected"),
        ({**V6E, "num_slices": "2"}, r"Found num_slices='2'\. Expected a whole number.*Write num_slices=2"),
        ({**V6E, "resources_per_host": {"TPU": 8}}, r"Expected all 4 chips of a machine\. Leave TPU and GPU out"),
        ({**V6E, "resources_per_host": {"GPU": 1}}, r"Found resources_per_host=\{'GPU': 1\} for hosts of 4x4 TPU-V6E"),
        ({**V6E, "in_process": True}, r"Found in_process with topology='4x4'"),
        ({"platform": "tpu"}, r"Found platform='tpu'\. Expected 'cpu', or None"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ScalingConfig(**settings)
