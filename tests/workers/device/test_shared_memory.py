"""The shared-memory channel between two real processes: data in place, intruders refused, deaths seen at once, nothing
left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.embedding.lookup.activation_layout import BLOCK_ALIGNMENT_BYTES
from podembed.workers.device.doorway import ChannelError
from podembed.workers.device.shared_memory import (
    ChannelEnd,
    ChannelLayout,
    ChannelLost,
    ChannelServer,
    ChannelTimeout,
    Record,
    RecordKind,
)
from tests.long_tests import long_case
from tests.workers.device.shared_memory_process import PATIENCE_S, channel_layout, to_json

LAYOUT = channel_layout(5, 3, (4, 3), num_buffers=2)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(LAYOUT, generation=4)
    yield server
    server.close()


@contextmanager
def device_process(server: ChannelServer, mode: str, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.workers.device.shared_memory_process",
        to_json(server.invitation, **changes),
        mode,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_batches_go_and_gradients_come_back_in_the_same_memory(server: ChannelServer) -> None:
    with device_process(server, "serve") as process:
        end = server.accept(timeout_s=PATIENCE_S)
        rng = np.random.default_rng(0)
        for step in range(20):
            arrays = end.buffers[step % LAYOUT.num_buffers]
            for name in ("dense", "labels", "weights", "activations"):
                arrays[name][...] = rng.standard_normal(arrays[name].shape)
            sent = {name: values.copy() for name, values in arrays.items() if name != "gradients"}
            end.send(Record(kind=RecordKind.TRAIN, step=step, buffer=step % 2, weight_sum=0.5 * step))
            answer = end.receive(timeout_s=PATIENCE_S)
            assert (answer.kind, answer.step, answer.buffer, answer.loss) == (
                RecordKind.DONE,
                step,
                step % 2,
                0.5 * step,
            )
            np.testing.assert_array_equal(arrays["gradients"], 2 * sent["activations"])
            for name, values in sent.items():
                np.testing.assert_array_equal(arrays[name], values)
        end.send(Record(kind=RecordKind.END, step=20))
        assert [first_line(process), first_line(process)] == ["connected", "done"]
        end.close()


@pytest.mark.parametrize("changes", [{"secret": "00" * 32}, {"generation": 3}, long_case({"generation": 5})])
def test_an_intruder_is_refused_and_the_right_process_still_gets_in(
    server: ChannelServer, changes: dict[str, Any]
) -> None:
    with device_process(server, "idle", **changes) as intruder:
        results: list[ChannelEnd] = []
        host = threading.Thread(target=lambda: results.append(server.accept(timeout_s=PATIENCE_S)))
        host.start()
        assert first_line(intruder).startswith("ChannelLost: The host process refused this device process. Expected")
        assert host.is_alive()
        with device_process(server, "serve") as process:
            assert first_line(process) == "connected"
            host.join(PATIENCE_S)
            (end,) = results
            end.close()


def test_callers_that_say_nothing_or_half_a_hello_do_not_keep_the_right_one_out(server: ChannelServer) -> None:
    with device_process(server, "serve") as process:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 39):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.connect(server.invitation.address)
                caller.sendall(words)
        end = server.accept(timeout_s=PATIENCE_S)
        assert first_line(process) == "connected"
        end.close()


def test_the_death_of_the_device_process_ends_the_hosts_wait_and_its_next_sends(server: ChannelServer) -> None:
    with device_process(server, "idle") as process:
        end = server.accept(timeout_s=PATIENCE_S)
        assert first_line(process) == "connected"
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        # The deadline is far away: only the end of the other process can end this wait as ChannelLost.
        with pytest.raises(ChannelLost, match=r"device process of this host is gone .* starts a new generation"):
            end.receive(timeout_s=600)
        killer.join()
        with pytest.raises(ChannelLost, match="device process"):
            end.send(Record(kind=RecordKind.TRAIN, step=1))
        end.close()


def test_the_death_of_the_host_ends_the_devices_wait() -> None:
    program = (
        "import sys, time\n"
        "from tests.workers.device.shared_memory_process import channel_layout, to_json\n"
        "from podembed.workers.device.shared_memory import ChannelServer\n"
        "server = ChannelServer(channel_layout(2, 1, [1]), generation=1)\n"
        "print(to_json(server.invitation), flush=True)\n"
        "end = server.accept(timeout_s=120)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as host:
        try:
            command = [sys.executable, "-m", "tests.workers.device.shared_memory_process", first_line(host), "wait"]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as device:
                assert first_line(device) == "connected"
                os.kill(host.pid, signal.SIGKILL)
                assert first_line(device).startswith("ChannelLost: The host process of this host is gone")
        finally:
            host.kill()


def test_silence_ends_at_the_deadline(server: ChannelServer) -> None:
    with device_process(server, "idle"):
        end = server.accept(timeout_s=PATIENCE_S)
        with pytest.raises(ChannelTimeout, match=r"device process sent nothing for 0 s\. Expected"):
            end.receive(timeout_s=0.2)
        end.close()


def test_a_wait_can_be_given_up(server: ChannelServer) -> None:
    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    with device_process(server, "idle"):
        end = server.accept(timeout_s=PATIENCE_S)
        with pytest.raises(GivenUp):
            end.receive(timeout_s=600, keep_waiting=give_up)
        end.close()


def test_nobody_comes() -> None:
    server = ChannelServer(LAYOUT, generation=1)
    with pytest.raises(ChannelTimeout, match="No device process connected within 0 s"):
        server.accept(timeout_s=0.1)
    with pytest.raises(ChannelLost, match="host process is gone"):
        server.invitation.connect(timeout_s=PATIENCE_S)


def test_a_host_that_does_not_answer_is_not_waited_for_longer_than_asked(server: ChannelServer) -> None:
    with pytest.raises(ChannelTimeout, match="did not answer within 0 s"):
        server.invitation.connect(timeout_s=0.2)


def in_one_process(layout: ChannelLayout = LAYOUT) -> tuple[ChannelEnd, ChannelEnd]:
    server = ChannelServer(layout, generation=1)
    ends: list[ChannelEnd] = []
    device = threading.Thread(target=lambda: ends.append(server.invitation.connect(timeout_s=PATIENCE_S)))
    device.start()
    host = server.accept(timeout_s=PATIENCE_S)
    device.join(PATIENCE_S)
    server.close_descriptor()
    return host, ends[0]


def our_sockets() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@podembed-{os.getpid()}-" in line]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:podembed")


def test_nothing_has_a_name_and_nothing_stays_open() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    in_one_process()[0].close()  # what Python itself opens once
    descriptors_before, mappings_before = open_descriptors(), mappings()
    for _ in range(30):
        host, device = in_one_process()
        host.buffers[0]["labels"][...] = 1.0
        assert device.buffers[0]["labels"].sum() == LAYOUT.num_samples
        device.close()
        with pytest.raises(ChannelLost):
            host.receive(timeout_s=PATIENCE_S)
        host.close()
        host.close()
    # In use, the memory has no name either.
    host, device = in_one_process()
    assert {name for name in os.listdir("/dev/shm") if "podembed" in name} <= shared_before
    host.close()
    device.close()
    assert open_descriptors() <= descriptors_before
    assert mappings() <= mappings_before
    assert our_sockets() == []


def test_a_view_that_somebody_still_holds_stays_valid_after_close() -> None:
    host, device = in_one_process()
    kept = host.buffers[0]["labels"]
    device.buffers[0]["labels"][...] = 3.0
    host.close()
    device.close()
    assert kept.tolist() == [3.0] * LAYOUT.num_samples


def test_records_that_arrive_in_one_piece_are_read_one_by_one() -> None:
    host, device = in_one_process()
    for step in range(100):
        device.send(Record(kind=RecordKind.DONE, step=step))
    assert [host.receive(timeout_s=PATIENCE_S).step for _ in range(100)] == list(range(100))
    host.close()
    device.close()


@given(
    num_samples=st.integers(1, 40),
    num_dense=st.integers(0, 20),
    widths=st.lists(st.integers(1, 9), max_size=5),
    num_buffers=st.integers(1, 3),
)
def test_arrays_are_aligned_and_do_not_overlap(
    num_samples: int, num_dense: int, widths: list[int], num_buffers: int
) -> None:
    layout = channel_layout(num_samples, num_dense, widths, num_buffers)
    memory = np.zeros(layout.size_bytes, np.uint8)
    spans = []
    for arrays in layout.views(memory):  # type: ignore[arg-type]
        assert arrays["dense"].shape == (num_samples, num_dense)
        blocks = [
            *layout.activations.blocks(arrays["activations"]),
            *layout.activations.blocks(arrays["gradients"]),
        ]
        assert [block.shape for block in blocks] == [(num_samples, width) for width in widths] * 2
        whole = [values for name, values in arrays.items() if name not in ("activations", "gradients")]
        for values in [*whole, *blocks]:
            assert values.dtype.itemsize == 4
            start = values.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
            if values.nbytes:
                assert start % BLOCK_ALIGNMENT_BYTES == 0
                spans.append((start, start + values.nbytes))
    spans.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= layout.size_bytes


def test_errors_are_one_family() -> None:
    assert issubclass(ChannelLost, ChannelError)
    assert issubclass(ChannelTimeout, ChannelError)
    assert json.loads(to_json(ChannelServer(LAYOUT, generation=2).invitation))["generation"] == 2
