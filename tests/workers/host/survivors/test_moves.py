"""Buckets go from the hosts that have them to those that own them, over real sockets: whatever does not come, or is not
what was committed, is read from the commit's files, and nothing is lost.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.host.survivors.moves import BucketExchange, _by_round
from podembed.workers.host.survivors.surviving_shard import Restored, SurvivingShard
from podembed.workers.mesh.frames import HEADER_BYTES
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import FrameError, MeshError
from podembed.workers.storage.store import Store
from tests.long_tests import examples
from tests.workers.checkpoint.test_deltas import Hosts
from tests.workers.checkpoint.test_moving_buckets import hosts_of, save, spec_of, state_of
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, meshes, succeed

COMMIT = "s000000001-g00000001"
ROOMY = 1e9


@dataclass(slots=True)
class Move:
    """A commit of some hosts' tables, and another placement of it.

    Attributes:
      hosts: of the commit, each with all its buckets.
      placement: of the new generation.
      became: of each new host which old one it was; None for a new process.
      tables: of the new hosts, once they were cut.
    """

    store: Store
    hosts: list[list[Table]]
    files: tuple[TableFiles, ...]
    placement: list[np.ndarray]
    became: Sequence[int | None]
    tables: list[list[Table]] = field(default_factory=list)
    surviving: list[SurvivingShard] = field(default_factory=list)

    def cut(self, unknown: Collection[tuple[int, int, int]] = (), undo_share: float = ROOMY) -> None:
        """Cuts the tables anew; `unknown`: (old host, table, bucket) of which nothing is known, and whose rows are
        others.
        """
        specs = [table.spec for table in self.hosts[0]]
        for host, old in enumerate(self.became):
            if old is None:
                self.tables.append([Table(spec, np.flatnonzero(owners == host)) for spec, owners in self._each(specs)])
                self.surviving.append(SurvivingShard.none_of(self.tables[-1]))
                continue
            tables = [_copy(table) for table in self.hosts[old]]
            known = [np.ones(len(table.buckets), bool) for table in tables]
            for at, table in enumerate(tables):
                for position, bucket in enumerate(map(int, table.buckets)):
                    if (old, at, bucket) in unknown:
                        known[at][position] = False
                        table.bucket(bucket)["rows"][...] = np.nan
            surviving = SurvivingShard(COMMIT, known)
            self.tables.append(surviving.recut(tables, specs, self.placement, host=host, undo_share=undo_share))
            self.surviving.append(surviving)

    def _each(self, specs: Sequence[Any]) -> Any:
        return zip(specs, self.placement, strict=True)

    def moves(self, ranks: Sequence[Mesh], **options: Any) -> list[Callable[[], None]]:
        given: dict[str, Any] = {"timeout_s": PATIENCE_S, "on_round": lambda: None, **options}
        return [
            partial(surviving.move, mesh, self.store, tables, self.files, placement=self.placement, **given)
            for surviving, mesh, tables in zip(self.surviving, ranks, self.tables, strict=True)
        ]

    def restore(self) -> list[Restored]:
        return [
            one.restore(self.store, tables, self.files, on_chunk=lambda: None)[0]
            for one, tables in zip(self.surviving, self.tables, strict=True)
        ]

    def movable(self) -> set[tuple[int, int]]:
        """Buckets that a host which lives on had and does not own any more."""
        now = {old: host for host, old in enumerate(self.became) if old is not None}
        return {
            (at, int(bucket))
            for old, host in now.items()
            for at, table in enumerate(self.hosts[old])
            for bucket in table.buckets
            if self.placement[at][bucket] != host
        }

    def assert_committed(self) -> None:
        found, expected = state_of(self.tables), state_of(self.hosts)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def _copy(table: Table) -> Table:
    new = Table(table.spec, table.buckets)
    for array, values in zip((new.rows, *new.slots.values()), (table.rows, *table.slots.values()), strict=True):
        array[...] = values
    return new


def move_of(
    folder: str | Path,
    tables: Sequence[tuple[int, int]],
    before: Sequence[np.ndarray],
    after: list[np.ndarray],
    *,
    num_before: int,
    became: Sequence[int | None],
    seed: int = 0,
) -> Move:
    specs = [spec_of(at, num_rows, shift) for at, (num_rows, shift) in enumerate(tables)]
    hosts, rng = hosts_of(specs, before, num_before), np.random.default_rng(seed)
    for table in (table for host in hosts for table in host):
        for array in (table.rows, *table.slots.values()):
            array[...] = rng.standard_normal(array.shape)
    store = Store(str(folder))
    return Move(store, hosts, save(store, hosts, 1), after, became)


def swap(folder: Path, **changes: Any) -> Move:
    """Two hosts of one table of 8 buckets, of which each gives the other two."""
    before = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    after = np.array([1, 1, 0, 0, 0, 0, 1, 1], np.int32)
    return move_of(folder, [(403, 3)], [before], [after], num_before=2, became=(0, 1), **changes)


@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_any_hosts_to_any_hosts_with_buckets_that_nobody_knows(data: st.DataObject) -> None:
    """What a host that lives on has comes from it, once; the rest is read; and every byte is that of the commit."""
    tables = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=3))
    num_before, num_after = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    before = [rng.integers(0, num_before, 1 << shift).astype(np.int32) for _, shift in tables]
    after = [rng.integers(0, num_after, 1 << shift).astype(np.int32) for _, shift in tables]
    olds = rng.permutation(num_before).tolist()
    became = [olds.pop() if olds and rng.random() < 0.8 else None for _ in range(num_after)]
    everything = [(int(o), at, b) for at, owners in enumerate(before) for b, o in enumerate(owners)]
    unknown = {place for place in everything if rng.random() < 0.3}
    round_bytes = data.draw(st.sampled_from([1, 500, 1 << 20]))
    with tempfile.TemporaryDirectory() as folder, meshes(num_after) as ranks:
        move = move_of(folder, tables, before, after, num_before=num_before, became=became)
        move.cut(unknown)
        succeed(in_threads(move.moves(ranks, round_bytes=round_bytes)))
        restored = move.restore()
        expected = move.movable() - {(at, bucket) for _, at, bucket in unknown}
        assert sum(one.buckets_moved for one in restored) == len(expected)
        assert {place for one in move.surviving for place in one.moved.places} == expected
        assert sum(one.buckets_refused + one.buckets_wrong for one in restored) == 0
        assert sum(one.buckets_kept + one.buckets_moved + one.buckets_read for one in restored) == len(everything)
        assert not any(one.leaving for one in move.surviving)
        move.assert_committed()


def test_a_digest_that_is_wrong_on_the_wire_is_found_and_the_bucket_is_read(tmp_path: Path) -> None:
    """The third byte of rows in the first round is changed on its way to host 1."""

    def spoil(_connection: Any, rank: int, carries: str, step: int, views: list[memoryview]) -> list[memoryview]:
        if (carries, step, rank) != ("BUCKETS", 0, 1):
            return views
        frame = bytearray(b"".join(views))
        frame[HEADER_BYTES + 2 + 2] ^= 1
        return [memoryview(bytes(frame))]

    with meshes(2, spoil) as ranks:
        move = swap(tmp_path)
        move.cut()
        succeed(in_threads(move.moves(ranks)))
        restored = move.restore()
        assert [one.buckets_refused for one in restored] == [0, 1]
        assert [(one.buckets_moved, one.buckets_read, one.buckets_kept) for one in restored] == [(2, 0, 2), (1, 1, 2)]
        assert (restored[0].bytes_moved, restored[0].bytes_read) == (2 * move.tables[0][0].spec.bucket_bytes, 0)
        assert restored[1].bytes_read > 0
        move.assert_committed()


def test_a_host_that_reads_the_files_as_fast_is_sent_nothing(tmp_path: Path) -> None:
    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        succeed(in_threads(move.moves(ranks, beside={1})))
        restored = move.restore()
        assert [(one.buckets_moved, one.buckets_read) for one in restored] == [(2, 0), (0, 2)]
        assert sum(one.buckets_refused for one in restored) == 0
        move.assert_committed()


def test_a_bucket_that_is_not_the_committed_one_is_not_sent(tmp_path: Path) -> None:
    """A faulty memory: the host that has it finds out, and says that it does not come."""
    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        move.surviving[0].leaving[0, 1][0].reshape(-1).view(np.uint32)[5] ^= 1
        succeed(in_threads(move.moves(ranks)))
        found = move.restore()
        assert [(one.buckets_moved, one.buckets_refused, one.buckets_read) for one in found] == [
            (2, 0, 0),
            (1, 1, 1),
        ]
        move.assert_committed()


def test_a_host_that_dies_in_the_middle_ends_the_exchange_for_all_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        rounds = []

        def die() -> None:
            rounds.append(1)
            if len(rounds) > 1:
                raise SystemError("killed")

        one = move.moves(ranks, round_bytes=1)[0]
        broken = move.moves(ranks, round_bytes=1, on_round=die)[1]
        outcomes = in_threads([one, lambda: _dying(broken, ranks[1])])
        assert isinstance(outcomes[0], MeshError), outcomes
        assert isinstance(outcomes[1], SystemError)
    moved = sum(int(known.sum()) for one in move.surviving for known in one.known) - 4
    assert 0 <= moved <= 2
    with meshes(2) as ranks:
        succeed(in_threads(move.moves(ranks)))
        restored = move.restore()
        # What came before counts as kept, and is proved again; what was under way is nowhere but in the files.
        assert sum(one.buckets_kept for one in restored) == 4 + moved
        assert sum(one.buckets_moved for one in restored) == 2
        assert sum(one.buckets_wrong + one.buckets_refused for one in restored) == 0
        move.assert_committed()


def _dying(run: Callable[[], None], mesh: Mesh) -> None:
    try:
        run()
    finally:
        mesh.close()


def test_a_bucket_that_comes_back_before_it_was_sent_is_kept(tmp_path: Path) -> None:
    """A recovery that failed took it away from its host; the next one gives it back."""
    move = swap(tmp_path)
    move.cut()
    before = [np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)]
    specs = [table.spec for table in move.hosts[0]]
    for host, surviving in enumerate(move.surviving):
        move.tables[host] = surviving.recut(move.tables[host], specs, before, host=host, undo_share=ROOMY)
        assert not surviving.leaving
        assert surviving.known[0].all()
    restored = move.restore()
    assert [(one.buckets_kept, one.buckets_read) for one in restored] == [(4, 0), (4, 0)]
    move.assert_committed()


def test_what_leaves_takes_no_more_memory_than_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets leave and two come, so that nothing becomes free; there is room for one where the empty logs would
    be.
    """
    move = swap(tmp_path)
    size = move.hosts[0][0].spec.bucket_bytes
    monkeypatch.setattr("podembed.workers.checkpoint.undo.MIN_LOG_BYTES", 0)
    move.cut(undo_share=1.5 * size / (4 * size))
    assert [len(one.leaving) for one in move.surviving] == [1, 1]
    with meshes(2) as ranks:
        succeed(in_threads(move.moves(ranks)))
    restored = move.restore()
    assert [(one.buckets_kept, one.buckets_moved, one.buckets_read) for one in restored] == [(2, 1, 1), (2, 1, 1)]
    move.assert_committed()


