"""`Replica`: the versions of a run in memory, of which one answers. It follows the log of pointers.

A version is loaded beside the one that answers, and takes its place when it is warm and its probe is equal. The version
before stays until the next one comes, so a rollback to it takes no reading.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.checkpoint import load
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.commit.published import newest_pointer
from podembed.serving.artifact.exported_columns import ExportedVocabulary, ModelError
from podembed.serving.artifact.exported_model import Samples, program_of
from podembed.serving.predict.exported_program import padded_size
from podembed.serving.predict.trained_forward import SCORED_PARTS
from podembed.serving.publish.probe import ProbeOutputs, decode_probe, same_bits
from podembed.serving.publish.versions import (
    PROBE,
    PROGRAM,
    SCHEMA,
    Version,
    manifest_digest,
    read_file,
    read_version,
)
from podembed.serving.server.rows import RowsByKey, RowsByNumber
from podembed.serving.server.served_model import ServedModel
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

MOST_SAMPLES = 512
"""Of one run of the program."""
_CLOSE = 1e-4
_logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class ServedVersion:
    """A version in memory. Mutated: how many answers are being made with it.

    Attributes:
      number: of the pointer that offered it.
      has_same_bits: whether scores on this machine are those of the machine that published it, to the last bit, at
        every place of every size.
      example: one made-up sample.
      most_samples: of one run of the program.
    """

    version: Version
    number: int
    manifest: Manifest
    model: ServedModel
    tables: list[RowsByNumber | RowsByKey]
    has_same_bits: bool
    example: Mapping[str, Any]
    most_samples: int
    loaded_unix_s: float
    num_users: int = field(default=0)

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def by_name(self) -> dict[str, RowsByNumber | RowsByKey]:
        """The tables by their names."""
        return {one["name"]: table for one, table in zip(self.model.manifest["tables"], self.tables, strict=True)}


class Replica:
    """See the module. One thread loads versions; any may `use` one.

    Args:
      most_samples: of one run of the program; fewer where more have other bits.
      clock: of the machine.

    Attributes:
      error: why the newest pointer is not followed, or None.
    """

    def __init__(self, store: Store, *, most_samples: int = MOST_SAMPLES, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._clock = store, clock
        self._most_samples = most_samples
        # The last one was made last. At most two.
        self._chain: list[ServedVersion] = []
        self._current: ServedVersion | None = None
        self._changed = threading.Condition()
        self._programs: dict[str, Any] = {}
        self.error: str | None = None
        self.num_swaps = 0

    @property
    def current(self) -> ServedVersion | None:
        """The version that answers; None before the first."""
        return self._current

    @contextmanager
    def use(self) -> Iterator[ServedVersion]:
        """The version that answers. Its rows stay as they are until the block ends.

        Raises:
          ConfigurationError: there is none yet.
        """
        with self._changed:
            found = self._current
            if found is None:
                raise ConfigurationError(f"Found no version of {self._store.location} loaded. Expected one. Wait.")
            found.num_users += 1
        try:
            yield found
        finally:
            with self._changed:
                found.num_users -= 1
                self._changed.notify_all()

    def follow(self) -> bool:
        """Loads the version of the newest pointer, if another one answers. Returns whether it changed.

        An error leaves the version that answers where it is; `error` says it.

        Raises:
          ConfigurationError, StorageError, ModelError: the first version cannot be loaded.
        """
        try:
            pointer = newest_pointer(self._store)
            if pointer is None:
                raise ConfigurationError(
                    f"Found no published version in {self._store.location}. Expected one. Publish a commit: podembed "
                    f"publish {self._store.location}."
                )
            current = self._current
            if current is not None and current.number == pointer.number:
                return False
            began_s = self._clock.monotonic_s()
            known = next((one for one in self._chain if one.name == pointer.version), None)
            found = known or self._load(read_version(self._store, pointer.version), pointer.number)
            found.number = pointer.number
        except Exception as error:
            # Whatever is wrong with the next version, the one that answers goes on.
            if self._current is None:
                raise
            if str(error) != self.error:
                _logger.warning("%s goes on to answer: %s", self._current.name, error)
            self.error = str(error)
            return False
        with self._changed:
            self._current, self.error = found, None
            self.num_swaps += 1
            self._changed.notify_all()
        _logger.info("%s answers after %.2f s", found.name, self._clock.monotonic_s() - began_s)
        return found is not current

    def answer_with(self, version: Version) -> None:
        """Loads a version, whatever pointers say.

        Raises:
          ConfigurationError, StorageError, ModelError: it cannot be loaded.
        """
        found = self._load(version, 0)
        with self._changed:
            self._current = found
            self._changed.notify_all()

    def _load(self, version: Version, number: int) -> ServedVersion:
        store = self._store
        manifest = self._manifest(version)
        document = _document(read_file(store, version, SCHEMA), version)
        before = self._before()
        tables: list[RowsByNumber | RowsByKey] = []
        made: list[Any] = []
        try:
            for described in document["tables"]:
                files = next(one for one in manifest.tables if one.name == described["name"])
                since = before and next((one for one in before.manifest.tables if one.name == files.name), None)
                own = before and before.by_name.get(files.name)
                if since is not None and own is not None and _is_alike(since, files, own, described):
                    tables.append(own.next(store, files, since))
                    made.append((tables[-1], own))
                else:
                    has_keys = described["keys"] is not None
                    tables.append(
                        RowsByKey.of(store, files, described["keys"]) if has_keys else RowsByNumber.of(store, files)
                    )
            found = self._served(version, number, manifest, document, tables)
        except BaseException:
            for table, of_before in made:
                table.undo(of_before)
            raise
        self._chain.append(found)
        return found

    def _manifest(self, version: Version) -> Manifest:
        try:
            digest, manifest = manifest_digest(self._store, version.commit), load(self._store, version.commit)
        except NameNotFound as error:
            raise ConfigurationError(
                f"Found no commit {version.commit} in {self._store.location}, which version {version.name} is made of. "
                "Expected it: it was deleted, or not copied. Publish another commit."
            ) from error
        if digest != version.manifest_sha256 or manifest.run_id != version.run_id:
            raise DocumentRefused(f"commit/{version.commit}.json", "another manifest", f"that of {version.name}")
        return manifest

    def _before(self) -> ServedVersion | None:
        """The version from which the next is made. Of two, the one that does not answer goes, so that there is room."""
        if len(self._chain) == 2:
            older, newer = self._chain
            # After a rollback the older one answers.
            gone = newer if older is self._current else older
            self._chain.remove(gone)
            with self._changed:
                self._changed.wait_for(lambda: not gone.num_users)
            for name, one in older.by_name.items():
                other = newer.by_name.get(name)
                if other is None or one.arena is not other.arena:
                    continue
                if gone is newer:
                    other.undo(one)  # pyright: ignore[reportArgumentType]
                else:
                    one.drop(other)  # pyright: ignore[reportArgumentType]
        return self._chain[0] if self._chain else None

    def _served(
        self,
        version: Version,
        number: int,
        manifest: Manifest,
        document: Mapping[str, Any],
        tables: list[RowsByNumber | RowsByKey],
    ) -> ServedVersion:
        store, sha256 = self._store, version.files[PROGRAM].sha256
        if sha256 not in self._programs:
            data = read_file(store, version, PROGRAM)
            # Compiled once; versions with other dense arrays have the same program.
            self._programs = {sha256: program_of(data, document, store.location)}
        dense = [file for file in manifest.dense if file.key.split("/", 1)[0] in SCORED_PARTS]
        model = ServedModel(
            document,
            program=self._programs[sha256],
            dense={file.key: read_dense(store, file) for file in dense},
            tables=tables,
            vocabularies={
                name: ExportedVocabulary(read_file(store, version, name).decode())
                for name in version.files
                if name.startswith("vocabularies/")
            },
        )
        columns, expected = decode_probe(read_file(store, version, PROBE), PROBE)
        most_samples = model.most_samples(padded_size(self._most_samples))
        has_same_bits = self._proven(model, version, columns, expected, most_samples)
        return ServedVersion(
            version=version,
            number=number,
            manifest=manifest,
            model=model,
            tables=tables,
            has_same_bits=has_same_bits,
            example={name: values[:1] for name, values in columns.items()},
            most_samples=most_samples,
            loaded_unix_s=self._clock.wall_s(),
        )

    def _proven(
        self,
        model: ServedModel,
        version: Version,
        columns: Mapping[str, Any],
        expected: ProbeOutputs,
        most_samples: int,
    ) -> bool:
        """Scores the probe at every size and at moved places, which also compiles the program for these sizes.

        Returns:
          Whether all scores have the bits that were published.

        Raises:
          ModelError: they differ by more than another machine explains.
        """
        samples = model.read(columns)
        (found,) = model.score([samples])
        for name, (dtype, shape, data) in expected.items():
            values = np.frombuffer(data, dtype).reshape(shape)
            got = found.get(name)
            if got is None or got.shape != shape or not np.allclose(got, values, rtol=_CLOSE, atol=_CLOSE):
                raise ModelError(
                    f"Found other outputs {name!r} for the probe of version {version.name} than were published. "
                    "Expected the same. Its files are damaged in a way that no checksum shows: publish it again."
                )
        is_same = same_bits(found, expected)
        size = 2 * padded_size(samples.num_samples)
        while size <= most_samples:
            first = model.score([_lone(samples), *[samples] * (size // samples.num_samples - 1)])
            is_same &= all(np.array_equal(_bits(one[name]), _bits(found[name])) for one in first[1:] for name in found)
            size *= 2
        return is_same


def _lone(samples: Samples) -> Samples:
    """The first sample, so that what follows stands at an odd place."""
    inputs = {name: values[:1] for name, values in samples.inputs.items()}
    bags = [
        (ids[: splits[1]], splits[:2], None if weights is None else weights[: splits[1]])
        for ids, splits, weights in samples.bags
    ]
    return Samples(1, inputs, bags)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _document(data: bytes, version: Version) -> dict[str, Any]:
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("commit") != version.commit:
        raise DocumentRefused(SCHEMA, "another schema", f"that of {version.name}")
    return document


def _is_alike(since: Any, files: Any, rows: RowsByNumber | RowsByKey, described: Mapping[str, Any]) -> bool:
    """Whether a table can be made of its version before."""
    alike = (since.num_rows, since.dim, since.num_buckets) == (files.num_rows, files.dim, files.num_buckets)
    if described["keys"] is None:
        return alike and isinstance(rows, RowsByNumber)
    return alike and isinstance(rows, RowsByKey) and rows.described == described["keys"]
