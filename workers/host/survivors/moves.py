"""Buckets that get another owner, sent by the host that still has them, so that only what no host has is read from
storage.

A host that lived on keeps the buckets that leave it (`surviving_shard`) until the hosts of the new generation are
joined. Then all of them offer each other what they have. They say what they want of it and in which round, and exchange
it round by round. The receiver decides what comes when, so that what is under way to it never takes more than
`ROUND_BYTES`, or one bucket. All hosts go through the same rounds, each sending and receiving at once, so none waits
for one that waits for it.

Nothing that comes is believed: a bucket counts once its digest is that of the commit's manifest. Whatever is missing,
wrong or of another length is read from the commit's files instead, and counted. Only an error of the mesh itself ends
the exchange, and with it the generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.files import has_digest
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import FrameError
from podembed.workers.storage.store import Store

# What may be under way to one host; as much again may be there to be proved.
ROUND_BYTES = 8 << 20
# Of the two exchanges before the rounds, which are numbered from 0.
_OFFER_STEP, _CHOICE_STEP = -2, -1
_NOT_WANTED = -1

Place = tuple[int, int]
"""A bucket: the number of its table in the job, and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Buckets that came from other hosts.

    Attributes:
      places: buckets that came and had the commit's digest.
      size_bytes: of them.
      num_refused: buckets that were offered, and did not come or had another digest.
      seconds: seconds of the whole exchange.
    """

    places: frozenset[Place] = frozenset()
    size_bytes: int = 0
    num_refused: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Choice:
    """Buckets that a host wants of the others.

    Attributes:
      round_of: per rank, int64 `[number of its offers]`, the round in which each is to come.
      rounds: per round, by rank, the buckets that come, in the order of the offer.
    """

    round_of: Mapping[int, np.ndarray]
    rounds: Sequence[Mapping[int, Sequence[Place]]]


@dataclass(slots=True, eq=False, kw_only=True)
class BucketExchange:
    """One exchange of buckets between all hosts of a mesh, which call `run` together.

    Attributes:
      files: files of the commit, one a table, in the order of `tables`.
      known: per table, bool `[buckets held here]`, which of them hold the rows of the commit. Mutated, as the tables
        are.
      leaving: buckets of the commit that are here and belong to other hosts: rows and slots. Mutated: they go as they
        are sent.
      store: store as for `FileThreads`; nothing is written.
      on_round: called before each round; what it raises ends the exchange.
      beside: ranks to which nothing is offered, since they read the files of the commit as fast as this host could send
        them.
    """

    mesh: Mesh
    tables: Sequence[Table]
    files: Sequence[TableFiles]
    placement: Sequence[np.ndarray]
    known: Sequence[np.ndarray]
    leaving: dict[Place, list[np.ndarray]]
    store: Store
    timeout_s: float
    on_round: Callable[[], None]
    beside: AbstractSet[int] = frozenset()
    round_bytes: int = ROUND_BYTES
    _moved: set[Place] = field(default_factory=set)
    _wrong: set[Place] = field(default_factory=set)
    _num_refused: int = 0
    _rooms: list[np.ndarray] = field(default_factory=lambda: [np.empty(0, np.uint8)] * 2)

    def run(self) -> Moved:
        """Gets from other hosts what they have of this host's buckets, and sends them what is theirs.

        Raises:
          MeshError: a host is gone or silent, or sent what no host of this generation sends.
        """
        started = time.monotonic()
        mine = self._offers()
        total = sum(map(len, mine.values()))
        frames = self._tell(
            _OFFER_STEP, {rank: np.array([total, *np.ravel(offer)], np.int64) for rank, offer in mine.items()}
        )
        if total + sum(int(frame[0]) for frame in frames.values()):
            self._move(mine, {rank: _places(frame[1:]) for rank, frame in frames.items()})
        return Moved(
            places=frozenset(self._moved),
            size_bytes=sum(map(self._size, self._moved)),
            num_refused=self._num_refused + len(self._wrong),
            seconds=time.monotonic() - started,
        )

    def _offers(self) -> dict[int, list[Place]]:
        offers: dict[int, list[Place]] = {rank: [] for rank in self._others()}
        for at, bucket in sorted(self.leaving):
            if (owner := int(self.placement[at][bucket])) not in self.beside:
                offers[owner].append((at, bucket))
        return offers

    def _others(self) -> list[int]:
        identity = self.mesh.identity
        return [rank for rank in range(identity.num_ranks) if rank != identity.rank]

    def _move(self, mine: Mapping[int, list[Place]], theirs: Mapping[int, list[Place]]) -> None:
        choice = self._choose(theirs)
        frames = self._tell(
            _CHOICE_STEP,
            {rank: np.array([len(choice.rounds), *choice.round_of[rank]], np.int64) for rank in self._others()},
        )
        most = sum(map(len, self.placement))
        for rank, frame in frames.items():
            if not 0 <= frame[0] <= most:
                raise FrameError(rank, "rounds of buckets", str(frame[0]), f"0 to {most}, the number of all buckets")
        num_rounds = max(len(choice.rounds), *(int(frame[0]) for frame in frames.values()))
        due = _by_round(
            {rank: zip(mine[rank], frame[1:].tolist(), strict=False) for rank, frame in frames.items()}, num_rounds
        )
        with FileThreads(self.store) as threads:
            self._prove(due[0], threads)
            threads.finish()
            for number in range(num_rounds):
                self.on_round()
                # While a round is exchanged, what came in the one before and what goes in the next one is proved.
                self._prove(due[number + 1], threads)
                coming = choice.rounds[number] if number < len(choice.rounds) else {}
                frames = self._exchange(number, due[number], coming)
                threads.finish()
                for places in due[number].values():
                    for place in places:
                        self.leaving.pop(place, None)
                for rank, places in coming.items():
                    self._take(places, frames[rank], threads)
            threads.finish()

    def _choose(self, offered: Mapping[int, list[Place]]) -> _Choice:
        """Chooses the first offer of each missing bucket, hosts in turn, as many a round as there is room for."""
        missing = {
            (at, int(bucket))
            for at, (table, known) in enumerate(zip(self.tables, self.known, strict=True))
            for bucket in table.buckets[~known]
        }
        round_of = {rank: np.full(len(places), _NOT_WANTED, np.int64) for rank, places in offered.items()}
        rounds: list[dict[int, list[Place]]] = []
        room = 0
        for at in range(max(map(len, offered.values()), default=0)):
            for rank, places in offered.items():
                if at >= len(places) or places[at] not in missing:
                    continue
                missing.discard(places[at])
                size = self._size(places[at])
                if not rounds or size > room:
                    rounds.append({})
                    room = self.round_bytes
                room -= size
                rounds[-1].setdefault(rank, []).append(places[at])
                round_of[rank][at] = len(rounds) - 1
        return _Choice(round_of, rounds)

    def _size(self, place: Place) -> int:
        return self.tables[place[0]].spec.bucket_bytes

    def _prove(self, due: Mapping[int, Sequence[Place]], threads: FileThreads) -> None:
        """Compares buckets with the commit before they are sent. A bucket that differs is not sent."""

        def prove(place: Place) -> None:
            if not has_digest(self.files[place[0]], place[1], self.leaving[place]):
                del self.leaving[place]

        for place in (place for places in due.values() for place in places if place in self.leaving):
            threads.submit(partial(prove, place))

    def _exchange(
        self, number: int, due: Mapping[int, Sequence[Place]], coming: Mapping[int, Sequence[Place]]
    ) -> dict[int, np.ndarray]:
        """One round; what came, by rank, in memory that lasts until the next but one."""
        send: list[list[np.ndarray]] = [[] for _ in range(self.mesh.identity.num_ranks)]
        for rank, places in due.items():
            send[rank] = self._packed(places)
        longest = {rank: len(places) + sum(map(self._size, places)) for rank, places in coming.items()}
        room = self._rooms[number % 2]
        if (needed := sum(longest.values())) > len(room):
            room = self._rooms[number % 2] = np.empty(needed, np.uint8)
        starts = dict(zip(longest, np.cumsum([0, *longest.values()]).tolist(), strict=False))
        came: dict[int, np.ndarray] = {}

        def receive(rank: int, num_bytes: int) -> np.ndarray:
            if num_bytes > longest.get(rank, 0):
                raise FrameError(rank, "bytes of buckets", str(num_bytes), f"at most {longest.get(rank, 0)}")
            came[rank] = room[starts.get(rank, 0) :][:num_bytes]
            return came[rank]

        self.mesh.exchange(tag=Tag.BUCKETS, step=number, send=send, receive=receive, timeout_s=self.timeout_s)
        return came

    def _packed(self, places: Sequence[Place]) -> list[np.ndarray]:
        """A byte a bucket, whether it follows; then the arrays of those that do."""
        follows = np.array([place in self.leaving for place in places], np.uint8)
        return [follows, *(array for place in places for array in self.leaving.get(place, ()))] if len(places) else []

    def _take(self, places: Sequence[Place], frame: np.ndarray, threads: FileThreads) -> None:
        follows, start = frame[: len(places)], len(places)
        expected = start + sum(self._size(place) for place, does in zip(places, follows, strict=False) if does)
        if len(frame) != expected:
            self._num_refused += len(places)
            return
        for place, does in zip(places, follows, strict=True):
            if does:
                threads.submit(partial(self._place, place, frame[start : start + self._size(place)]))
                start += self._size(place)
            else:
                self._num_refused += 1

    def _place(self, place: Place, data: np.ndarray) -> None:
        """Puts a bucket where it belongs. If it turns out to be another one it is not known, and will be read over
        it.
        """
        at, bucket = place
        values = list(self.tables[at].bucket(bucket).values())
        start = 0
        for value in values:
            value.reshape(-1).view(np.uint8)[...] = data[start : start + value.nbytes]
            start += value.nbytes
        if has_digest(self.files[at], bucket, values):
            self.known[at][int(np.searchsorted(self.tables[at].buckets, bucket))] = True
            self._moved.add(place)
        else:
            self._wrong.add(place)

    def _tell(self, step: int, send: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Sends every other host some int64 numbers, at least one; what each of them sent."""
        frames: dict[int, np.ndarray] = {}
        # No host offers or wants more than all buckets of all tables.
        longest = 8 * (1 + 2 * sum(map(len, self.placement)))

        def receive(rank: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or not 0 < num_bytes <= longest:
                raise FrameError(rank, "bytes about buckets", str(num_bytes), f"8 to {longest}, whole numbers of 8")
            frames[rank] = np.empty(num_bytes // 8, np.int64)
            return frames[rank]

        parts = [[send[rank]] if rank in send else [] for rank in range(self.mesh.identity.num_ranks)]
        self.mesh.exchange(tag=Tag.BUCKETS, step=step, send=parts, receive=receive, timeout_s=self.timeout_s)
        return dict(sorted(frames.items()))


def _by_round(
    wanted: Mapping[int, Iterable[tuple[Place, int]]], num_rounds: int
) -> list[Mapping[int, Sequence[Place]]]:
    """Per round, and one more, by rank, the buckets that go then, in the order of the offer. There may be many
    thousands of both.
    """
    due: list[dict[int, list[Place]]] = [{} for _ in range(num_rounds + 1)]
    for rank, asked in wanted.items():
        for place, number in asked:
            if 0 <= number < num_rounds:
                due[number].setdefault(rank, []).append(place)
    return [*due]


def _places(numbers: np.ndarray) -> list[Place]:
    return [(int(at), int(bucket)) for at, bucket in numbers[: len(numbers) // 2 * 2].reshape(-1, 2)]
