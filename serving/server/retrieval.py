"""`Retrieval`: the best items of all for a context, each with the exact score of the version that answers.

Of a model with two towers an index of item vectors names candidates, which are scored as any request is. An index is
made of one version. When another version comes, a thread makes its index beside, and the older one names candidates
meanwhile. Of other models all items are scored.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.values import MutexValue, ValueClass

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.predict.exported_program import padded_size
from podembed.serving.publish.probe import decode_probe
from podembed.serving.publish.versions import PROBE, read_file
from podembed.serving.server.item_columns import ItemColumns, Value, feature_of
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.scorer import Answer
from podembed.serving.server.server_metrics import PREFIX
from podembed.serving.server.towers import TowerOutputs, find_towers, item_samples, item_vectors, scores_of, vector_of
from podembed.serving.server.vector_index import MOST_FLAT, SPREAD, TOP, VectorIndex, best_of, share_found
from podembed.workers.storage.store import Store

MOST_SCORED = 10_000
"""Items up to which all are scored, without an index."""
MOST_ITEMS = 1_000
"""Of one answer."""
_MOST_WITHOUT = 10_000
_LOOK_S, _RETRY_S, _CLOSE_S = 0.2, 10.0, 1.0
_FIELDS = ("context", "k", "without", "filter")
_logger = logging.getLogger(__name__)

Columns = Mapping[str, Any]
Score = Callable[[Columns], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRequest:
    """A request.

    Attributes:
      context: columns of one sample without those of items.
      k: number of items.
      without: keys of items that are left out.
      conditions: values by column of the items, one of which an item must have.
    """

    context: Columns
    k: int = 10
    without: Sequence[Any] = ()
    conditions: Mapping[str, Sequence[Value]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommended:
    """An answer.

    Attributes:
      items: keys, the best first.
      scores: of these, `[k]`.
      columns: of these and of the context, as they were scored.
      answer: of the scorer, for these; None without any.
      index_version: name of the version whose vectors named the candidates; None where all items were scored.
    """

    items: Sequence[str | int]
    scores: np.ndarray
    columns: Columns
    answer: Answer | None
    index_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemIndex:
    """The items of a version, and their vectors where it has two towers.

    Attributes:
      names: columns of the items that the model reads.
      context: the other columns that it reads.
      older_recall: share of the version's best items that the index before named for it; None without one.
    """

    version: str
    step: int
    items: ItemColumns
    names: Sequence[str]
    context: Sequence[str]
    towers: TowerOutputs | None
    vectors: VectorIndex | None
    seconds: float
    older_recall: float | None = None

    def words(self) -> str:
        """What it is, for people."""
        among = f"recommends among {len(self.items):,} items"
        if self.vectors is None:
            few = len(self.items) <= MOST_SCORED
            return f"{among}: {'all' if few else f'up to {MOST_SCORED:,} that a filter leaves'} are scored"
        kind = "flat" if self.vectors.is_flat else "IVF"
        return f"{among}: {kind} index, made in {self.seconds:.1f} s, recall {self.vectors.recall:.4f}"


class Retrieval:
    """See the module. Mutated by its thread: the index that answers.

    Args:
      store: of the run.
      feature: of the items; None for the first column of the file.
      items: Parquet file with a row for each item; None for all that the feature can name.
      most_flat: items up to which a search is exact.

    Attributes:
      error: why the version that answers has no index of its own yet, or None.
    """

    def __init__(
        self,
        store: Store,
        replica: Replica,
        *,
        feature: str | None = None,
        items: str | None = None,
        most_flat: int = MOST_FLAT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Raises:
        ConfigurationError, ModelError, InputError: the items cannot be read, or do not fit the model.
        """
        self._store, self._replica, self._feature, self._clock = store, replica, feature, clock
        self._most_flat = most_flat
        self._items = None
        if items is not None:
            with replica.use() as version:
                key = feature_of(version, feature)["column"] if feature is not None else None
            self._items = ItemColumns.read(items, key)
        self.error: str | None = None
        self._series = IndexSeries()
        self.index = self._made(None)
        self._series.set(self.index)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. An index that it makes is not waited for."""
        self._ends.set()
        self._thread.join(_CLOSE_S)

    def series(self) -> bytes:
        """Series for Prometheus."""
        return self._series.text()

    def words(self) -> str:
        """What it has, for people."""
        late = f"; the version that answers has no index of its own: {self.error}" if self.error else ""
        return f"{self.index.words()}, of version {self.index.version}{late}"

    def read(self, document: Any) -> ItemRequest:
        """A request of the JSON that a client sent.

        Raises:
          ModelError: it is none.
        """
        return _wanted(document, self.index)

    def filled(self, columns: Columns, needed: Sequence[str]) -> Columns:
        """As `ItemColumns.filled`, of the file of items."""
        return columns if self._items is None else self._items.filled(columns, needed)

    async def answer(self, wanted: ItemRequest, score: Score) -> Recommended:
        """The best items.

        Args:
          score: gives the outputs of some columns.

        Raises:
          ModelError: the request does not fit the model, or there are too many items.
          As `score`.
        """
        index = self.index
        user = None
        if index.towers is not None:
            first = await score({**wanted.context, **index.items.columns(np.zeros(1, np.int64), index.names)})
            # A version may have come meanwhile that does not give this output.
            if index.towers.user in first.outputs:
                user = vector_of(first.outputs, index.towers.user)[0]
        places = await asyncio.to_thread(_candidates, index, wanted, user)
        version = index.version if user is not None else None
        if not len(places):
            return Recommended(items=(), scores=np.zeros(0), columns={}, answer=None, index_version=version)
        columns = await asyncio.to_thread(index.items.columns, places, index.names)
        answer = await score({**wanted.context, **columns})
        try:
            scores = scores_of(answer.outputs)
        except ConfigurationError as error:
            # Of a version that came after the start.
            raise ModelError(str(error)) from error
        best = np.lexsort((places, -scores))[: wanted.k]
        return Recommended(
            items=index.items.keys(places[best]),
            scores=scores[best],
            columns={**wanted.context, **{name: [values[at] for at in best] for name, values in columns.items()}},
            answer=replace(answer, outputs={name: values[best] for name, values in answer.outputs.items()}),
            index_version=version,
        )

    def _follow(self) -> None:
        pause_s = _LOOK_S
        while not self._ends.wait(pause_s):
            pause_s = _LOOK_S
            current = self._replica.current
            if current is None or current.name == self.index.version:
                continue
            try:
                self.index, self.error = self._made(self.index), None
                self._series.set(self.index)
                _logger.info("%s: %s", self.index.version, self.index.words())
            except Exception as error:
                # The older index goes on to name candidates, whose scores are exact.
                if str(error) != self.error:
                    _logger.warning("the index of %s goes on to name candidates: %s", self.index.version, error)
                self.error, pause_s = str(error), _RETRY_S

    def _made(self, before: ItemIndex | None) -> ItemIndex:
        """The index of the version that answers."""
        began_s = self._clock.monotonic_s()
        # The rows of a version stay while its vectors are computed. Lists are made of the vectors alone.
        with self._replica.use() as version:
            items = self._items or ItemColumns.of_feature(version, self._feature or "")
            names = [name for name in items.names if name in version.model.columns]
            if items.key not in names:
                raise ConfigurationError(
                    f"Found column {items.key!r} as the key of items. Expected a column that the model reads, one of "
                    f"{version.model.columns}. Put the key first in the file of --items, or name its feature: "
                    "--recommend FEATURE."
                )
            try:
                towers, values, users = self._vectors(version, items, names, is_first=before is None)
            except ModelError as error:
                raise ConfigurationError(
                    f"Found an item in {items.source} that the model cannot read: {error} Expected values as in "
                    "training. Correct that item, or leave it out."
                ) from error
            name, step = version.name, version.manifest.step
            context = [one for one in version.model.columns if one not in names]
        vectors = older = None
        if values is not None and users is not None:
            older = _older_recall(users, values, items, before)
            vectors = VectorIndex(values, users, most_flat=self._most_flat)
        return ItemIndex(
            version=name,
            step=step,
            items=items,
            names=names,
            context=context,
            towers=towers,
            vectors=vectors,
            seconds=self._clock.monotonic_s() - began_s,
            older_recall=older,
        )

    def _vectors(
        self, version: ServedVersion, items: ItemColumns, names: Sequence[str], *, is_first: bool
    ) -> tuple[TowerOutputs | None, np.ndarray | None, np.ndarray | None]:
        """The towers of a version, the vectors of all items, and those of the probe's users; None without towers."""
        probe, _ = decode_probe(read_file(self._store, version.version, PROBE), PROBE)
        contexts = {name: values for name, values in probe.items() if name not in names}
        count = len(next(iter(probe.values())))
        some = items.columns(np.linspace(0, len(items) - 1, count).astype(np.int64), names)
        towers = find_towers(version, contexts, some)
        samples = item_samples(version, items, names, {name: values[:1] for name, values in contexts.items()})
        if towers is None:
            if is_first and self._items is not None:
                # An item that cannot be read is found now, and not by a request.
                for _ in samples:
                    pass
            return None, None, None
        (outputs,) = version.model.score([version.model.read({**contexts, **some})])
        users = vector_of(outputs, towers.user).astype(np.float32)
        return towers, item_vectors(version, towers, samples), users