PEAK = """
import resource
import numpy as np
from podembed.embedding.table.table import Table
from tests.workers.checkpoint.test_moving_buckets import spec_of
from podembed.workers.host.survivors.surviving_shard import SurvivingShard

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

spec = spec_of(0, 16_000_000, 6)
table = Table(spec, np.arange(spec.layout.num_buckets))
for array in (table.rows, *table.slots.values()):
    array.fill(3.0)
table.rows[-1] = 7.0
size, before = table.size_bytes, peak_bytes()
surviving = SurvivingShard("s000000001-g00000001", [np.ones(len(table.buckets), bool)])
owners = (np.arange(spec.layout.num_buckets) >= spec.layout.num_buckets // 2).astype(np.int32)
tables = [table]
del table, array
(kept,) = surviving.recut(tables, [spec], [owners], host=1)
assert len(surviving.leaving) == len(kept.buckets) == spec.layout.num_buckets // 2
assert (kept.rows[-1] == 7.0).all()
print((peak_bytes() - before) / size)
"""


def test_a_table_that_is_cut_anew_is_not_there_twice() -> None:
    """Hosts are added when memory is short. The half that stays and the half that leaves are copied, and what was
    copied is given back.
    """
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3, "with everything copied before anything is given back it is one"


def test_a_frame_that_is_longer_than_what_was_chosen_ends_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BucketExchange._packed

    def longer(self: BucketExchange, places: Sequence[Any]) -> list[np.ndarray]:
        return [*real(self, places), np.zeros(1, np.uint8)]

    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        monkeypatch.setattr(BucketExchange, "_packed", longer)
        outcomes = in_threads(move.moves(ranks))
        assert any(isinstance(outcome, FrameError) for outcome in outcomes), outcomes
        assert all(isinstance(outcome, MeshError) for outcome in outcomes), outcomes


