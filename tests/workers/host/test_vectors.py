"""What exchanges refuse: frames that are not what both hosts planned."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.streams import RowsRequest
from podembed.workers.host.exchange import MeshExchange
from podembed.workers.host.vectors import VectorExchange
from podembed.workers.mesh.frames import Tag
from tests.embedding.lookup import test_rows_way as test_lookup
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, meshes

STEP = 3


@pytest.fixture(scope="module")
def planned() -> tuple[test_lookup.Pod, RowsRequest]:
    """Two lookups, and what the first one asks of both and both ask of it."""
    random = np.random.default_rng(1)
    pod = test_lookup.Pod.of(2, test_lookup.random_rows(random))
    batches = [test_lookup.random_batch(random, test_lookup.FEATURES, 6, longest=4, weighted=False) for _ in range(2)]
    prepared, _ = pod.forward(batches)
    return pod, prepared[0]


def outcome(planned: tuple[test_lookup.Pod, RowsRequest], way: str, frame: np.ndarray) -> BaseException:
    """How the first host ends when the second one sends this frame instead of its rows."""
    pod, prepared = planned
    rows = pod.lookups[0]
    layout = ActivationLayout(num_samples=6, widths=(4,), owners=(-1,))
    activations = Blocks.of(layout, np.zeros(layout.num_floats, np.float32))
    with meshes(2) as ranks:
        vectors = VectorExchange(ranks[0], [rows], wire_dtype="float32", timeout_s=PATIENCE_S)

        def receive(rank: int, num_bytes: int) -> np.ndarray:
            return np.empty(num_bytes, np.uint8)

        def send() -> None:
            ranks[1].exchange(tag=Tag.ROWS, step=STEP, send=[[frame], []], receive=receive, timeout_s=PATIENCE_S)

        def prefetched() -> None:
            vectors.begin_prefetch(rows, prepared, STEP, activations)
            vectors.finish_prefetch(rows, prepared, activations)

        def rest() -> None:
            vectors.begin_vectors([prepared], STEP, activations, arrived=[{}])
            vectors.finish()

        ways = {"prefetched": prefetched, "rest": rest}
        found, _ = in_threads([ways[way], send])
    return found


def lengths_and_floats(planned: tuple[test_lookup.Pod, RowsRequest]) -> tuple[int, int]:
    pod, prepared = planned
    blocks = pod.lookups[0].outgoing_gradients(prepared, 1, None)
    return sum(len(block) for block in blocks), sum(block.size for block in blocks)


def test_more_early_vectors_than_were_asked_for_are_refused(planned) -> None:
    num_vectors, num_floats = lengths_and_floats(planned)
    assert num_vectors > 0
    found = outcome(planned, "prefetched", np.zeros(4 * -(-num_vectors // 32) + 4 * num_floats + 4, np.uint8))
    assert isinstance(found, ValueError)
    assert "bytes of prefetched vectors. Expected" in str(found)


def test_a_mask_that_does_not_fit_its_vectors_is_refused(planned) -> None:
    """All zeros say that everything was prefetched, but only one number follows."""
    num_vectors, num_floats = lengths_and_floats(planned)
    found = outcome(planned, "prefetched", np.zeros(4 * -(-num_vectors // 32) + 4, np.uint8))
    assert isinstance(found, ValueError)
    assert f"sent 1 prefetched numbers. Expected {num_floats}, as its mask says" in str(found)


def test_rows_of_another_size_are_refused(planned) -> None:
    found = outcome(planned, "rest", np.zeros(4, np.uint8))
    assert isinstance(found, ValueError)
    assert "Host 1 sent 4 bytes. Expected" in str(found)


class Wire:
    """A mesh whose other host sends what a test says."""

    identity = SimpleNamespace(num_ranks=2, rank=0)

    def __init__(self, frame: np.ndarray) -> None:
        self.frame = frame

    def exchange(self, *, receive: Callable[[int, int], np.ndarray], **others: object) -> None:
        receive(1, self.frame.nbytes)[...] = self.frame


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (np.zeros(2, np.int64), "whole int64 with 3 in front"),
        (np.zeros(7, np.int32), "whole int64 with 3 in front"),
        (np.array([0, 0, 2, 7], np.int64), "announced"),
        (np.array([0, 0, -1, 7], np.int64), "announced"),
    ],
)
def test_requests_that_contradict_their_counts_are_refused(planned, frame: np.ndarray, text: str) -> None:
    pod, prepared = planned
    lookups = SimpleNamespace(ways=pod.lookups[:1])
    exchange = MeshExchange(Wire(frame), lookups, timeout_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        exchange.ids(1, [prepared], weight=1.0, prefetches=0)


@pytest.mark.parametrize("frame", [np.zeros(2, np.int64), np.array([0, 0, -1, 1, 5]), np.array([0, 0, 2, 0, 5])])
def test_rows_that_contradict_their_counts_are_refused(planned, frame: np.ndarray) -> None:
    pod, prepared = planned
    with pytest.raises(ValueError, match="Found"):
        pod.lookups[0].accept(prepared, [frame, frame])
