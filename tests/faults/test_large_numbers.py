"""F43: tables of more than 2^31 rows, files of more than 2^32 bytes, steps beyond 2^32. Sparse files and counters that
were set, not reached.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from podembed.embedding.buckets import bucket_layout
from podembed.embedding.initializers import Uniform
from podembed.embedding.lookup.rows_way import RowsWay
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import SGD, learning_rate_at
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.commit.lease_protocol import Base, head
from podembed.orchestrator.commit.manifest import commit_name, parse_commit_name
from podembed.workers.mesh.frames import HEADER_BYTES, FrameHeader
from podembed.workers.storage.local import LocalFiles
from podembed.workers.storage.store import Store

NUM_ROWS = 2**33 + 11
STEP = 2**40 + 3


def test_rows_beyond_four_thousand_million_are_found_pooled_and_updated() -> None:
    layout = bucket_layout(num_rows=NUM_ROWS, row_bytes=4)
    spec = TableSpec(
        name="huge",
        num_rows=NUM_ROWS,
        dim=1,
        layout=layout,
        optimizer=SGD(1.0),
        initializer=Uniform(-1.0, 1.0),
        combiner="sum",
        seed=0,
    )
    bucket = (NUM_ROWS - 1) % layout.num_buckets
    # The other buckets belong to a host that nobody asks.
    owners = np.ones(layout.num_buckets, np.int32)
    owners[bucket] = 0
    feature = FeatureBinding(name="f", table=0, combiner="sum", column=0)
    lookup = RowsWay([spec], [feature], [owners], host=0, num_hosts=2)
    table = lookup.tables[0]
    ids = np.array([NUM_ROWS - 1, NUM_ROWS - 1 - layout.num_buckets, NUM_ROWS - 1], np.int64)
    assert ids.min() > 2**32
    table.initialize()
    assert np.abs(table.rows).max() > 0.5, "rows of such numbers have first values"
    table.rows[:, 0] = np.arange(table.num_rows) % 1024
    expected = (ids // layout.num_buckets) % 1024
    prepared = lookup.request({"f": Ragged(ids, np.array([0, 1, 2, 3]))})
    lookup.accept(prepared, [np.empty(0, np.int64), np.zeros(1, np.int64)])
    lookup.gather(prepared)
    pooled = np.zeros((3, 1), np.float32)
    lookup.pool(prepared, {"f": pooled})
    assert pooled[:, 0].tolist() == expected.tolist()
    lookup.sum_by_row(prepared, {"f": np.ones((3, 1), np.float32)})
    lookup.update(prepared, None, [1.0])
    assert table.rows[ids // layout.num_buckets, 0].tolist() == [expected[0] - 2, expected[1] - 1, expected[2] - 2]


def test_a_file_of_more_than_four_gibibytes_is_read_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 2**32 + 5)
        file.seek(2**32 + 5)
        file.write(b"end of file")
    store = Store(tmp_path)
    assert store.size("huge") == 2**32 + 16
    assert store.read_range("huge", start=2**32 + 5, length=11) == b"end of file"
    assert LocalFiles(str(tmp_path)).read("huge", start=2**32 + 12, length=100) == b"file"


def test_steps_beyond_32_bits_keep_their_names_and_their_order() -> None:
    names = [commit_name(step=step, generation=2**33) for step in (9, 10**9 - 1, 10**9, STEP)]
    assert [parse_commit_name(name) for name in names] == [
        (9, 2**33),
        (10**9 - 1, 2**33),
        (10**9, 2**33),
        (STEP, 2**33),
    ]
    assert head(Base(2**33, None), names[::-1]) == names[-1]
    assert learning_rate_at(lambda step: float(step), STEP) == float(STEP)


def test_frames_carry_them() -> None:
    header = FrameHeader(tag=1, step=STEP, sender=3, generation=2**33, sequence=2**34, payload_bytes=2**35)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert FrameHeader.unpack(packed, rank=3) == header