class IndexSeries:
    """What a server measures of its index. docs/serving.md has each series."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        # Of several workers each has an index of its own.
        least = partial(Gauge, registry=registry, multiprocess_mode="livemin")
        self._items = least(f"{PREFIX}_index_items", "Items among which it recommends")
        self._step = least(f"{PREFIX}_index_step", "Step of the index that answers")
        self._seconds = least(f"{PREFIX}_index_build_seconds", "How long it was made")
        self._recall = least(
            f"{PREFIX}_index_recall",
            "Share of the best 100 items that it finds: its own version's, and those of the next version, until that "
            "one's index was there",
            ["version"],
        )

    def text(self) -> bytes:
        """All series; nothing of one of several workers, since those of `ServerMetrics` have them then."""
        return generate_latest(self._registry) if ValueClass is MutexValue else b""

    def set(self, index: ItemIndex) -> None:
        """Another index answers."""
        self._items.set(len(index.items))
        self._step.set(index.step)
        self._seconds.set(index.seconds)
        if index.vectors is not None:
            self._recall.labels("own").set(index.vectors.recall)
        if index.older_recall is not None:
            self._recall.labels("next").set(index.older_recall)


def _older_recall(users: np.ndarray, vectors: np.ndarray, items: ItemColumns, before: ItemIndex | None) -> float | None:
    """The share of the best items of a version that the index before named for its users."""
    if before is None or before.vectors is None or before.vectors.width != vectors.shape[1]:
        return None
    best = [set(items.keys(places)) for places in best_of(vectors, users)]
    found = [set(before.items.keys(before.vectors.search(user, TOP * SPREAD))) for user in users]
    return share_found(best, found)


def _candidates(index: ItemIndex, wanted: ItemRequest, user: np.ndarray | None) -> np.ndarray:
    """int64, places of the items to score.

    Raises:
      ModelError: too many without an index.
    """
    allowed = index.items.allowed(wanted.conditions)
    without = index.items.places(wanted.without)
    without = without[without >= 0]
    # At least as many as a run of the program has in any case.
    count = padded_size(SPREAD * wanted.k)
    num_allowed = len(index.items) if allowed is None else int(allowed.sum())
    has_vectors = index.vectors is not None and user is not None and len(user) == index.vectors.width
    if not has_vectors and num_allowed > MOST_SCORED:
        raise ModelError(
            f"Found {num_allowed:,} items to score, of a model without two towers. Expected at most {MOST_SCORED:,}, "
            "since all are scored for each request. Serve fewer with --items, filter, or publish a model whose outputs "
            "have a vector of the user and one of the item."
        )
    if index.vectors is None or user is None or not has_vectors or num_allowed <= count:
        places = np.arange(len(index.items)) if allowed is None else np.flatnonzero(allowed)
    else:
        # All that are left out may be among the best.
        places = index.vectors.search(user, count + len(without), allowed)
    return np.sort(places[~np.isin(places, without)][: count if has_vectors else None])


def _wanted(document: Any, index: ItemIndex) -> ItemRequest:
    if not isinstance(document, dict) or not isinstance(context := document.get("context"), dict):
        raise ModelError('Found no object "context". Expected {"context": {"user": [7]}, "k": 10}. Send its columns.')
    if unknown := [name for name in document if name not in _FIELDS]:
        raise ModelError(f"Found {unknown[0]!r:.80}. Expected {', '.join(_FIELDS)}. Put columns into context.")
    if own := [name for name in context if name in index.names]:
        raise ModelError(
            f"Found column {own[0]!r:.80} in the context. Expected columns of the user alone, since those of the items "
            "come from the server. Leave it out."
        )
    if missing := [name for name in index.context if name not in context]:
        raise ModelError(f"Found a context without {missing}. Expected {list(index.context)}. Send all of them.")
    k = document.get("k", 10)
    if type(k) is not int or not 1 <= k <= MOST_ITEMS:
        raise ModelError(f"Found k {k!r:.40}. Expected a number of items from 1 to {MOST_ITEMS:,}. Ask for fewer.")
    # One value stands for a column with one, as for scores.
    columns = {name: values if isinstance(values, list) else [values] for name, values in context.items()}
    if several := [name for name, values in columns.items() if len(values) != 1]:
        raise ModelError(
            f"Found {len(columns[several[0]])} values of column {several[0]!r:.80} in the context. Expected one, a "
            "list in a list for a bag. Send a request for each context."
        )
    without = document.get("without", [])
    if not isinstance(without, list) or len(without) > _MOST_WITHOUT:
        raise ModelError(f"Found no list 'without' of at most {_MOST_WITHOUT:,} keys. Expected one. Send fewer.")
    conditions = document.get("filter", {})
    if not isinstance(conditions, dict):
        raise ModelError('Found no object "filter". Expected values by column, such as {"genre": ["war", "crime"]}.')
    return ItemRequest(
        context=columns,
        k=k,
        without=without,
        conditions={name: _values_of(name, values) for name, values in conditions.items()},
    )


def _values_of(name: str, values: Any) -> list[Value]:
    found = values if isinstance(values, list) else [values]
    if not all(value is None or isinstance(value, (str, int, float)) for value in found):
        raise ModelError(
            f"Found a filter by {name!r:.80} that is no value and no list of values. Expected texts, numbers or truth "
            "values. Send the allowed ones."
        )
    return found
