"""What a cluster never has room for, where the program has started it for itself on this machine alone."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.cluster import check_alone
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules

HERE = Node(id="a", domain=FailureDomain("a"), total={"CPU": 2.0}, free={})


def rules(least: int, resources: dict[str, float], **marks: Any) -> Rules:
    return Rules(least=least, most=9, resources=resources, is_one_a_machine=False, may_share=False, **marks)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (rules(2, {"GPU": 1.0}), "Expected room for at least 2 hosts with 1 GPU each"),
        (rules(3, {"CPU": 1.0}), "Found 1 machine; room for 2 hosts, on this machine alone"),
        (
            rules(4, {"CPU": 1.0, "TPU": 4.0}, topology=Topology.of("2x2x2", "TPU-V4")),
            "Found 0 whole slices of 2x2x2 TPU-V4.*Expected at least 2 whole slices of 2x2x2 TPU-V4.*RAY_ADDRESS",
        ),
    ],
)
def test_hosts_for_which_there_is_never_room_are_refused(asked: Rules, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_alone([HERE], asked)


def test_what_is_not_yet_given_back_counts() -> None:
    check_alone([HERE], rules(2, {"CPU": 1.0}))