def test_a_frame_that_is_cut_short_is_read_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BucketExchange._packed
    monkeypatch.setattr(BucketExchange, "_packed", lambda self, places: real(self, places)[:-1])
    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        succeed(in_threads(move.moves(ranks)))
        found = move.restore()
        assert [(one.buckets_moved, one.buckets_refused, one.buckets_read) for one in found] == [
            (0, 2, 2),
            (0, 2, 2),
        ]
        move.assert_committed()


def test_more_rounds_than_there_are_buckets_end_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BucketExchange._tell

    def spoilt(self: BucketExchange, step: int, send: Any) -> dict[int, np.ndarray]:
        frames = real(self, step, send)
        if step == -1 and self.mesh.identity.rank == 0:
            frames[1][0] = 1000
        return frames

    monkeypatch.setattr(BucketExchange, "_tell", spoilt)
    with meshes(2) as ranks:
        move = swap(tmp_path)
        move.cut()
        one, other = move.moves(ranks)
        outcomes = in_threads([lambda: _dying(one, ranks[0]), other])
        assert isinstance(outcomes[0], FrameError), outcomes
        assert isinstance(outcomes[1], MeshError), outcomes


def test_what_is_sent_when_is_found_at_once_also_of_many_buckets_in_many_rounds() -> None:
    """Tens of gigabytes in buckets of 1 MiB: who looks through all of them for each round is busy for minutes, and the
    others wait.
    """
    # Of this thread alone, so that a busy machine makes no difference.
    num_buckets, num_rounds, started = 100_000, 20_000, time.thread_time()
    wanted = {rank: [((rank, at), at % num_rounds) for at in range(num_buckets)] for rank in (0, 2)}
    due = _by_round({**wanted, 1: [((1, 0), -1)]}, num_rounds)
    assert time.thread_time() - started < 20
    assert due[7] == {rank: [(rank, at) for at in range(7, num_buckets, num_rounds)] for rank in (0, 2)}
    assert [len(due), due[num_rounds]] == [num_rounds + 1, {}]


