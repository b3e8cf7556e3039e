"""The workloads whose tables have one width, their batches, and the first values of tables and dense parameters.

`A` spends its time in the dense half, `B` in the embeddings. `A10` and `B10` have a tenth of their rows, for machines
with less memory. `small` has their tables with narrow rows, for saving them often. `tiny` is for trying things out. The
26 tables have 10 million rows together, and ids follow a bounded Zipf law spread over the table. A fixed teacher makes
the labels, so that the loss falls.

`uniform` has four tables of 512 MB whose ids are uniform. Half of the rows are changed by its first 64 steps, after
which the batches come again.

`E` has the layers, the tables and the batch of MLPerf's DLRM with one id a feature. As there, what is behind a largest
index shares the rows before it; here that is 500,000 rows, so that 2.1 GB hold all tables.

`cut` has one table that is larger than all others together, so two hosts or more share its rows. `D2`, `D3` and so on
are A with 2048 samples for each of so many hosts.

Every number follows from one seed and is the same in each framework that uses these generators. That makes losses
comparable to four digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

SEED = 20240917
NUM_DENSE = 13
SAMPLES_A_HOST = 2048  # of D
ZIPF_EXPONENT = 1.05
NUM_BATCHES = 32
NAMES = ("A", "B", "A10", "B10", "E", "cut", "small", "tiny", "uniform")
# Prime and above every table size: multiplying ranks by it spreads hot rows over the table.
SPREAD = 2_654_435_761
TABLE_ROWS = (
    1_460, 583, 2_900_000, 650_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 2_400_000, 3_194,
    27, 14_992, 1_600_000, 10, 5_652, 2_173, 4, 1_880_704, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
# Tables whose features have ten ids a sample where the others have one: the six largest.
LONG_BAGS = frozenset(int(table) for table in np.argsort(TABLE_ROWS)[-6:])
# One chunk of a table's first values; part of what defines them, since the generator runs on from chunk to chunk.
_CHUNK_FLOATS = 1 << 22

DenseLayers = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model and the shape of its batches.

    Attributes:
      table_rows, bag_lengths: one entry a table; each table has one feature.
      bottom, top: widths of the layers of the two MLPs, last ones included.
      zipf_exponent: of the law that ids follow; 0 for uniform ids.
      num_batches: that are drawn, and train in turn.
      dense_accumulator: first value of the dense Adagrad; from 0 the first step would be a sign step, from which runs
        drift apart.
    """

    name: str
    table_rows: tuple[int, ...]
    bag_lengths: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch_size: int = 4096
    learning_rate: float = 0.01
    zipf_exponent: float = ZIPF_EXPONENT
    num_batches: int = NUM_BATCHES
    epsilon: float = 1e-8
    dense_accumulator: float = 0.1

    @property
    def num_tables(self) -> int:
        return len(self.table_rows)

    @property
    def top_inputs(self) -> int:
        """The bottom MLP's output and the dot products of all pairs of vectors."""
        vectors = self.num_tables + 1
        return self.dim + vectors * (vectors - 1) // 2


