"""Workloads of tables that differ: their batches, and the first values of tables and dense parameters.

`C` has 200 tables of 100 to 20 million rows and four widths. Nine features in ten are bags of 3 ids on average; every
tenth is a history of 50. `C2` has two tables of 12 million rows, with four features of 20 ids each. It is for tables
that are cut: pass `--placement buckets`, since two hosts would take one table each. `F` has 40 features over 6 tables,
bags of 12 ids on average, and a weight for each id. `small-C` and so on have tables of a thousandth, for trying things
out.

`S` is SASRec with one block over a million items. Histories have 1 to 50 of them, and each sample has 20 candidates,
the first one positive. `SA` trains all positions of such histories instead: each position has a next item, and one
negative to tell it from. Its candidate is for evaluations, so peers do not read it.

Ids are uniform, which leaves nothing to deduplicate. The dense half of all but `S` and `SA` is small: two layers below,
one above. Every number follows from one seed, so losses of other frameworks on these numbers are comparable to four
digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

SEED = 777
NUM_DENSE = 13
NAMES = ("C", "C2", "F", "S", "SA", "small-C", "small-C2", "small-F", "small-S", "small-SA")
# Poisson with this mean, written as a length.
BAG = -3
WEIGHTED_BAG = -12
_CHUNK_FLOATS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedWorkload:
    """One model and the shape of its batches.

    Attributes:
      table_rows, dims, combiners: one entry a table.
      table_of: per feature, the position of its table.
      lengths: per feature, ids of a sample; negative for Poisson numbers of that mean, 0 for even ones from 1 to
        `longest`, which are the same for all such features.
      longest: of workloads with attention, per feature the vectors of a sample that stay apart, or 0 for one. The first
        feature is the history, the second one the candidates. The third one has the next item of each position, and
        the fourth one its negative, if there are these.
      bottom, top: widths of the dense layers; the last one, of width 1, is not counted.
    """

    name: str
    table_rows: tuple[int, ...]
    dims: tuple[int, ...]
    combiners: tuple[str, ...]
    table_of: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_size: int
    num_batches: int
    learning_rate: float
    longest: tuple[int, ...] = ()
    bottom: tuple[int, ...] = (64, 32)
    top: int = 32
    epsilon: float = 1e-8
    dense_accumulator: float = 0.1
    has_weights: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Per feature."""
        return tuple(self.dims[table] for table in self.table_of)

    @property
    def trains_all(self) -> bool:
        """Whether all positions of a history are trained, not its last state alone."""
        return len(self.longest) > 2

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the features that a loss depends on."""
        return tuple(at for at in range(len(self.table_of)) if at != 1 or not self.trains_all)

    def feature(self, at: int) -> str:
        """Name of a feature; names sort as numbers do."""
        return f"f{at:03d}"


def mixed_workload(name: str) -> MixedWorkload:
    """The workload of that name.

    Raises:
      ValueError: there is no such workload.
    """
    if name.startswith("small-"):
        whole = mixed_workload(name.removeprefix("small-"))
        rows = tuple(max(3, rows // 1000) for rows in whole.table_rows)
        return replace(whole, name=name, table_rows=rows, batch_size=256, num_batches=8)
    if name == "C":
        count = 200
        rows = np.exp(np.random.default_rng(5).uniform(np.log(100), np.log(300_000), count)).astype(int)
        rows[0] = rows[4] = 20_000_000
        is_history = [at % 10 == 7 for at in range(count)]
        return MixedWorkload(
            name=name,
            table_rows=tuple(int(number) for number in rows),
            dims=tuple((8, 16, 64, 128)[at % 4] for at in range(count)),
            combiners=tuple("mean" if history else "sum" for history in is_history),
            table_of=tuple(range(count)),
            lengths=tuple(50 if history else BAG for history in is_history),
            batch_size=2048,
            num_batches=8,
            learning_rate=0.001,
        )
    if name == "C2":
        return MixedWorkload(
            name=name,
            table_rows=(12_000_000,) * 2,
            dims=(32,) * 2,
            combiners=("sum",) * 2,
            table_of=(0, 0, 0, 0, 1, 1, 1, 1),
            lengths=(20,) * 8,
            batch_size=4096,
            num_batches=16,
            learning_rate=0.01,
        )
    if name == "F":
        return MixedWorkload(
            name=name,
            table_rows=(2_000_000, 1_000_000, 500_000, 200_000, 100_000, 50_000),
            dims=(32,) * 6,
            combiners=("sum",) * 6,
            table_of=tuple(at % 6 for at in range(40)),
            lengths=(WEIGHTED_BAG,) * 40,
            batch_size=4096,
            num_batches=8,
            learning_rate=0.01,
            has_weights=True,
        )
    if name == "SA":
        return replace(mixed_workload("S"), name=name, table_of=(0,) * 4, lengths=(0, 1, 0, 0), longest=(50, 0, 50, 50))
    if name == "S":
        return MixedWorkload(
            name=name,
            table_rows=(1_000_000,),
            dims=(64,),
            combiners=("sum",),
            table_of=(0, 0),
            lengths=(0, 20),
            longest=(50, 20),
            batch_size=512,
            num_batches=32,
            learning_rate=0.01,
        )
    raise ValueError(f"Found workload {name!r}. Expected one of {', '.join(NAMES)}. Pass --bench.")


@dataclass(frozen=True, slots=True, eq=False)
class MixedBatch:
    """One batch, or some samples of it.

    Attributes:
      dense: float32 `[n, NUM_DENSE]`.
      labels: float32 `[n]`.
      bags: per feature int64 ids, int64 row splits `[n + 1]`, and float32 weights of the ids or None.
    """

    dense: np.ndarray
    labels: np.ndarray
    bags: tuple[tuple[np.ndarray, np.ndarray, np.ndarray | None], ...]


def write_mixed(shape: MixedWorkload, folder: Path) -> None:
    """Draws all batches of a workload into files of the folder."""
    random = np.random.default_rng(SEED)
    for number in range(shape.num_batches):
        dense = random.standard_normal((shape.batch_size, NUM_DENSE), dtype=np.float32)
        score = dense @ np.linspace(-0.5, 0.5, NUM_DENSE, dtype=np.float32)
        lengths = np.empty((len(shape.lengths), shape.batch_size), np.int32)
        all_ids = []
        for at, length in enumerate(shape.lengths):
            if length:
                lengths[at] = random.poisson(-length, shape.batch_size) if length < 0 else length
            else:
                same = shape.lengths.index(0)
                lengths[at] = (
                    lengths[same] if same < at else random.integers(1, shape.longest[at] + 1, shape.batch_size)
                )
            ids = random.integers(0, shape.table_rows[shape.table_of[at]], int(lengths[at].sum()))
            all_ids.append(ids)
            bag = np.repeat(np.arange(shape.batch_size), lengths[at])
            part = np.bincount(bag, _teacher_weight(at, ids), shape.batch_size)
            score += 3 * (part / np.maximum(1, lengths[at])).astype(np.float32) / np.sqrt(len(shape.lengths))
        is_one = random.random(shape.batch_size) < 1 / (1 + np.exp(-(score - 1)))
        is_one |= bool(shape.longest)  # one candidate of each sample is positive
        arrays = {"dense": dense, "labels": is_one.astype(np.float32), "lengths": lengths}
        if shape.has_weights:
            arrays["weights"] = random.random(int(lengths.sum()), np.float32) + np.float32(0.5)
        np.savez(folder / f"batch-{number}.npz", ids=np.concatenate(all_ids), **arrays)


def read_mixed(shape: MixedWorkload, folder: Path, number: int, samples: slice) -> MixedBatch:
    """The given samples of a batch that `write_mixed` wrote."""
    with np.load(folder / f"batch-{number}.npz") as file:
        dense, labels, lengths, ids = (file[name] for name in ("dense", "labels", "lengths", "ids"))
        weights = file["weights"] if shape.has_weights else None
    bags, first = [], 0
    for at in range(len(shape.lengths)):
        ends = np.concatenate([[0], np.cumsum(lengths[at], dtype=np.int64)])
        splits = ends[samples.start : samples.stop + 1]
        own = slice(first + splits[0], first + splits[-1])
        bags.append((ids[own].copy(), splits - splits[0], None if weights is None else weights[own].copy()))
        first += int(ends[-1])
    return MixedBatch(dense[samples].copy(), labels[samples].copy(), tuple(bags))


def _teacher_weight(feature: int, ids: np.ndarray) -> np.ndarray:
    """What each id adds to a sample's true score: fixed noise in [-1, 1) from mixing its bits."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(feature + 1)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1


