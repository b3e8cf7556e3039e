"""`ServedModel`: an exported model over rows of versions, which scores the requests of several clients together.

Rows are combined by the kernels of training, so activations have the bits of `podembed predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from podembed.embedding.kernels.pool import pool, pool_of
from podembed.serving.artifact.exported_model import Bags, LoadedModel, Samples, _fitted, _part, _rounded
from podembed.serving.predict.exported_program import FEWEST_SAMPLES, padded_size
from podembed.serving.server.rows import TableRows


class ServedModel(LoadedModel):
    """An export whose tables are `TableRows`. As `LoadedModel`; a call of `score` is one run of the program.

    Args:
      fetch: brings the rows of ids, by table, that a run needs; None where all rows are here.
    """

    _tables: Sequence[TableRows]

    def __init__(
        self,
        manifest: Mapping[str, Any],
        *,
        fetch: Callable[[Mapping[str, np.ndarray]], None] | None = None,
        **parts: Any,
    ) -> None:
        """Further arguments are as for `LoadedModel`."""
        super().__init__(manifest, **parts)
        self._fetch = fetch
        self._pool = {
            (one["table"], one["combiner"]): pool_of(self._tables[one["table"]].arena, one["combiner"])
            for one in manifest["features"]
        }

    def score(self, requests: Sequence[Samples]) -> list[dict[str, np.ndarray]]:
        """All outputs of each request, in one run of the program.

        Args:
          requests: with at most as many samples as a run has.
        """
        if self._fetch is not None:
            self._fetch(self._ids_of(requests))
        stops = np.cumsum([one.num_samples for one in requests])
        count = int(stops[-1])
        size = padded_size(count)
        inputs = {}
        for name, like in requests[0].inputs.items():
            values = np.zeros((size, *like.shape[1:]), like.dtype)
            for one, stop in zip(requests, stops.tolist(), strict=True):
                values[stop - one.num_samples : stop] = one.inputs[name]
            inputs[name] = values
        for at, feature in enumerate(self.manifest["features"]):
            bags = [one.bags[at] for one in requests]
            if len(requests) == 1 and not feature["positions"]:
                inputs[f"activations/{feature['name']}"] = self._of_one(feature, bags[0], count, size)
                continue
            rows = _bag_of_samples([len(splits) - 1 for _, splits, _ in bags], requests, size)
            for name, values in self.looked_up(feature, *_joined(bags)).items():
                inputs[name] = values[rows]
        outputs = self.run(inputs, count)
        return [
            {name: values[stop - one.num_samples : stop] for name, values in outputs.items()}
            for one, stop in zip(requests, stops.tolist(), strict=True)
        ]

    def _of_one(self, feature: Mapping[str, Any], bags: Bags, count: int, size: int) -> np.ndarray:
        """The activations of a feature of one request, written where the program reads them."""
        values = np.empty((size, *feature["shape"]), np.float32)
        values[count:] = 0
        ids, splits, weights = _fitted(*bags, feature)
        if len(splits) == 2 and count > 1:
            values[:count] = self.pooled(feature, ids, splits, weights)
        else:
            self.pooled(feature, ids, splits, weights, out=values[:count])
        return values

    def pooled(
        self,
        feature: Mapping[str, Any],
        ids: np.ndarray,
        splits: np.ndarray,
        weights: np.ndarray | None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """As `LoadedModel.pooled`.

        Args:
          out: where the vectors are written.
        """
        table = self._tables[feature["table"]]
        places = table.places_of(ids)
        if out is None:
            out = np.empty((len(splits) - 1, table.arena.shape[1]), np.float32)
        if places is not None and feature["quantization"] is None:
            self._pool[feature["table"], feature["combiner"]](places, splits, weights, out)
        else:
            values = _rounded(table.values(ids), feature["quantization"])
            pool(values, np.arange(len(ids), dtype=np.int32), splits, weights, feature["combiner"], out)
        return out

    def _ids_of(self, requests: Sequence[Samples]) -> dict[str, np.ndarray]:
        """The ids that requests need, by table."""
        found: dict[str, list[np.ndarray]] = {}
        for at, feature in enumerate(self.manifest["features"]):
            name = self.manifest["tables"][feature["table"]]["name"]
            found.setdefault(name, []).extend(_fitted(*one.bags[at], feature)[0] for one in requests)
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def score_whole(self, samples: Samples, most: int) -> dict[str, np.ndarray]:
        """All outputs of a request, in runs of at most `most` samples."""
        parts = [self.score([part])[0] for part in _parts_of(samples, most)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def lines_of(self, vocabulary: str) -> list[str]:
        """The values of a vocabulary, by its name in the manifest."""
        return self._vocabularies[vocabulary].lines


def run_size(count: int, most: int) -> int:
    """How many of some samples the next run of the program shall have.

    A run has a power of two of samples, and takes as long as if all were real. So what is hardly more than a half is
    scored in two runs.

    Args:
      count: samples that wait.
      most: of one run, a power of two.
    """
    if count >= most:
        return most
    size = padded_size(count)
    is_cut = size // 4 >= FEWEST_SAMPLES and count - size // 2 <= size // 4
    return size // 2 if is_cut else count


def _parts_of(samples: Samples, most: int) -> Iterator[Samples]:
    """A request as several, each of which is one run."""
    start = 0
    while start < samples.num_samples:
        count = run_size(samples.num_samples - start, most)
        if count == samples.num_samples:
            yield samples
            return
        inputs = {
            name: values if len(values) == 1 else values[start : start + count]
            for name, values in samples.inputs.items()
        }
        bags = [one if len(one[1]) == 2 else _part(*one, start, count, count) for one in samples.bags]
        yield Samples(count, inputs, bags)
        start += count


def _joined(bags: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The bags of all requests one after another, and an empty one behind them."""
    lengths = [np.diff(splits) for _, splits, _ in bags]
    splits = np.zeros(sum(map(len, lengths)) + 2, np.int64)
    np.cumsum(np.concatenate([*lengths, [0]]), out=splits[1:])
    ids = np.concatenate([ids for ids, _, _ in bags])
    weights = None if bags[0][2] is None else np.concatenate([weights for _, _, weights in bags])
    return ids, splits, weights


def _bag_of_samples(counts: Sequence[int], requests: Sequence[Samples], size: int) -> np.ndarray:
    """int64 `[size]`, the bag of each sample among those of `_joined`; a context has one for all of its request's."""
    rows = np.full(size, sum(counts), np.int64)
    sample = bag = 0
    for count, one in zip(counts, requests, strict=True):
        rows[sample : sample + one.num_samples] = bag + (np.arange(count) if count > 1 else 0)
        sample, bag = sample + one.num_samples, bag + count
    return rows
