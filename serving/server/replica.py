"""`Replica`: versions with their models, of which one answers.

A version takes over when its program is compiled and its probe is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.commit.manifest import Manifest
from podembed.serving.artifact.exported_columns import ExportedVocabulary, ModelError
from podembed.serving.artifact.exported_model import Samples, program_of
from podembed.serving.predict.exported_program import padded_size
from podembed.serving.predict.trained_forward import SCORED_PARTS
from podembed.serving.publish.probe import ProbeOutputs, decode_probe, same_bits
from podembed.serving.publish.versions import PROBE, PROGRAM, Version, read_file
from podembed.serving.server.held_versions import HeldVersion, HeldVersions
from podembed.serving.server.rows import TableRows
from podembed.serving.server.served_model import ServedModel
from podembed.serving.server.shards import RemoteRows, Shards
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.storage.store import Store

MOST_SAMPLES = 512
"""Of one run of the program."""
_CLOSE = 1e-4


@dataclass(eq=False, kw_only=True)
class ServedVersion(HeldVersion):
    """A version that scores.

    Attributes:
      has_same_bits: whether scores on this machine are those of the machine that published it, to the last bit, at
        every place of every size.
      example: one made-up sample.
      most_samples: of one run of the program.
    """

    model: ServedModel
    has_same_bits: bool
    example: Mapping[str, Any]
    most_samples: int


class Replica(HeldVersions[ServedVersion]):
    """See the module. As `HeldVersions`.

    Args:
      most_samples: of one run of the program; fewer where more have other bits.
      shards: processes that hold the tables; None to hold them here.
    """

    def __init__(
        self,
        store: Store,
        *,
        most_samples: int = MOST_SAMPLES,
        shards: Shards | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(store, clock=clock)
        self._most_samples, self._shards = most_samples, shards
        self._programs: dict[str, Any] = {}

    def _tables(
        self, version: Version, manifest: Manifest, document: Mapping[str, Any]
    ) -> tuple[dict[str, TableRows], list[Any]]:
        if self._shards is None:
            return super()._tables(version, manifest, document)
        self._shards.require(version.name, manifest.run_id)
        self._before()
        files = {one.name: one for one in manifest.tables}
        return {one["name"]: RemoteRows(files[one["name"]]) for one in document["tables"]}, []

    def _ready(self, held: HeldVersion, document: Mapping[str, Any]) -> ServedVersion:
        store, version = self._store, held.version
        sha256 = version.files[PROGRAM].sha256
        if sha256 not in self._programs:
            data = read_file(store, version, PROGRAM)
            # Compiled once; versions with other dense arrays have the same program.
            self._programs = {sha256: program_of(data, document, store.location)}
        dense = [file for file in held.manifest.dense if file.key.split("/", 1)[0] in SCORED_PARTS]
        model = ServedModel(
            document,
            program=self._programs[sha256],
            dense={file.key: read_dense(store, file) for file in dense},
            tables=list(held.tables.values()),
            fetch=self._fetch(version.name, held.tables),
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
            **vars(held),
            model=model,
            has_same_bits=has_same_bits,
            example={name: values[:1] for name, values in columns.items()},
            most_samples=most_samples,
        )

    def _fetch(
        self, version: str, tables: Mapping[str, TableRows]
    ) -> Callable[[Mapping[str, np.ndarray]], None] | None:
        shards, remote = self._shards, {name: one for name, one in tables.items() if isinstance(one, RemoteRows)}
        return None if shards is None else lambda wanted: shards.fetch(version, remote, wanted)

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