def mixed_table_values(of: MixedWorkload, table: int) -> Callable[..., np.ndarray]:
    """An initializer that gives the whole table at once: uniform in ±1/sqrt(rows)."""

    def whole(shape, dtype=np.float32):  # these names tell `embedding.initializers` how to call it
        random = np.random.Generator(np.random.SFC64([SEED, table]))
        out = np.empty((of.table_rows[table], of.dims[table]), dtype)
        bound = np.float32(1 / np.sqrt(len(out)))
        step = max(1, _CHUNK_FLOATS // out.shape[1])
        for first in range(0, len(out), step):
            chunk = out[first : first + step]
            chunk[...] = random.random(chunk.shape, dtype=np.float32)
            chunk *= 2 * bound
            chunk -= bound
        return out

    return whole


def mixed_dense_values(shape: MixedWorkload) -> list[tuple[np.ndarray, np.ndarray]]:
    """First weights `[inputs, outputs]` and biases: of the layers of `bottom`, of `top`, and of the last one."""
    random = np.random.default_rng([SEED, 9])
    values, inputs = [], NUM_DENSE
    sizes = [*shape.bottom, shape.top, 1]
    for number, outputs in enumerate(sizes):
        if number == len(shape.bottom):
            inputs += sum(shape.widths)
        weight = random.standard_normal((inputs, outputs)) * np.sqrt(2 / (inputs + outputs))
        values.append((weight.astype(np.float32), np.zeros(outputs, np.float32)))
        inputs = outputs
    return values


def attention_values(shape: MixedWorkload) -> dict[str, np.ndarray]:
    """First positions `[longest, width]`, and first weights `[width, width]` of the layers of a block of attention.
    Biases begin at 0, and norms at 1.
    """
    random = np.random.default_rng([SEED, 10])
    longest, width = shape.longest[0], shape.dims[0]
    values = {"positions": 0.02 * random.standard_normal((longest, width))}
    for name in ("query", "key", "value", "inner", "outer"):
        values[name] = random.standard_normal((width, width)) * width**-0.5
    return {name: value.astype(np.float32) for name, value in values.items()}
