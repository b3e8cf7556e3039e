"""Random histories of publishers, servers and shards over a real run, with faults, in one process.

Whatever happens, each answer must be the score of `podembed predict` for the commit that it names. Once faults end, the
next version must be offered, and all must answer with it.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.commit.lease_files import read_commit_names, read_lineage
from podembed.orchestrator.commit.published import newest_pointer
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.publish import publisher
from podembed.serving.publish.listing import roll_back
from podembed.serving.server import replica
from podembed.serving.server.held_versions import HeldVersions, NotYet
from podembed.serving.server.replica import Replica
from podembed.serving.server.shard_server import ShardVersions
from podembed.serving.server.shards import ShardAway, Shards
from podembed.serving.server.shares import ShardPlace
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.prune import prune
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.serving.campaign.faults import Killed, StorageFaults
from tests.serving.server.served_runs import listed, part, predicted, scored
from tests.small_job import small_job, write_small_data
from tests.training import fit_job

NUM_SAMPLES, NUM_SHARDS = 60, 3
# Of servers: shards first, whose rows the last one scores with.
NAMES = ("0", "1", "2", "run", "copy", "near")
Answers = Mapping[str, bytes]
# What a person or a client may get in the place of an answer.
CLEAR = (ConfigurationError, StorageError, ModelError, NotYet, ShardAway)


@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """A run whose commits are offered, and what each of them scores.

    Attributes:
      arguments: of the job.
      commits: names, rising.
      answers: bytes of the scores, by commit.
    """

    run: Path
    arguments: Mapping[str, Any]
    columns: dict[str, list[Any]]
    commits: Sequence[str]
    answers: Answers

    @property
    def job(self) -> JobConfig:
        return small_job(**self.arguments)

    @staticmethod
    def made(folder: Path, *, num_steps: int = 12) -> Base:
        """Trains it: tables of keys that come and go, deltas and full commits, one each second step."""
        write_small_data(folder / "data")
        arguments = {"folder": str(folder / "data"), "audit": False, "cut_bags": True, "dynamic": True, "room": 0.5}
        job = JobReference(function="tests.small_job:small_job", arguments=arguments)
        checkpoints = CheckpointConfig(every_steps=2, num_to_keep=9, full_every=3)
        run = fit_job(job, folder, name="run", max_steps=num_steps, checkpoint_config=checkpoints).path
        made = small_job(**arguments)
        path = sorted((folder / "data").glob("*.parquet"))[0]
        commits = sorted(read_lineage(Store(run)))
        answers = {
            name: predicted(run, made, path, folder / f"{name}.parquet", commit=name)[:NUM_SAMPLES].tobytes()
            for name in commits
        }
        columns = part(listed(pq.read_table(path)), 0, NUM_SAMPLES)
        return Base(run=Path(run), arguments=arguments, columns=columns, commits=commits, answers=answers)


class NearShards(Shards):
    """Shards of this process, asked without sockets."""

    def __init__(self, held: Sequence[ShardVersions | None]) -> None:
        super().__init__(["http://near"] * len(held))
        self.held = held
        self._order = list(range(len(held)))

    def require(self, version: str, run_id: str) -> None:
        if not all(one is not None and version in one.names for one in self.held):
            raise NotYet(version)

    def _ask(self, version: str, asked: Sequence[Mapping[str, np.ndarray]]) -> dict[int, dict[str, np.ndarray]]:
        found = {}
        for number, (ids, held) in enumerate(zip(asked, self.held, strict=True)):
            if held is None:
                raise ShardAway(str(number))
            try:
                with held.use(version) as own:
                    found[number] = {name: own.tables[name].values(values) for name, values in ids.items()}
            except ConfigurationError as error:
                raise ShardAway(str(error)) from error
        return found


class History:
    """One history. Mutated by each event.

    Args:
      folder: of its own, where the run is linked to.

    Attributes:
      events: what happened, for people.
      counts: how often what came of events.
    """

    def __init__(self, base: Base, folder: Path, faults: StorageFaults, seed: int) -> None:
        self._base, self._faults, self._random = base, faults, random.Random(seed)
        self._job = base.job
        self._run, self._copy = folder / "run", folder / "copy"
        shutil.copytree(base.run, self._run, copy_function=os.link)
        self._stores = {"run": Store(str(self._run)), "copy": Store(str(self._copy))}
        self._replicas: dict[str, Replica] = {}
        self._shards: list[ShardVersions | None] = [None] * NUM_SHARDS
        self._near = NearShards(self._shards)
        self._damaged: dict[Path, bytes] = {}
        self._ahead_s = 0.0
        self.events: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, num_events: int) -> None:
        """Lets things happen, looks at answers after each, and ends as the module says.

        Raises:
          AssertionError: an answer is not that of the commit that it names, or it does not go on.
        """
        kinds = {
            self._publish: 4,
            self._copy_to: 2,
            self._roll_back: 2,
            self._prune: 1,
            self._follow: 12,
            self._restart: 1,
            self._damage: 1,
            self._mend: 1,
        }
        first = self._random.choice(self._base.commits)
        for to in (None, str(self._copy)):
            publisher.publish(str(self._run), to=to, commit=first, keep=3, job=self._job)
        for name in NAMES:
            self._start(name)
        for _ in range(num_events):
            event = self._random.choices(list(kinds), list(kinds.values()))[0]
            self._try(event)
            self._look()
        self._end()

    def _try(self, event: Callable[[], str]) -> None:
        """An event, with or without a fault."""
        faults, name = self._faults, event.__name__.strip("_")
        fault = self._random.choices(("", "killed", "away", "full"), (6, 3, 1, 1))[0]
        kill_at = int(self._random.expovariate(1 / 25)) if fault == "killed" else None
        faults.begin(kill_at=kill_at, after=self._random.random() < 0.5)
        faults.is_away, faults.is_full = fault == "away", fault == "full"
        try:
            came = event()
        except Killed:
            came = "killed"
        except CLEAR as error:
            came = type(error).__name__
            if not str(error):
                raise AssertionError("An error has no words.") from error
        finally:
            faults.begin()
            faults.is_away = faults.is_full = False
        self.events.append(f"{name} {fault} {kill_at if kill_at is not None else ''} -> {came}")
        self.counts[f"{name}: {came.split()[0]}"] += 1

    def _publish(self) -> str:
        name = self._random.choice(self._base.commits)
        offer = publisher.publish(str(self._run), commit=name, keep=self._random.choice((1, 2, 3)), job=self._job)
        return f"offered {offer.version.name} as {offer.number}"

    def _copy_to(self) -> str:
        name = self._random.choice(self._base.commits)
        offer = publisher.publish(str(self._run), to=str(self._copy), commit=name, job=self._job)
        return f"copied {offer.version.name} as {offer.number}"

    def _roll_back(self) -> str:
        return f"back {roll_back(self._stores[self._random.choice(('run', 'copy'))], None).version}"

    def _prune(self) -> str:
        # By then a program that was killed has lost the run.
        self._ahead_s += 60
        removal = prune(str(self._run), num_to_keep=2, also=(), unix_s=lambda: time.time() + self._ahead_s)
        return f"pruned {len(removal.commits)}"

    def _follow(self) -> str:
        name = self._random.choice(NAMES)
        if (held := self._server(name)) is None:
            self._start(name)
            return f"started {name}"
        try:
            held.follow()
        except Killed:
            # Its memory goes with it.
            self._stop(name)
            raise
        return f"{'followed' if held.error is None else 'stayed'} {name} {held.error or ''}"

    def _restart(self) -> str:
        name = self._random.choice(NAMES)
        self._stop(name)
        self._start(name)
        return f"restarted {name}"

    def _damage(self) -> str:
        """A file of a commit or of a version is cut, flipped, lost, or another one's."""
        folders = [path for path in (self._run / "data", self._run / "publish" / "files") if path.exists()]
        files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        path, other = self._random.choice(files), self._random.choice(files)
        data = path.read_bytes()
        kind = self._random.choice(("cut", "flipped", "lost", "swapped"))
        path.unlink()
        if kind != "lost":
            at = self._random.randrange(max(1, len(data)))
            flipped = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] if data else b"?"
            swapped = other.read_bytes() if other != path else b""
            path.write_bytes({"cut": data[:at], "flipped": flipped, "swapped": swapped}[kind])
        self._damaged.setdefault(path, data)
        return f"{kind} {path.relative_to(self._run)}"

    def _mend(self) -> str:
        for path, data in self._damaged.items():
            path.unlink(missing_ok=True)
            # Else it belonged to a commit that was pruned.
            if path.parent.exists():
                path.write_bytes(data)
        self._damaged.clear()
        return "mended"

    def _server(self, name: str) -> HeldVersions[Any] | None:
        return self._shards[int(name)] if name.isdigit() else self._replicas.get(name)

    def _start(self, name: str) -> None:
        if name.isdigit():
            shard = ShardVersions(self._stores["run"], ShardPlace(index=int(name), count=NUM_SHARDS))
            shard.follow()
            self._shards[int(name)] = shard
            return
        shards = self._near if name == "near" else None
        started = Replica(self._stores["copy" if name == "copy" else "run"], most_samples=64, shards=shards)
        started.follow()
        self._replicas[name] = started

    def _stop(self, name: str) -> None:
        if name.isdigit():
            self._shards[int(name)] = None
        else:
            self._replicas.pop(name, None)

    def _look(self) -> None:
        """Asks all that answer."""
        for name, one in self._replicas.items():
            try:
                found = scored(one, self._base.columns)
            except ShardAway:
                self.counts["ask: ShardAway"] += 1
                continue
            current = one.current
            assert current is not None
            assert found.tobytes() == self._base.answers[current.version.commit], (name, current.name, self.events)
            self.counts["ask: right"] += 1

    def _end(self) -> None:
        """Without faults all goes on."""
        self._mend()
        newest = sorted(read_commit_names(self._stores["run"]))[-1]
        for to in (None, str(self._copy)):
            offer = publisher.publish(str(self._run), to=to, commit=newest, job=self._job)
            assert offer.number is not None, self.events
        for name in NAMES:
            if (held := self._server(name)) is None:
                self._start(name)
                held = self._server(name)
            assert held is not None
            # It may wait before it loads again what was damaged.
            held._failed = None
            held.follow()
            assert held.error is None, (name, held.error, self.events)
            assert held.current is not None
            assert held.current.version.commit == newest, (name, self.events)
        self._look()
        for store in self._stores.values():
            assert newest_pointer(store) is not None
            report = check_run(store.location)
            assert report.is_intact, (report, self.events)


