"""`PooledLookup`: the lookup of tables that lie whole on one host, which combines rows where they lie.

A step goes: rows of all ids, in frames to their owners (`request`) → owners group what they got by row (`accept`) and
combine the rows of each bag, straight from the table into what goes back (`pool_for_others`, `pool_own`) → gradients of
the bags come back to the owner (`gradient_memory`) → each touched row sums the gradients of all its bags, in host
order, and is updated once (`update`). No id is looked for twice, no row is copied. `ShardedLookup` is for all other
tables; this module sends nothing either.

A frame is int64: for each feature the number of ids and whether they have weights; the features' row splits; all rows
as int32; all weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.kernels.arrays import aligned_empty, matrix_of
from podembed.embedding.kernels.grouped import bag_addresses
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.embedding.lookup.prefetch import Part, Split
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.key_index import DenseIndex, KeyIndex
from podembed.embedding.table.table import GroupedRows, Table
from podembed.embedding.table_spec import TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Bags:
    """What one host asks for one feature: int32 local rows, int64 splits, float32 weights or None."""

    rows: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None


@dataclass(slots=True, eq=False)
class PooledRequest:
    """One batch on its way through the step.

    Attributes:
      frames: per owner, what it is asked.
      buffer: which of each host's memories its activations and gradients lie in.
      bags: per host, what it asks of this one, by feature. Filled by `accept`.
      grouped: per table owned here, its touched rows with the addresses of their gradients. Filled by `accept`.
      scaled: (host, feature) → gradients as they enter the sum, where that is not the bags' own. Filled by `update`.
      splits: per host, which of its bags go before the update of the step under way, in blocks by feature; None for
        none. Filled by `split`.
    """

    frames: list[np.ndarray]
    buffer: int = 0
    bags: list[dict[int, _Bags]] = field(default_factory=list)
    grouped: dict[int, GroupedRows] = field(default_factory=dict)
    scaled: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    splits: list[Split | None] = field(default_factory=list)


def can_pool_at_owner(spec: TableSpec) -> bool:
    """Whether a table's update may see the bags' gradients instead of one sum a host and row."""
    rule = spec.optimizer
    if spec.layout.num_buckets * spec.layout.rows_per_bucket >= 1 << 31:
        return False  # frames carry 32-bit row numbers
    return rule is not None and rule.use_gradient_accumulation and not rule.touches_all_rows


class PooledLookup:
    """The pooled features of one host. Mutated: rows and slots of the tables that it owns, and the buffers below.

    Args:
      tables: all tables of the job, as this host holds them.
      features: all features of the job.
      layout: of activations and gradients; `layout.owners` says which features are pooled where.
      host, num_hosts: this host's number, 0-based, and how many there are.
      num_buffers: memories that every host has for the activations and gradients of its batches, to be used in turn.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[FeatureBinding],
        layout: ActivationLayout,
        *,
        host: int,
        num_hosts: int,
        num_buffers: int = 1,
    ) -> None:
        self.host = host
        self.num_hosts = num_hosts
        self.layout = layout
        self._tables = tuple(tables)
        # What is asked here lies whole on its owner, whoever that is.
        self._indexes: tuple[KeyIndex, ...] = tuple(DenseIndex(table.spec.layout) for table in tables)
        self._features = tuple(features)
        self._of_owner = tuple(
            tuple(at for at in layout.order if layout.owners[at] == owner) for owner in range(num_hosts)
        )
        own = layout.region(host)
        length = own.stop - own.start
        self._own_tables: dict[int, list[int]] = {}
        for at in self._of_owner[host]:
            self._own_tables.setdefault(self._features[at].table, []).append(at)
        others = [other for other in range(num_hosts) if other != host]
        # What other hosts get from here, and the gradients that come back; one region each, laid out as in their own
        # memory. One is enough for all buffers, since it is sent before the next one is pooled, and used up before the
        # next gradients come.
        self._answers = {other: aligned_empty((length,)) for other in others}
        self._gradients = {other: aligned_empty((length,)) for other in others}
        answers = {other: layout.blocks_of(host, memory) for other, memory in self._answers.items()}
        gradients = {other: layout.blocks_of(host, memory) for other, memory in self._gradients.items()}
        self._answer_blocks = [dict(answers) for _ in range(num_buffers)]
        self._gradient_blocks = [dict(gradients) for _ in range(num_buffers)]
        self._neighbours: set[int] = set()

    def share(self, host: int, *, activations: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
        """Works in another host's own memory from now on: `pool_for_others` writes there, `update` reads there.

        Args:
          activations, gradients: that host's flat memories, one a buffer.
        """
        region = self.layout.region(self.host)
        for buffer, (ours, theirs) in enumerate(zip(activations, gradients, strict=True)):
            self._answer_blocks[buffer][host] = self.layout.blocks_of(self.host, ours[region])
            self._gradient_blocks[buffer][host] = self.layout.blocks_of(self.host, theirs[region])
        self._neighbours.add(host)

    @property
    def is_used(self) -> bool:
        """Whether any feature is pooled at its owner; the same on all hosts."""
        return any(owner >= 0 for owner in self.layout.owners)

    def request(self, batch: Mapping[str, Ragged], *, buffer: int = 0) -> PooledRequest:
        """Finds the rows of all ids, for a batch whose activations will lie in that buffer. Touches no table.

        Raises:
          ValueError: an id lies outside its table.
        """
        frames = [self._frame(batch, owner) for owner in range(self.num_hosts)]
        return PooledRequest(frames=frames, buffer=buffer, splits=[None] * self.num_hosts)

    def _frame(self, batch: Mapping[str, Ragged], owner: int) -> np.ndarray:
        features = self._of_owner[owner]
        parts = [batch[self._features[at].name].padded(self.layout.num_samples) for at in features]
        num_ids = sum(part.num_ids for part in parts)
        num_weights = sum(part.num_ids for part in parts if part.weights is not None)
        frame = np.empty(self._words(len(features), num_ids, num_weights), np.int64)
        head, splits, rows, weights = self._cut(frame, len(features), num_ids, num_weights)
        first = first_weight = 0
        for number, (at, part) in enumerate(zip(features, parts, strict=True)):
            head[number] = part.num_ids, part.weights is not None
            splits[number] = part.row_splits
            out = rows[first : first + part.num_ids]
            self._indexes[self._features[at].table].rows_of(part.values, out)
            first += part.num_ids
            if part.weights is not None:
                weights[first_weight : first_weight + part.num_ids] = part.weights
                first_weight += part.num_ids
        return frame

    def _words(self, num_features: int, num_ids: int, num_weights: int) -> int:
        return num_features * (self.layout.num_samples + 3) + -(-num_ids // 2) + -(-num_weights // 2)

    def _cut(
        self, frame: np.ndarray, num_features: int, num_ids: int, num_weights: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views of a frame: head `[features, 2]`, splits `[features, samples + 1]`, rows and weights of all
        features.
        """
        length = self.layout.num_samples + 1
        rows_at = num_features * (length + 2)
        weights_at = rows_at + -(-num_ids // 2)
        return (
            frame[: 2 * num_features].reshape(num_features, 2),
            frame[2 * num_features : rows_at].reshape(num_features, length),
            frame[rows_at:weights_at].view(np.int32)[:num_ids],
            frame[weights_at:].view(np.float32)[:num_weights],
        )

    def accept(self, request: PooledRequest, frames: Sequence[np.ndarray], own_gradients: np.ndarray | None) -> None:
        """Takes what every host asks; the own entry may be anything and is filled in here.

        Args:
          frames: per host, as that host's `request` made it for this one.
          own_gradients: the flat memory in which the gradients of this host's activations will lie; None if none will
            come.

        Raises:
          ValueError: a frame is not one, or names a row that is not held here.
        """
        taken = list(frames)
        taken[self.host] = request.frames[self.host]
        request.bags = [self._bags(frame, host) for host, frame in enumerate(taken)]
        own = None if own_gradients is None else self._own_blocks(own_gradients)
        for table, features in self._own_tables.items():
            entries = [(host, at) for host in range(self.num_hosts) for at in features]
            rows = [request.bags[host][at].rows for host, at in entries]
            addresses = np.empty(sum(map(len, rows)), np.int64)
            if own is not None:
                self._write_addresses(request, entries, own, addresses)
            # Also without gradients, since this is what checks the rows before `kernels.pool` trusts them.
            all_rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
            request.grouped[table] = self._tables[table].group(all_rows, addresses)

    def _bags(self, frame: np.ndarray, host: int) -> dict[int, _Bags]:
        features = self._of_owner[self.host]
        head = frame[: 2 * len(features)].reshape(-1, 2)
        is_frame = len(head) == len(features) and bool((head[:, 0] >= 0).all())
        num_ids = int(head[:, 0].sum()) if is_frame else 0
        num_weights = int(head[head[:, 1] != 0, 0].sum()) if is_frame else 0
        if not is_frame or len(frame) != self._words(len(features), num_ids, num_weights):
            raise ValueError(
                f"Found a request of {len(frame)} words from host {host}. Expected {num_ids} rows of {len(features)} "
                "features. "
                "Check that both hosts are of one generation."
            )
        _, splits, rows, weights = self._cut(frame, len(features), num_ids, num_weights)
        # Falling splits or such that leave the rows would let a kernel read outside of them.
        if (splits[:, 0] != 0).any() or (splits[:, -1] != head[:, 0]).any() or (np.diff(splits, axis=1) < 0).any():
            raise ValueError(
                f"Found row splits from host {host} that fall or miss ids. Expected them to rise from 0 to the number "
                "of ids."
            )
        bags, first, first_weight = {}, 0, 0
        for number, at in enumerate(features):
            count = int(head[number, 0])
            own_weights = None
            if head[number, 1]:
                own_weights = weights[first_weight : first_weight + count]
                first_weight += count
            bags[at] = _Bags(rows[first : first + count], splits[number], own_weights)
            first += count
        return bags

    def _write_addresses(
        self,
        request: PooledRequest,
        entries: Sequence[tuple[int, int]],
        own: Mapping[int, np.ndarray],
        out: np.ndarray,
    ) -> None:
        """The address of the gradient of every id, for entries (host, feature) in their order."""
        first = 0
        for host, at in entries:
            bags = request.bags[host][at]
            part = out[first : first + len(bags.rows)]
            first += len(bags.rows)
            if bags.weights is not None:
                scaled = request.scaled[host, at] = aligned_empty((len(bags.rows), self.layout.widths[at]))
                part[:] = scaled.ctypes.data + scaled.strides[0] * np.arange(len(bags.rows))
                continue
            if self._features[at].combiner == "sum":
                matrix = own[at] if host == self.host else self._gradient_blocks[request.buffer][host][at]
            else:
                matrix = request.scaled[host, at] = aligned_empty((self.layout.num_samples, self.layout.widths[at]))
            bag_addresses(bags.row_splits, matrix_of(matrix), part)

    def _own_blocks(self, memory: np.ndarray) -> dict[int, np.ndarray]:
        """This owner's blocks in this host's own activations or gradients."""
        return self.layout.blocks_of(self.host, memory[self.layout.region(self.host)])

    def split(self, request: PooledRequest, previous: PooledRequest) -> None:
        """Finds which of the bags that the hosts ask for have no row that `previous`, the step under way, will
        update.
        """
        late: list[dict[int, np.ndarray]] = [{} for _ in range(self.num_hosts)]
        for table, features in self._own_tables.items():
            with self._tables[table].marked([previous.grouped[table].rows]) as seats:
                for host, found in enumerate(late):
                    for at in features:
                        bags, found[at] = request.bags[host][at], np.empty(self.layout.num_samples, bool)
                        kernels.find_marked_bags(bags.rows, bags.row_splits, seats, found[at])
        order = self._of_owner[self.host]
        widths = [self.layout.widths[at] for at in order]
        request.splits = [Split.worthwhile([found[at] for at in order], widths) for found in late]

    def pool_for_others(self, request: PooledRequest, part: Part = Part.LATE) -> None:
        """Combines what the other hosts asked into `answer(host)`, or into the memory that they share.

        Args:
          part: of the bags; for a host without a split, all are late.
        """
        for other, blocks in self._answer_blocks[request.buffer].items():
            self._pool(request, other, blocks, part)

    def pool_own(self, request: PooledRequest, activations: np.ndarray, part: Part = Part.LATE) -> None:
        """Combines what this host asked of itself, into its part of the flat activations."""
        self._pool(request, self.host, self._own_blocks(activations), part)

    def _pool(self, request: PooledRequest, host: int, blocks: Mapping[int, np.ndarray], part: Part) -> None:
        split = request.splits[host]
        if split is None and part is Part.EARLY:
            return
        in_place = host == self.host or host in self._neighbours
        for number, (at, block) in enumerate(blocks.items()):
            bags, feature = request.bags[host][at], self._features[at]
            some = {}
            if split is not None:
                if not in_place:
                    block = split.packed(part, list(blocks.values()))[number]
                some = {"bags": split.positions(part)[number], "is_packed": not in_place}
            store = self._tables[feature.table].store
            store.pool(bags.rows, bags.row_splits, bags.weights, feature.combiner, block, **some)

    def answer(self, host: int) -> np.ndarray:
        """What goes to another host: the region of this owner in that host's activations."""
        return self._answers[host]

    def answer_blocks(self, host: int) -> list[np.ndarray]:
        """The same as one block a feature; with a split, the early vectors first in each."""
        return list(self.layout.blocks_of(self.host, self._answers[host]).values())

    def gradient_memory(self, host: int) -> np.ndarray:
        """Where the gradients of another host's activations belong, laid out as `answer`."""
        return self._gradients[host]

    def update(self, request: PooledRequest, own_gradients: np.ndarray, learning_rates: Sequence[float]) -> None:
        """Updates each touched row of the tables owned here once.

        Args:
          own_gradients: the flat memory that `accept` was given, now filled.
          learning_rates: one a table of the job.
        """
        blocks = {**self._gradient_blocks[request.buffer], self.host: self._own_blocks(own_gradients)}
        for (host, at), scaled in request.scaled.items():
            _scale(blocks[host][at], request.bags[host][at], self._features[at].combiner, scaled)
        for table, grouped in request.grouped.items():
            self._tables[table].update_grouped(grouped, learning_rates[table])


def _scale(gradients: np.ndarray, bags: _Bags, combiner: str, out: np.ndarray) -> None:
    """Gradients of the ids of each bag: one a bag where all its ids have the same, else one an id.

    The rules are those of `kernels.sum_gradients`: divided by the bag's denominator, times the weight; nothing where
    that is 0.
    """
    lengths = np.diff(bags.row_splits)
    if bags.weights is None:
        divisor = np.maximum(lengths, 1).astype(np.float32)
        if combiner == "sqrtn":
            divisor = np.sqrt(divisor)
        np.divide(gradients, divisor[:, None], out=out)
        return
    bag = np.repeat(np.arange(len(lengths)), lengths)
    factor = bags.weights
    if combiner != "sum":
        amounts = bags.weights if combiner == "mean" else bags.weights * bags.weights
        # Summed as the kernel does, in float32 and in the order of the ids.
        total = np.zeros(len(lengths), np.float32)
        np.add.at(total, bag, amounts)
        divisor = np.sqrt(total) if combiner == "sqrtn" else total
        is_zero = divisor == 0
        scaled = gradients / np.where(is_zero, np.float32(1), divisor)[:, None]
        scaled[is_zero] = 0
        np.multiply(scaled[bag], factor[:, None], out=out)
        return
    np.multiply(gradients[bag], factor[:, None], out=out)
