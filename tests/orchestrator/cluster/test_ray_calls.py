"""What many processes are told alike is packed once, and arrives as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podembed.orchestrator.cluster.ray_calls import (
    MANY_BUCKETS,
    MANY_HOSTS,
    MOST_BUCKETS,
    SharedArguments,
)
from podembed.workers.checkpoint.checkpoint_files import ChunkFiles, TableFiles
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.host.spec import HostSpec
from podembed.workers.input.index import InputIndex


class Board:
    """Keeps what was put, in place of Ray's object store."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def arrived(self, own: Any, reference: int, *others: Any) -> list[Any]:
        """The arguments as `Actor.run_shared` makes them."""
        value = self.values[reference]
        return [replace(value, **own) if own else value, *others]


def spec(host: int, *, generation: int = 1, num_hosts: int = MANY_HOSTS) -> HostSpec:
    return HostSpec(
        job=None,  # type: ignore[arg-type]
        run_id="r",
        generation=generation,
        token=bytes([generation]) * 32,
        plan_hash=bytes(32),
        host=host,
        num_hosts=num_hosts,
        lanes=(),
        table_buckets=(4,),
        placement=(np.full(4, generation, np.int32),),
        storage_url="/nowhere",
        train_index=InputIndex(files=()),
        eval_index=None,
        bind_address=f"10.0.0.{host}",
        step_timeout_s=1.0,
    )


def files(num_buckets: int) -> tuple[TableFiles, ...]:
    return (
        TableFiles(
            name="t",
            num_rows=num_buckets,
            dim=1,
            num_buckets=num_buckets,
            rows_per_bucket=1,
            arrays=(),
            chunks=ChunkFiles(buckets_per_file=1, arrays=()),
            digests=Digests(bytes(16 * num_buckets)),
        ),
    )


def test_the_specs_of_a_generation_are_packed_once() -> None:
    board = Board()
    shared = SharedArguments(MANY_HOSTS, board.put)
    for generation in (1, 2):
        for host in range(MANY_HOSTS):
            given = spec(host, generation=generation)
            call = shared.of_call([given])
            assert call is not None
            (found,) = board.arrived(*call)
            assert (found.host, found.bind_address) == (host, f"10.0.0.{host}")
            assert found.generation == generation
            assert found.placement[0].tolist() == [generation] * 4
    assert len(board.values) == 2


def test_addresses_and_manifests_are_packed_once() -> None:
    board = Board()
    shared = SharedArguments(MANY_HOSTS, board.put)
    addresses, tables = [("10.0.0.1", 4000)] * MANY_HOSTS, files(MANY_BUCKETS)
    for _ in range(3):
        for arguments in ([addresses, 60.0], [tables]):
            call = shared.of_call(arguments)
            assert call is not None
            assert board.arrived(*call) == arguments
    assert len(board.values) == 2
    # Equal, but another list: the next generation's.
    call = shared.of_call([[*addresses], 60.0])
    assert call is not None
    assert call[1] == 2


@pytest.mark.parametrize(
    ("num_hosts", "arguments"),
    [
        (MANY_HOSTS - 1, [spec(0)]),
        (MANY_HOSTS - 1, [[("10.0.0.1", 4000)] * 2, 60.0]),
        (MANY_HOSTS - 1, [files(MOST_BUCKETS - 1)]),
        (MANY_HOSTS, [files(MANY_BUCKETS - 1)]),
        (MANY_HOSTS, [1, 2, False]),
        (MANY_HOSTS, [None]),
        (MANY_HOSTS, []),
    ],
)
def test_what_is_small_travels_within_the_call(num_hosts: int, arguments: list[Any]) -> None:
    assert SharedArguments(num_hosts, Board().put).of_call(arguments) is None
