"""Names of slices: the compiler's, and those that users book."""

from __future__ import annotations

import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.preflight.slices import CHIPS, parse_slice


@pytest.mark.parametrize(
    ("name", "compiler_name", "hosts", "bounds"),
    [
        ("v6e:4x4", "v6e:4x4", 4, (2, 2, 1)),
        ("v6e-16", "v6e:4x4", 4, (2, 2, 1)),
        ("v6e-8", "v6e:2x4", 1, (2, 4, 1)),
        ("V6E-1", "v6e:1x1", 1, (1, 1, 1)),
        ("v5litepod-16", "v5e:4x4", 4, (2, 2, 1)),
        ("v5e:16x16", "v5e:16x16", 64, (2, 2, 1)),
        ("v5p-128", "v5p:4x4x4", 16, (2, 2, 1)),
        ("v5p:8x8x8", "v5p:8x8x8", 128, (2, 2, 1)),
        ("v4-32", "v4:2x2x4", 4, (2, 2, 1)),
        ("tpu7x-32", "tpu7x:2x2x4", 4, (2, 2, 1)),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 1, (2, 2, 1)),
    ],
)
def test_a_name_means_a_slice(name: str, compiler_name: str, hosts: int, bounds: tuple[int, ...]) -> None:
    found = parse_slice(name)
    assert (found.compiler_name, found.num_hosts, found.host_bounds) == (compiler_name, hosts, bounds)
    assert found.rates is CHIPS[found.topology.generation]


def test_hosts_may_be_others() -> None:
    found = parse_slice("v6e:2x4", num_hosts=2)
    assert (found.num_hosts, found.host_bounds) == (2, (2, 2, 1))


@pytest.mark.parametrize(
    ("name", "hosts", "said"),
    [
        ("v9-8", None, "Expected a kind of TPU with a shape or a number, such as v6e:4x4"),
        ("v6e", None, "Expected a kind of TPU"),
        ("v6e-7", None, "Expected one of 1, 4, 8, 16, 32, 64, 128, 256 behind the dash"),
        ("v5p-", None, "Expected one of 8, 16, 32"),
        ("v6e:3x3", None, "Found topology='3x3'"),
        ("v6e:4x4", 3, "Found --hosts 3 for the 16 chips of v6e:4x4"),
        ("v6e:4x4", 0, "Found --hosts 0"),
    ],
)
def test_what_is_no_slice_is_named(name: str, hosts: int | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_slice(name, num_hosts=hosts)
