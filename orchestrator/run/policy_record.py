"""`policies/g<generation>.json`: which commits a driver keeps, so that a user who resumes the run need not say it
again.

A driver whose policies are not those of the newest record writes one, under the generation that it holds. No record is
ever changed: the newest one counts. Flags and arguments go before it; without them, `jobs.cli.settings` and `prune`
read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from podembed.orchestrator.api.config import DEFAULT_METRIC, CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.intervals import known_steps
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.run import PoliciesIgnored
from podembed.workers.storage.records import encode, from_document, read_document
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

FOLDER = "policies"
_FILE = re.compile(r"g(\d{8,12})\.json")
_MAX_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """The fields of `CheckpointConfig` of the same names, and the generation whose driver had them."""

    generation: int
    num_to_keep: int | None
    keep_every_steps: int | None
    keep_best: int
    metric: str
    on_best: bool
    metric_order: str | None = None

    @staticmethod
    def of(config: CheckpointConfig, *, generation: int) -> PolicyRecord:
        return PolicyRecord(
            generation=generation,
            num_to_keep=config.num_to_keep,
            keep_every_steps=known_steps("keep_every_steps", config.keep_every_steps),
            keep_best=config.keep_best,
            metric=config.metric or DEFAULT_METRIC,
            on_best=config.on_best,
            metric_order=config.metric_order,
        )

    @property
    def config(self) -> CheckpointConfig:
        """A configuration with these fields.

        Raises:
          ConfigurationError: one is out of its range.
        """
        return CheckpointConfig(
            num_to_keep=self.num_to_keep,
            keep_every_steps=self.keep_every_steps,
            keep_best=self.keep_best,
            metric=self.metric,
            on_best=self.on_best,
            metric_order=self.metric_order,  # pyright: ignore[reportArgumentType]  # checked there
        )

    def is_same(self, other: PolicyRecord) -> bool:
        """Whether both keep the same commits, whoever wrote them."""
        return replace(self, generation=0) == replace(other, generation=0)


def read_policies(store: Store) -> PolicyRecord | None:
    """The newest record of a run; None if it has none.

    Raises:
      DocumentRefused: it is damaged, or holds what no `CheckpointConfig` accepts.
    """
    names = [name for name in store.children(FOLDER) if _FILE.fullmatch(name)]
    if not names:
        return None
    newest = max(names, key=_generation)
    name = f"{FOLDER}/{newest}"
    document = unseal(name, read_document(store, name, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES)
    # Records of older versions do not have it; there the name of a metric says which way it gets better.
    record = from_document(PolicyRecord, name, {"metric_order": None, **document})
    if record.generation != _generation(newest):
        raise DocumentRefused(name, f"policies of generation {record.generation}", f"those of {_generation(newest)}")
    try:
        _ = record.config
    except ConfigurationError as error:
        raise DocumentRefused(name, str(error), "policies that can be carried out") from error
    return record


def policies_to_keep(store: Store, emit: Emit) -> PolicyRecord | None:
    """What the run has kept so far. Where the record is damaged, a record that keeps all: what it kept must not be
    deleted.
    """
    try:
        return read_policies(store)
    except DocumentRefused as error:
        emit(PoliciesIgnored(file=error.name, found=error.found))
        return PolicyRecord.of(CheckpointConfig(num_to_keep=None), generation=0)


def record_policies(store: Store, config: CheckpointConfig, *, generation: int) -> None:
    """Writes down what a driver keeps, if the newest record says something else."""
    record = PolicyRecord.of(config, generation=generation)
    try:
        before = read_policies(store)
    except DocumentRefused:
        before = None
    if before is None or not before.is_same(record):
        store.create_exclusive(f"{FOLDER}/g{generation:08d}.json", encode(record))


def _generation(file: str) -> int:
    match = _FILE.fullmatch(file)
    return int(match.group(1)) if match else 0
