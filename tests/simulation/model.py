"""A job whose state after every step is known: what each sample adds to which rows, and what tables, digests and dense
arrays must then be.

All numbers are whole, so a sum does not depend on its order and the state after t steps is one value for any number of
hosts. An audit table counts each sample: column 0 how often it was trained, column 1 the sum of (step + 1). The other
table has a slot, and each step touches a few of its rows. Which samples a step has comes from the real `LanePlan`. The
dense state is a chain of hashes over the steps.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.commit.run_record import RunRecord, TableRecord
from podembed.workers.checkpoint.files import digest_of
from podembed.workers.checkpoint.shard import table_plan
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_files import InputFile
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.reader import training_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import table_specs

NUM_LANES = 4
BATCH_SIZE = 8
NUM_EPOCHS = 3
ROW_GROUPS = (11, 9, 13, 5)
ITEM_ROWS = 30
NUM_BUCKETS = 4
_EVERY_LANE = tuple(range(NUM_LANES))


class _NoModel:
    """The dense half is not computed here."""

    def init(self, *_: object) -> None: ...

    def apply(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a step adds to a table: rows int64 `[k]`, rising, and per array float32 `[k, width]`, in the order of the
    spec's widths.
    """

    rows: np.ndarray
    values: tuple[np.ndarray, ...]