def test_many_large_frames_in_both_directions_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """More than the kernel holds on both sides, from all hosts to all hosts at once."""
    rng = np.random.default_rng(1)
    before, after = (rng.integers(0, 4, 64).astype(np.int32) for _ in range(2))
    move = move_of(tmp_path, [(400_000, 6)], [before], [after], num_before=4, became=(0, 1, 2, 3))
    move.cut()
    with meshes(4) as ranks:
        succeed(in_threads(move.moves(ranks)))
    restored = move.restore()
    assert sum(one.buckets_read for one in restored) == 0
    assert sum(one.buckets_moved for one in restored) == int((before != after).sum())
    move.assert_committed()


def test_the_state_of_a_chain_of_deltas_moves_whole(tmp_path: Path) -> None:
    """The digests are those of the whole state, so nothing of the chain is read."""
    chain, rng = Hosts(Store(str(tmp_path)), 2, None), np.random.default_rng(3)
    for number in range(3):
        chain.train(rng, 20)
        chain.save(f"s{number:09d}-g00000001", is_delta=number > 0)
    assert chain.files is not None
    assert all(table.deltas for table in chain.files)
    placement = [rng.integers(0, 3, table.num_buckets).astype(np.int32) for table in chain.files]
    move = Move(chain.store, chain.tables, chain.files, placement, (0, 1, None))
    move.cut()
    with meshes(3) as ranks:
        succeed(in_threads(move.moves(ranks)))
    restored = move.restore()
    assert sum(one.buckets_moved for one in restored) == len(move.movable()) > 0
    assert sum(one.buckets_read + one.buckets_refused for one in restored) == 0
    assert sum(one.bytes_read for one in restored) == 0
    move.assert_committed()
