"""`Witness`: sees everything that happens to a simulated run, and says at once when one of the invariants of the
restart protocol is broken.

It knows what no process knows: every file that was ever there, who made it, and the state that the job must have after
each step. Its own lineage rule is written from the protocol's words (start at the base of the highest generation,
follow parents) and not from the code. Numbers such as I3 are those of the invariants in `docs/simulation.md`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from podembed.orchestrator.commit.manifest import Manifest, from_json, parse_commit_name
from podembed.workers.host.survivors.surviving_shard import Restored
from tests.simulation.model import Model
from tests.simulation.storage import SharedFiles
from tests.simulation.world import Process, World


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, found: str) -> None:
        super().__init__(f"{invariant}: {found}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCommit:
    """A manifest that was once created."""

    manifest: Manifest
    parent: str | None
    generation: int
    files: frozenset[str]


class Witness:
    """See the module.

    Mutated: all that it has seen.

    Args:
      most_lost_steps: I10's bound.

    Attributes:
      claims: generation → who holds it.
      bases: generation → its base.
      commits: every manifest that was ever created.
      acknowledged: name → the driver that said so, in order.
      lost_steps: of each generation that began, the steps that the one before had done beyond the base.
      log: what happened, for people; restored only if wanted.
    """

    def __init__(
        self, world: World, shared: SharedFiles, model: Model, *, most_lost_steps: int, keeps_log: bool = False
    ) -> None:
        self.claims: dict[int, Process] = {}
        self.bases: dict[int, str | None] = {}
        self.commits: dict[str, PublishedCommit] = {}
        self.acknowledged: dict[str, str] = {}
        self.lost_steps: list[int] = []
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self._world = world
        self._shared = shared
        self._model = model
        self._most_lost_steps = most_lost_steps
        self._keeps_log = keeps_log
        self._reached: Counter[int] = Counter()
        self._reached_at_claim: dict[int, dict[int, int]] = {}
        self._torn: set[str] = set()
        self.deleted_files: set[str] = set()

    def note(self, text: str) -> None:
        if self._keeps_log:
            self.log.append(f"{self._world.now_s:9.3f} s  {text}")

    def violated(self, invariant: str, found: str) -> None:
        """Ends the simulation with a violation."""
        self.note(f"VIOLATION {invariant}: {found}")
        self._world.fail(Violation(invariant, found))

    # ------------------------------------------------------------------ what happens

    def created(self, process: Process, name: str, data: bytes, *, is_whole: bool) -> None:
        self.note(f"{process} made {name}{'' if is_whole else ' (torn)'}")
        if not is_whole:
            self._torn.add(name)
        folder, _, leaf = name.partition("/")
        if name.endswith(".claim"):
            self._claimed(process, int(leaf[1:9]))
        elif name.endswith(".base.json"):
            self._based(int(leaf[1:9]), json.loads(data)["commit"])
        elif folder == "commit":
            self._published(process, leaf.removesuffix(".json"), data)
        elif folder == "data":
            attempt = parse_commit_name(leaf.split("/", 1)[0])
            if attempt is None or attempt[1] != process.generation:
                self.violated("I4", f"{process} of generation {process.generation} wrote {name}")

    def _claimed(self, process: Process, generation: int) -> None:
        newer = max(self.claims, default=0)
        if 0 < process.generation < newer and self.claims[newer] is not process:
            self.violated(
                "I4",
                f"{process} had generation {process.generation}, {self.claims[newer]} has {newer}, and it claims "
                f"{generation}",
            )
        process.generation = generation
        self.claims[generation] = process
        self._reached_at_claim[generation] = dict(self._reached)
        self.counts["generations"] += 1

    def _based(self, generation: int, commit: str | None) -> None:
        before = max(self.bases, default=0)
        self.bases[generation] = commit
        if generation < before:
            return
        chain = self.lineage(commit)
        lost = [name for name in self.acknowledged if name not in chain]
        if lost:
            self.violated("I3", f"{lost[-1]} was acknowledged, but generation {generation} starts from {commit}")
        done = self._reached_at_claim.get(generation, {}).get(before, 0)
        lost_steps = max(0, done - _step(commit))
        self.lost_steps.append(lost_steps)
        if lost_steps > self._most_lost_steps:
            self.violated(
                "I10", f"generation {before} had done {done} steps, generation {generation} starts from {commit}"
            )

    def _published(self, process: Process, name: str, data: bytes) -> None:
        manifest = from_json(name, data)
        parsed = parse_commit_name(name) or (0, 0)
        commit = PublishedCommit(
            manifest=manifest, parent=manifest.parent, generation=parsed[1], files=frozenset(manifest.file_sizes())
        )
        siblings = [
            other
            for other, found in self.commits.items()
            if found.generation == commit.generation and found.parent == commit.parent
        ]
        if siblings:
            self.violated("I2", f"{name} and {siblings[0]} both follow {commit.parent}")
        self.commits[name] = commit
        if process.generation != commit.generation:
            self.violated("I4", f"{process} of generation {process.generation} published {name}")
        if name in self.lineage(self.head()):
            self._check_whole(name, commit)
            self._check_state(name, commit)

    def _check_whole(self, name: str, commit: PublishedCommit) -> None:
        missing = [file for file in commit.files if file not in self._shared.files]
        torn = [file for file in commit.files if file in self._torn]
        if missing or torn:
            self.violated("I1", f"{name} names {(missing + torn)[0]}, which is {'missing' if missing else 'torn'}")

    def _check_state(self, name: str, commit: PublishedCommit) -> None:
        """I5, I6, I8 and I9: the digests are those of the one state that the job has after these steps."""
        manifest = commit.manifest
        for at, table in enumerate(manifest.tables):
            expected = self._model.digests(manifest.step, at)
            wrong = [bucket for bucket, digest in enumerate(table.digests) if digest != expected[bucket]]
            if wrong:
                self.violated(
                    "I6", f"{name}: buckets {wrong} of table '{table.name}' are not as after {manifest.step} steps"
                )
        if manifest.counters["samples"] != self._model.samples_after[manifest.step]:
            self.violated("I12", f"{name} counts {manifest.counters['samples']} samples")

    def deleted(self, process: Process, name: str) -> None:
        self.note(f"{process} deleted {name}")
        self.counts["deletions"] += 1
        self.deleted_files.add(name)
        self._torn.discard(name)
        folder, _, leaf = name.partition("/")
        attempt = (
            parse_commit_name(leaf.split("/", 1)[0].removesuffix(".json")) if folder in ("data", "commit") else None
        )
        if folder == "lease" and not name.endswith(".hb"):
            self.violated("I13", f"{process} deleted {name}")
        if attempt is not None and attempt[1] > process.generation:
            self.violated("I13", f"{process} of generation {process.generation} deleted {name}, which is newer")
        if folder not in ("data", "commit"):
            return
        head = self.head()
        for at, kept in enumerate(self.lineage(head)):
            is_there = f"commit/{kept}.json" in self._shared.files
            if folder == "commit" and leaf == f"{kept}.json" and at < 2:
                self.violated("I13", f"{process} deleted {name}, which is commit {at} of the lineage from the head")
            if folder == "data" and is_there and name in self.commits[kept].files:
                self.violated("I13", f"{process} deleted {name}, which {kept} needs")

    def applied(self, generation: int, step: int) -> None:
        self._reached[generation] = max(self._reached[generation], step)

    def survived(self, restored: Restored) -> None:
        """A host's shard was restored."""
        self.counts["buckets moved"] += restored.buckets_moved
        self.counts["buckets refused"] += restored.buckets_refused
        if restored.buckets_kept or restored.buckets_wrong:
            self.note(f"a host lived on: {restored}")
            self.counts["survivors"] += 1
            self.counts["buckets kept"] += restored.buckets_kept
            self.counts["buckets wrong"] += restored.buckets_wrong

    def acknowledge(self, driver: Process, name: str) -> None:
        self.note(f"{driver} acknowledged {name}")
        self.acknowledged[name] = driver.name
        if name not in self.commits:
            self.violated("I3", f"{driver} acknowledged {name}, which was never published")

    # ------------------------------------------------------------------ the lineage, from the protocol's words

    def head(self) -> str | None:
        """Start at the base of the highest generation that has one; follow commits of that generation whose parent is
        the current one.
        """
        if not self.bases:
            return None
        generation = max(self.bases)
        current = self.bases[generation]
        while True:
            following = [
                name
                for name, commit in self.commits.items()
                if commit.generation == generation and commit.parent == current
            ]
            if not following:
                return current
            current = following[0]

    def lineage(self, head: str | None) -> list[str]:
        """The head and its ancestors, whether they are still there or not."""
        chain: list[str] = []
        while head is not None and head in self.commits:
            chain.append(head)
            head = self.commits[head].parent
        return chain


def _step(name: str | None) -> int:
    parsed = parse_commit_name(name) if name else None
    return parsed[0] if parsed else 0