class Model:
    """See the module. Values only; results are kept, since thousands of simulations ask for the same ones."""

    def __init__(self) -> None:
        num_samples = sum(ROW_GROUPS)
        audit = TableConfig(num_samples, 2, initializer=Constant(0.0), optimizer=SGD(1.0), name="audit")
        items = TableConfig(ITEM_ROWS, 3, initializer=Constant(2.0), optimizer=Adagrad(1.0), name="items")
        self.job = JobConfig(
            name="simulated",
            features={"sample": FeatureConfig(audit), "item": FeatureConfig(items)},
            model=_NoModel(),  # type: ignore[arg-type]
            data=ParquetData(
                "nowhere.parquet", label="label", features={"sample": IdColumn("sample"), "item": IdColumn("item")}
            ),
            batch_size=BATCH_SIZE,
            num_lanes=NUM_LANES,
            num_epochs=NUM_EPOCHS,
        )
        file = InputFile(path="nowhere.parquet", size_bytes=1, version="1", row_group_rows=ROW_GROUPS)
        self.index = InputIndex(files=(file,))
        self.plan: LanePlan = training_plan(self.index, num_lanes=NUM_LANES, batch_size=BATCH_SIZE, seed=self.job.seed)
        self.num_steps = self.plan.steps_per_epoch * NUM_EPOCHS
        self.specs = table_specs(self.job, (NUM_BUCKETS, NUM_BUCKETS))
        self.record = RunRecord(
            run_id="simulated-run",
            created_unix_s=0.0,
            seed=self.job.seed,
            num_lanes=NUM_LANES,
            batch_size=BATCH_SIZE,
            tables=tuple(
                TableRecord(
                    name=spec.name,
                    num_rows=spec.num_rows,
                    dim=spec.dim,
                    num_buckets=NUM_BUCKETS,
                    slots={name: width for name, width in spec.widths.items() if name != "rows"},
                )
                for spec in self.specs
            ),
            job_function="",
            job_arguments="{}",
            num_samples=num_samples,
            input_fingerprint="simulated",
            staleness=0,
            wire_dtype="float32",
            overlap=True,
        )
        self._states: list[list[list[np.ndarray]]] = []
        self._local: dict[tuple[object, ...], Change] = {}

    @functools.cached_property
    def samples_after(self) -> list[int]:
        """Samples of the first t steps, by t; padding left out."""
        counts = [sum(len(self.samples(step, lane)) for lane in _EVERY_LANE) for step in range(self.num_steps)]
        return [0, *np.cumsum(counts).tolist()]

    @functools.cache  # noqa: B019  # one model lives as long as the program
    def samples(self, step: int, lane: int) -> tuple[int, ...]:
        """Positions in the data of the samples that a lane gives to a step."""
        epoch, in_epoch = self.plan.position_of(step)
        order = self.plan.epoch_order(epoch)
        span = self.plan.step_bounds(lane, in_epoch)
        starts = np.cumsum([0, *ROW_GROUPS])
        found: list[int] = []
        for piece in order.pieces(lane=self.plan.lane_bounds(lane), span=span):
            first, last = max(span[0], piece.position), min(span[1], piece.position + piece.num_rows)
            rows = self.plan.row_order(epoch, piece.row_group)[piece.start : piece.stop]
            chosen = rows[first - piece.position : last - piece.position]
            found += (int(starts[piece.row_group]) + chosen).tolist()
        return tuple(found)

    @functools.cache  # noqa: B019
    def change(self, step: int, lanes: tuple[int, ...], table: int) -> Change:
        """What the samples of these lanes add to a table in a step."""
        samples = np.array([sample for lane in lanes for sample in self.samples(step, lane)], np.int64)
        if table == 0:
            rows, counts = np.unique(samples, return_counts=True)
            return Change(rows, (np.stack([counts, counts * (step + 1)], axis=1).astype(np.float32),))
        touched = (samples * 5 + step) % ITEM_ROWS
        rows, places = np.unique(touched, return_inverse=True)
        sums = np.zeros((len(rows), 3), np.float32)
        values = np.stack([samples % 3 + 1, np.full_like(samples, step % 7), samples % 11], axis=1)
        np.add.at(sums, places, values.astype(np.float32))
        return Change(rows, (sums, sums * sums))

    def change_here(self, step: int, lanes: tuple[int, ...], table: int, held: Table) -> Change:
        """The part of a change that falls on the buckets of a host, with local row numbers."""
        key = (step, lanes, table, held.buckets.tobytes())
        if key not in self._local:
            whole = self.change(step, lanes, table)
            here = np.isin(whole.rows % NUM_BUCKETS, held.buckets)
            rows = whole.rows[here]
            first = np.searchsorted(held.buckets, rows % NUM_BUCKETS) * held.spec.layout.rows_per_bucket
            self._local[key] = Change(first + rows // NUM_BUCKETS, tuple(values[here] for values in whole.values))
        return self._local[key]

    def state(self, step: int) -> list[list[np.ndarray]]:
        """Tables after so many steps: per table its arrays, float32 `[num_rows, width]`."""
        if not self._states:
            self._states.append([_initial(spec) for spec in self.specs])
        while len(self._states) <= step:
            number = len(self._states) - 1
            tables = [[array.copy() for array in arrays] for arrays in self._states[-1]]
            for at, arrays in enumerate(tables):
                change = self.change(number, _EVERY_LANE, at)
                for array, values in zip(arrays, change.values, strict=True):
                    array[change.rows] += values
            self._states.append(tables)
        return self._states[step]

    @functools.cache  # noqa: B019
    def digests(self, step: int, table: int) -> tuple[str, ...]:
        """Per bucket, the digest after so many steps."""
        spec = self.specs[table]
        plan = table_plan(spec, "")
        return tuple(
            digest_of(plan, bucket, _bucket_values(spec, self.state(step)[table], bucket))
            for bucket in range(NUM_BUCKETS)
        )

    @functools.cache  # noqa: B019
    def dense(self, step: int) -> bytes:
        """The dense state after so many steps, 32 bytes."""
        return next_dense(self.dense(step - 1), step - 1) if step else bytes(32)


def next_dense(before: bytes, step: int) -> bytes:
    return hashlib.sha256(before + step.to_bytes(8, "little")).digest()


def _initial(spec: TableSpec) -> list[np.ndarray]:
    table = Table(spec, np.arange(spec.layout.num_buckets))
    table.initialize()
    rows = np.arange(spec.num_rows)
    local = rows % NUM_BUCKETS * spec.layout.rows_per_bucket + rows // NUM_BUCKETS
    return [array[local].copy() for array in (table.rows, *table.slots.values())]


def _bucket_values(spec: TableSpec, arrays: Sequence[np.ndarray], bucket: int) -> list[np.ndarray]:
    values = []
    for array in arrays:
        padded = np.zeros((spec.layout.rows_per_bucket, array.shape[1]), np.float32)
        own = array[bucket :: spec.layout.num_buckets]
        padded[: len(own)] = own
        values.append(padded)
    return values


@functools.cache
def the_model() -> Model:
    """The one model of all simulations."""
    return Model()
