"""What travels as rows between hosts: which features ask together, and where their rows lie side by side.

`rows_way.py` moves the rows; this module holds the values that say how they are laid out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.lookup.prefetch import Split
from podembed.embedding.lookup.wanted_rows import WantedRows
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBinding:
    """Where a feature looks up and where its activation goes.

    Attributes:
      name: as in the batch.
      table: position in the list of tables.
      combiner: `sum`, `mean` or `sqrtn`.
      column: first column of its activation, where those of all features lie side by side.
    """

    name: str
    table: int
    combiner: str
    column: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of one table that are requested together.

    Features that share a table share a stream, so that a row travels once. Without gradient accumulation each feature
    has a stream of its own: updates then go feature by feature over all hosts, in the order that one host alone has.

    Attributes:
      table: position in the list of tables.
      features: in the order of the batch.
      is_distinct: whether an id that occurs several times is requested once.
    """

    table: int
    features: tuple[FeatureBinding, ...]
    is_distinct: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Streams of tables of one width, whose rows lie in one array.

    Attributes:
      dim: the width.
      streams: positions in the list of streams, ascending.
      is_trained: whether gradients come back to these rows.
    """

    dim: int
    streams: tuple[int, ...]
    is_trained: bool = True


@dataclass(slots=True)
class RowsRequest:
    """One batch after deduplication. Made by `RowsWay.request`, filled by `accept`; used up by `update`.

    Attributes:
      features: the batch, by feature.
      num_unique: per stream, the ids requested: the distinct ones of this host's samples, or, without gradient
        accumulation, all.
      asked: per owner, the keys asked of it: int64, group by group, stream by stream.
      asked_times: nothing, or one list: the same of how often the batch names each of these keys.
      asked_counts: int64 `[num_hosts, num_streams]`, how many of them are of which stream.
      index: per feature, int32 `[num_ids]`, position of each id's row in its group's array.
      own_rows: per feature that is combined in the table itself, int32 `[num_ids]`, the local row of each id.
      asked_starts: per group int64 `[num_hosts + 1]`, where the rows of each owner begin in `rows`.
      wanted: per group, the local rows that the hosts ask of this one.
      times: per group, listed as `wanted`, how often each host names it; empty where nobody wants to know.
      rows: per group, float32, the rows asked of all owners; their gradients when those return.
      served: per group, float32, the rows that all hosts want; a host with a split gets its prefetched ones first.
        Gradients when those return.
      splits: per host, which of the rows it wants go before the update of the step under way, in blocks by group; None
        for none. Filled by `split`.
    """

    features: Mapping[str, Ragged]
    num_unique: np.ndarray
    asked: list[np.ndarray]
    asked_counts: np.ndarray
    asked_starts: list[np.ndarray]
    index: dict[str, np.ndarray]
    asked_times: list[list[np.ndarray]] = field(default_factory=list)
    own_rows: dict[str, np.ndarray] = field(default_factory=dict)
    wanted: list[WantedRows] = field(default_factory=list)
    times: list[WantedRows] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    served: list[np.ndarray] = field(default_factory=list)
    splits: list[Split | None] = field(default_factory=list)

    def asks(self) -> list[int]:
        """The hosts that own rows of this batch."""
        return np.flatnonzero(self.asked_counts.any(axis=1)).tolist()

    def is_asked_by(self) -> list[int]:
        """The hosts that want rows of this one: those whose `asks` names it."""
        found = np.zeros(len(self.asked_counts), bool)
        for wanted in self.wanted:
            found |= np.diff(wanted.host_starts) > 0
        return np.flatnonzero(found).tolist()


def streams_of(specs: Sequence[TableSpec], features: Sequence[FeatureBinding]) -> tuple[Stream, ...]:
    """In the order of the tables. A table without features has one stream without features."""
    found: list[Stream] = []
    for at, spec in enumerate(specs):
        own = tuple(feature for feature in features if feature.table == at)
        if spec.optimizer is None or spec.optimizer.use_gradient_accumulation:
            found.append(Stream(at, own, is_distinct=True))
        else:
            found += [Stream(at, (feature,), is_distinct=False) for feature in own]
    return tuple(found)


def groups_of(
    streams: Sequence[Stream], specs: Sequence[TableSpec], *, elsewhere: Collection[int]
) -> tuple[Group, ...]:
    """By width and by whether they are trained; without the streams of the tables `elsewhere`."""
    found: dict[tuple[int, bool], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.table not in elsewhere:
            spec = specs[stream.table]
            found.setdefault((spec.dim, spec.optimizer is not None), []).append(number)
    return tuple(Group(dim, tuple(found[dim, is_trained]), is_trained) for dim, is_trained in sorted(found))


def tables_of(group: Group, streams: Sequence[Stream]) -> tuple[tuple[int, int, int], ...]:
    """The tables of a group: position of the table, its first stream in the group, and the one after its last."""
    tables = [streams[number].table for number in group.streams]
    return tuple((at, tables.index(at), tables.index(at) + tables.count(at)) for at in dict.fromkeys(tables))


def by_feature(values: np.ndarray, stream: Stream, batch: Mapping[str, Ragged]) -> dict[str, np.ndarray]:
    """Numbers of all ids of a stream, as views by feature."""
    found, first = {}, 0
    for feature in stream.features:
        num_ids = batch[feature.name].num_ids
        found[feature.name] = values[first : first + num_ids]
        first += num_ids
    return found