def quiet() -> None:
    """Each fault would have a line of its own in the log."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


@contextmanager
def made_once() -> Iterator[None]:
    """What is the same for the same commit or program is computed once, so that a history takes no seconds."""
    contents: dict[tuple[str, str], dict[str, bytes]] = {}
    programs: dict[bytes, Any] = {}
    content_of, program_of = publisher._content_of, replica.program_of

    def content(model: Any, wanted: Any, form: Any) -> dict[str, bytes]:
        key = (model.state.manifest.name, repr(form))
        if key not in contents:
            contents[key] = content_of(model, wanted, form)
        return contents[key]

    def program(data: bytes, *rest: Any) -> Any:
        if data not in programs:
            programs[data] = program_of(data, *rest)
        return programs[data]

    publisher._content_of, replica.program_of = content, program
    try:
        yield
    finally:
        publisher._content_of, replica.program_of = content_of, program_of


def simulate(base: Base, folder: Path, seeds: Sequence[int], *, num_events: int = 25) -> Counter[str]:
    """Runs histories. Returns how often what came of events.

    Raises:
      AssertionError: as `History.run`, with the seed.
    """
    counts: Counter[str] = Counter()
    with StorageFaults().installed() as faults, made_once():
        for seed in seeds:
            own = folder / str(seed)
            history = History(base, own, faults, seed)
            try:
                history.run(num_events)
            except BaseException as error:
                error.add_note(f"of seed {seed}: {history.events}")
                raise
            counts += history.counts
            shutil.rmtree(own)
    return counts