def workload(name: str) -> Workload:
    """The workload of one of `NAMES`, or `D` with a number of hosts.

    Raises:
      ValueError: there is no such workload.
    """
    mixed = tuple(10 if table in LONG_BAGS else 1 for table in range(len(TABLE_ROWS)))
    if name == "A":
        return Workload(
            name=name, table_rows=TABLE_ROWS, bag_lengths=mixed, dim=64, bottom=(512, 256, 64), top=(512, 256, 1)
        )
    if name == "B":
        return Workload(
            name=name, table_rows=TABLE_ROWS, bag_lengths=(10,) * 26, dim=128, bottom=(64, 128), top=(64, 1)
        )
    if name == "E":
        return Workload(
            name=name,
            table_rows=tuple(min(rows, 500_000) for rows in MLPERF_ROWS),
            bag_lengths=(1,) * 26,
            dim=128,
            bottom=(512, 256, 128),
            top=(1024, 1024, 512, 256, 1),
            batch_size=8192,
        )
    if name in ("A10", "B10"):
        return replace(workload(name[0]), name=name, table_rows=tuple(max(3, rows // 10) for rows in TABLE_ROWS))
    if name == "cut":
        return Workload(
            name=name,
            table_rows=(2_000_000, 100_000, 5_000, 300),
            bag_lengths=(40, 10, 1, 1),
            dim=64,
            bottom=(64, 64),
            top=(64, 1),
        )
    if name == "small":
        return Workload(
            name=name,
            table_rows=TABLE_ROWS,
            bag_lengths=mixed,
            dim=16,
            bottom=(128, 16),
            top=(128, 1),
            batch_size=1024,
        )
    if name == "tiny":
        rows = tuple(max(3, rows // 1000) for rows in TABLE_ROWS)
        return Workload(
            name=name, table_rows=rows, bag_lengths=mixed, dim=16, bottom=(32, 16), top=(32, 1), batch_size=256
        )
    if name == "uniform":
        return Workload(
            name=name,
            table_rows=(2_000_000,) * 4,
            bag_lengths=(10,) * 4,
            dim=64,
            bottom=(64, 64),
            top=(64, 1),
            batch_size=2048,
            zipf_exponent=0.0,
            num_batches=64,
        )
    if name.startswith("D") and name[1:].isdecimal() and int(name[1:]):
        return replace(workload("A"), name=name, batch_size=SAMPLES_A_HOST * int(name[1:]))
    raise ValueError(
        f"Found workload {name!r}. Expected one of {', '.join(NAMES)}, or D2 for A at two hosts. Pass --bench."
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches:
    """Some batches in memory.

    Attributes:
      dense: float32 `[num_batches, batch_size, NUM_DENSE]`.
      ids: per table int64 `[num_batches, batch_size, bag_length]`.
      labels: float32 `[num_batches, batch_size]`.
    """

    dense: np.ndarray
    ids: tuple[np.ndarray, ...]
    labels: np.ndarray

    def write(self, folder: Path) -> None:
        """Puts every array into a file of its own, so that several processes can read their parts without generating
        the rest.
        """
        np.save(folder / "dense.npy", self.dense)
        np.save(folder / "labels.npy", self.labels)
        for table, ids in enumerate(self.ids):
            np.save(folder / f"ids-{table}.npy", ids)

    @staticmethod
    def read(folder: Path, num_tables: int) -> Batches:
        """What `write` left, mapped and not loaded."""

        def mapped(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

        return Batches(
            dense=mapped("dense"), labels=mapped("labels"), ids=tuple(mapped(f"ids-{at}") for at in range(num_tables))
        )


def make_batches(shape: Workload, num_batches: int | None = None) -> Batches:
    """The first batches of the workload, by default all of them. Their content depends on `num_batches`, since one
    generator draws them column by column.
    """
    num_batches = num_batches or shape.num_batches
    random = np.random.Generator(np.random.PCG64(SEED))
    dense = random.standard_normal((num_batches, shape.batch_size, NUM_DENSE), dtype=np.float32)
    score = np.zeros((num_batches, shape.batch_size), np.float32)
    all_ids = []
    for table, (num_rows, bag_length) in enumerate(zip(shape.table_rows, shape.bag_lengths, strict=True)):
        share = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -shape.zipf_exponent)
        share /= share[-1]
        drawn = random.random((num_batches, shape.batch_size, bag_length))
        rank = np.minimum(np.searchsorted(share, drawn), num_rows - 1).astype(np.int64)
        ids = (rank * SPREAD + 12_345 * table) % num_rows
        score += _teacher_weight(table, ids).mean(-1)
        all_ids.append(ids)
    score += dense @ np.linspace(-0.5, 0.5, NUM_DENSE, dtype=np.float32)
    probability = 1.0 / (1.0 + np.exp(-(score - 1.0)))
    labels = (random.random((num_batches, shape.batch_size)) < probability).astype(np.float32)
    return Batches(dense=dense, ids=tuple(all_ids), labels=labels)


def turns_of(ids: np.ndarray, share: float) -> np.ndarray:
    """int64: when an id becomes another one, for `renewed`. One in each round of the batches, 1 / share in all."""
    return (ids * SPREAD >> 7) % max(1, round(1 / share))


def renewed(ids: np.ndarray, turns: np.ndarray, share: float, *, number: int, num_rows: int) -> np.ndarray:
    """The ids of a round of the batches. In each round a share of all ids are others, which nobody has named before.

    Args:
      ids: int64, below `num_rows`.
      turns: of these, see `turns_of`.
      number: of the round, from 0.
      num_rows: 0 leaves all ids as they are, with the same work.
    """
    return ids + num_rows * ((number + turns) // max(1, round(1 / share)))


def _teacher_weight(table: int, ids: np.ndarray) -> np.ndarray:
    """What each id adds to a sample's true score: fixed noise in [-1, 1) from mixing its bits."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(table + 1)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1


def fill_table(shape: Workload, table: int, out: np.ndarray) -> None:
    """Draws the first values of a whole table, uniform in ±1/sqrt(rows), into float32 `[rows, dim]`."""
    random = np.random.Generator(np.random.SFC64([SEED, table]))
    bound = np.float32(1.0 / np.sqrt(shape.table_rows[table]))
    step = max(1, _CHUNK_FLOATS // shape.dim)
    for first in range(0, len(out), step):
        chunk = out[first : first + step]
        chunk[...] = random.random(chunk.shape, dtype=np.float32)
        chunk *= 2 * bound
        chunk -= bound


def table_values(of: Workload, table: int) -> Callable[..., np.ndarray]:
    """`fill_table` as an initializer that makes the whole table at once."""

    def whole(shape, dtype=np.float32):  # these names tell `embedding.initializers` how to call it
        out = np.empty(shape, dtype)
        fill_table(of, table, out)
        return out

    return whole


def dense_values(shape: Workload) -> dict[str, DenseLayers]:
    """First weights `[inputs, outputs]` and biases of the layers of `bottom` and `top`."""
    random = np.random.Generator(np.random.PCG64([SEED, 7]))
    values: dict[str, DenseLayers] = {}
    for part, inputs, widths in (("bottom", NUM_DENSE, shape.bottom), ("top", shape.top_inputs, shape.top)):
        values[part] = []
        for outputs in widths:
            weight = random.standard_normal((inputs, outputs)) * np.sqrt(2.0 / (inputs + outputs))
            bias = random.standard_normal(outputs) * np.sqrt(1.0 / outputs)
            values[part].append((weight.astype(np.float32), bias.astype(np.float32)))
            inputs = outputs
    return values
