"""What `podembed serve --recommend` answers of a model with two towers, over HTTP. Prints one JSON line.

    python benchmarks/retrieval.py --items 100000 --seconds 10

A run of the job `two_tower` is trained on made-up users, whose items are of their tastes, and published. A server of
one process answers requests for the `--k` best items of a context with a history of ten. `wrk` (Debian) asks as fast as
it gets answers, for rates; `open_loop.py` asks at 70 % of that rate, for latencies. `index` is the server's own line:
the kind of index, how long it was made, and its recall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.serve import asked, latencies  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad  # noqa: E402
from podembed.jobs.papers.two_tower import Towers  # noqa: E402
from podembed.jobs.trainer import Trainer  # noqa: E402
from podembed.orchestrator.api.config import RunConfig, ScalingConfig  # noqa: E402
from podembed.workers.data.columns import IdColumn, Negatives  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.data.extra_columns import IntegerColumn  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

USERS, TASTES, HISTORY = 10_000, 200, 10
BATCH, STEPS = 1024, 200
NUM_BODIES = 64


def towers_job(folder: str, items: int, width: int) -> JobConfig:
    """Towers with vectors of `width`, whose items share a table with the history."""
    table = TableConfig(items, width, combiner="mean", name="items")
    return JobConfig(
        name="two_tower",
        features={
            "user": FeatureConfig(TableConfig(USERS, width, name="users")),
            "history": FeatureConfig(table),
            "item": FeatureConfig(table, max_sequence_length=1),
        },
        model=Towers(hidden=(128, width), is_corrected=False),
        data=ParquetData(
            f"{folder}/*.parquet",
            label="label",
            extra=(IntegerColumn("item"),),
            features={"item": IdColumn("item", negatives=Negatives(0))},
        ),
        optimizer=Adagrad(0.1),
        dense_optimizer=optax.adam(1e-3),
        batch_size=BATCH,
        candidates="item",
    )


def write_data(folder: Path, items: int) -> pa.Table:
    """Each user has a taste, and each item one; nine of ten items are of the user's."""
    random, rows = np.random.default_rng(0), BATCH * STEPS
    user = random.integers(0, USERS, rows)
    # Some items are asked for often.
    places = (items // TASTES * random.random((rows, HISTORY + 1)) ** 2).astype(np.int64) * TASTES
    taste = np.where(
        random.random(places.shape) < 0.9, user[:, None] % TASTES, random.integers(0, TASTES, places.shape)
    )
    chosen = places + taste
    columns: dict[str, Any] = {"label": np.ones(rows, np.int8), "user": user, "item": chosen[:, 0]}
    table = pa.table(columns).append_column("history", pa.array(list(chosen[:, 1:])))
    pq.write_table(table, folder / "data.parquet", row_group_size=BATCH)
    return table.slice(0, NUM_BODIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0, help="requests a second for latencies; 0: 70 % of the peak")
    options = parser.parse_args()
    options.samples = 1
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    (folder / "data").mkdir()
    rows = write_data(folder / "data", options.items).to_pylist()
    arguments = {"folder": str(folder / "data"), "items": options.items, "width": options.width}
    trainer = Trainer(
        JobReference(function="benchmarks.retrieval:towers_job", arguments=arguments),
        scaling_config=ScalingConfig(num_hosts=1, in_process=True, threads_per_host=1),
        run_config=RunConfig(name="run", storage_path=str(folder), max_steps=STEPS),
    )
    # What training says of itself is not the line that this prints.
    with redirect_stdout(sys.stderr):
        run = trainer.fit().path
    bodies = [
        json.dumps({"context": {"user": [row["user"]], "history": [row["history"]]}, "k": options.k}).encode()
        for row in rows
    ]
    command = [sys.executable, "-m", "podembed", "serve", run, "--port", "0", "--recommend", "item"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            # What was published, what was loaded, the index, where it answers.
            _, _, index, address = (server.stdout.readline() for _ in range(4))
            return {"index": index.strip(), "k": options.k} | ask(server, address.split()[2], bodies, options)
        finally:
            server.kill()


def ask(
    server: subprocess.Popen[str], address: str, bodies: list[bytes], options: argparse.Namespace
) -> dict[str, Any]:
    url = f"{address}/recommend"
    found = []
    for body in bodies:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        (history,) = json.loads(body)["context"]["history"]
        taste = statistics.mode(item % TASTES for item in history)
        found.append(
            statistics.mean(item % TASTES == taste for item in json.load(urllib.request.urlopen(request))["items"])
        )
    rates = asked([server.pid], url, bodies, options)
    kept = {name: rates[name] for name in ("requests_s", "cpu_ms_a_request", "refused")}
    rate = options.rate or 0.7 * rates["requests_s"]
    return {"of_the_user_s_taste": round(statistics.mean(found), 3)} | kept | latencies(url, bodies[0], rate, options)


if __name__ == "__main__":
    main()
