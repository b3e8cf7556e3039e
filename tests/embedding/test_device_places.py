"""Where tables with place='auto' go: to the memory of devices while it lasts."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.device_places import DeviceRoom, auto_places
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer

GIB = 1 << 30


class OwnRule(Adagrad):
    """A rule that is compiled for hosts."""


def table(rows: int, dim: int = 128, place: Any = "auto", **arguments: Any) -> TableConfig:
    return TableConfig(rows, dim, place=place, **arguments)


def room(kind: str = "H200", gib: float = 16, num_parts: int = 4, **arguments: Any) -> DeviceRoom:
    return DeviceRoom(kind=kind, memory_bytes=int(gib * GIB), num_parts=num_parts, **arguments)


def places(found: DeviceRoom | str, default: Optimizer = SGD(), **tables: TableConfig) -> dict[str, str]:  # noqa: B008
    return {name: chosen.place for name, chosen in auto_places(tables, default, found).items()}


def test_without_devices_all_lie_on_hosts_and_others_are_left_alone() -> None:
    tables = {"a": table(1_000), "b": table(1_000, place="sharded"), "c": table(1_000, place="host")}
    found = auto_places(tables, SGD(), "devices are CPUs")
    assert found == {"a": ("host", "place='auto', and devices are CPUs")}


def test_the_smallest_go_first_until_half_of_the_memory_is_full() -> None:
    # 513 bytes a row and 1/4 of the rows a device: 2 GiB for 16.7 M rows.
    tables = {"large": table(1 << 26), "middle": table(1 << 24), "small": table(100)}
    assert places(room(gib=16), **tables) == {"large": "host", "middle": "sharded", "small": "sharded"}
    assert places(room(gib=16, num_parts=8), **tables) == dict.fromkeys(tables, "sharded")
    found = auto_places(tables, SGD(), room(gib=16))
    assert list(found) == list(tables)
    assert found["large"].why == "place='auto': 8,208 MiB on each of 4 x H200, where 6,140 MiB are left for tables"
    assert found["small"].why == "place='auto': 1 MiB on each of 4 x H200, where 8,192 MiB are left for tables"


def test_tables_that_are_declared_there_take_their_memory_first() -> None:
    tables = {
        "auto": table(1 << 24),
        "copies": table(1 << 23, place="replicated"),
        "parts": table(1 << 25, place="sharded"),
    }
    assert places(room(gib=16), **tables) == {"auto": "host"}
    del tables["copies"]
    assert places(room(gib=16), **tables) == {"auto": "sharded"}


@pytest.mark.parametrize(
    ("declared", "default", "why"),
    [
        (table(1_000, optimizer=OwnRule(0.1)), SGD(), "place='sharded' would be refused"),
        (table(1_000), OwnRule(0.1), "place='sharded' would be refused"),
        (TableConfig(capacity=1_000, dim=8, place="auto"), SGD(), "hosts decide which keys have a row"),
    ],
)
def test_what_devices_cannot_train_stays_on_hosts(declared: TableConfig, default: Optimizer, why: str) -> None:
    found = auto_places({"t": declared}, default, room())["t"]
    assert found.place == "host"
    assert why in found.why


@pytest.mark.parametrize(
    ("dim", "optimizer", "on_gpus", "on_tpus"),
    [
        (64, SGD(), 257, 257),  # two rows in a line
        (48, SGD(), 193, 258),  # two as well, with a third of it empty
        (96, Adagrad(), 769, 1_026),  # a line of its own
        (200, SGD(), 801, 1_026),  # two lines
        (16, Adam(lazy_adam=False), 193, 1_544),  # each row in a line of its own
    ],
)
def test_lines_of_a_tpu_count_with_their_padding(dim: int, optimizer: Optimizer, on_gpus: int, on_tpus: int) -> None:
    one = table(1 << 20, dim, optimizer=optimizer)
    assert room(num_parts=1).part_bytes(one, SGD()) == on_gpus << 20
    assert room(num_parts=1, is_tpu=True).part_bytes(one, SGD()) == on_tpus << 20
