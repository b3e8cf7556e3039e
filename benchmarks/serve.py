"""What `podembed serve` answers on a workload, over HTTP. Prints one JSON line.

    python benchmarks/serve.py --bench A10 --samples 128 --seconds 10

A run of a few steps is trained and published. Then a server of one process answers requests of one context (13 dense
numbers and half of the features) with `--samples` candidates, or of one sample. `wrk` (Debian) asks as fast as it gets
answers, for rates; `open_loop.py` asks at 70 % of that rate, for latencies. Rates are a CPU second of the
server's process, since the asking program takes CPU, too. `in_process` is the same model without a server or JSON: the
samples a CPU second of `podembed predict` on the same rows, columns already read. `rows_per_cpu_s` counts the ids that
are looked up and pooled for such requests.

`--workers W` scores in several processes, `--shards S` with the rows of others; CPU seconds are those of all of them.

`--swap S` offers a further version every S seconds meanwhile, of one step of training more. All of them were published
before, as on another machine: only their pointers come. `swap_s` is from there to the first answer, with the second in
which a server looks for pointers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import cpu_s  # noqa: E402
from benchmarks.workload import NUM_DENSE, workload  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad  # noqa: E402
from podembed.jobs.models.dlrm import DLRM  # noqa: E402
from podembed.jobs.trainer import Trainer  # noqa: E402
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

NUM_ROWS = 1 << 16
BATCH = 4096
NUM_BODIES = 64
CONTEXT = range(13)


def serve_job(folder: str, bench: str) -> JobConfig:
    """DLRM of a workload on made-up data."""
    shape = workload(bench)
    features = {
        f"f{at:02d}": FeatureConfig(TableConfig(rows, shape.dim, combiner="sum", name=f"t{at:02d}"))
        for at, rows in enumerate(shape.table_rows)
    }
    return JobConfig(
        name="clicks",
        features=features,
        model=DLRM(bottom=shape.bottom[:-1], top=shape.top[:-1]),
        data=ParquetData(f"{folder}/*.parquet", label="label", dense=tuple(f"d{at}" for at in range(NUM_DENSE))),
        optimizer=Adagrad(0.05),
        batch_size=BATCH,
    )


def write_data(folder: Path, bench: str) -> pa.Table:
    """Ids with the skew of a workload's batches: the square of a uniform number."""
    random, shape = np.random.default_rng(0), workload(bench)
    columns: dict[str, Any] = {"label": (random.random(NUM_ROWS) < 0.3).astype(np.int8)}
    for at in range(NUM_DENSE):
        columns[f"d{at}"] = random.normal(size=NUM_ROWS).astype(np.float32).round(4)
    for at, (rows, length) in enumerate(zip(shape.table_rows, shape.bag_lengths, strict=True)):
        ids = (rows * random.random((NUM_ROWS, length)) ** 2).astype(np.int64)
        columns[f"f{at:02d}"] = ids[:, 0] if length == 1 else list(ids)
    table = pa.table(columns)
    pq.write_table(table, folder / "data.parquet", row_group_size=BATCH)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", default="A10")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0, help="requests a second for latencies; 0: 70 % of the peak")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--swap", type=float, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))


def trained(folder: Path, bench: str) -> tuple[str, Callable[[int], str], dict[str, list[Any]]]:
    """A published run, what trains it up to a step, and the columns that it was trained on."""
    (folder / "data").mkdir()
    table = write_data(folder / "data", bench)
    job = JobReference(
        function="benchmarks.serve:serve_job", arguments={"folder": str(folder / "data"), "bench": bench}
    )

    def train(steps: int) -> str:
        # What training says of itself is not the line that this prints.
        with redirect_stdout(sys.stderr):
            return _fit(job, folder, steps)

    run = train(4)
    subprocess.run([sys.executable, "-m", "podembed", "publish", run], check=True, stdout=subprocess.PIPE, cwd=ROOT)
    return run, train, {name: table.column(name).to_pylist() for name in table.column_names if name != "label"}


def _fit(job: JobReference, folder: Path, steps: int) -> str:
    """The path of the run."""
    checkpoint = CheckpointConfig(every_steps=1000, full_every=20)
    trainer = Trainer(
        job,
        scaling_config=ScalingConfig(num_hosts=1, in_process=True, threads_per_host=1),
        run_config=RunConfig(name="run", storage_path=str(folder), max_steps=steps, checkpoint_config=checkpoint),
    )
    return trainer.fit().path


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run, train, columns = trained(folder, options.bench)
    bodies = [body_of(columns, at, options.samples) for at in range(NUM_BODIES)]
    rates = {"in_process": in_process(run, options.samples), "lookups": lookups(run, bodies)}
    pointers = held_back(run, train, int(2 * options.seconds / options.swap) + 1) if options.swap else []
    with ExitStack() as stack:
        shards = [
            stack.enter_context(serving(run, ["--shard", f"{at}/{options.shards}"])) for at in range(options.shards)
        ]
        flags = ["--workers", str(options.workers)]
        flags += ["--shards", *(address for _, _, address in shards)] if shards else []
        pids, loaded, address = stack.enter_context(serving(run, flags))
        pids += [pid for own, _, _ in shards for pid in own]
        said = {"bench": options.bench, "samples": options.samples, "workers": options.workers, "loaded": loaded}
        return said | ask(pids, address, bodies, pointers, rates, options)


@contextmanager
def serving(run: str, flags: list[str]) -> Iterator[tuple[list[int], str, str]]:
    """The processes of a server, what it says of its version, and its address."""
    command = [sys.executable, "-m", "podembed", "serve", run, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            loaded, address = (server.stdout.readline() for _ in range(2))
            workers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="utf-8").split()
            yield [server.pid, *map(int, workers)], loaded.strip(), address.split()[2]
        finally:
            server.terminate()
            server.wait(30)


def body_of(columns: dict[str, list[Any]], at: int, samples: int) -> bytes:
    """One context and many candidates, as columns in JSON."""
    body = {}
    for number, (name, values) in enumerate(columns.items()):
        is_context = number < NUM_DENSE + len(CONTEXT)
        start = at * samples
        body[name] = [values[start]] if is_context else values[start : start + samples]
    return json.dumps(body).encode()


def in_process(run: str, samples: int) -> float:
    """Samples a CPU second of the model of `podembed predict` with rows in memory, `samples` at a time."""
    from podembed.serving.predict.batches import read_batches
    from podembed.serving.predict.committed_model import CommittedRows, open_model
    from podembed.serving.predict.pooled_rows import PooledRows
    from podembed.serving.predict.portable_forward import PortableForward
    from podembed.serving.predict.predicted_rows import rows_in_order, unlabelled, with_all
    from podembed.serving.predict.trained_forward import SCORED_PARTS

    model = open_model(run)
    forward = PortableForward(model.job, model.dense(SCORED_PARTS), step=model.state.manifest.step)
    rows = PooledRows(model.job, CommittedRows(model), is_padded=True)
    declared = unlabelled(
        model.job.resolved_data, model.job.resolved_data.paths, features=tuple(model.job.features), columns=()
    )
    index, plan = rows_in_order(model, declared, batch_size=max(samples, 64), out="none.parquet")
    batches = read_batches(declared, index, plan)
    found = []
    for _ in range(20):
        one = rows.find(with_all(next(batches), model.job))
        found.append(one)
    rows.fetch(found)
    names = tuple(model.job.features)

    def once() -> None:
        for one in found:
            forward.outputs(rows.look_up(one), names, samples)

    once()
    rates = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(5):
            once()
        rates.append(5 * len(found) * samples / (time.process_time() - began))
    return statistics.median(rates)


def lookups(run: str, bodies: list[bytes]) -> float:
    """Rows that a server finds and pools, in a CPU second."""
    from podembed.serving.server.replica import Replica
    from podembed.workers.storage.store import Store

    replica = Replica(Store(run), most_samples=512)
    replica.follow()
    with replica.use() as version:
        model = version.model
        requests = [model.read(json.loads(body), with_context=True) for body in bodies]
        bags = [pair for one in requests for pair in zip(model.manifest["features"], one.bags, strict=True)]
        rates = []
        for _ in range(6):
            began = time.process_time()
            for feature, bag in bags:
                model.looked_up(feature, *bag)
            rates.append(sum(len(bag[0]) for _, bag in bags) / (time.process_time() - began))
    return statistics.median(rates)


def ask(
    pids: list[int],
    address: str,
    bodies: list[bytes],
    pointers: list[tuple[Path, Path]],
    rates: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    request = urllib.request.Request(f"{address}/score", bodies[0], {"Content-Type": "application/json"})
    assert len(json.load(urllib.request.urlopen(request))["score"]) == options.samples
    ends, swaps = threading.Event(), []
    swapper = threading.Thread(target=swap, args=(address, pointers, options.swap, ends, swaps))
    swapper.start()
    found = asked(pids, f"{address}/score", bodies, options)
    found |= latencies(f"{address}/score", bodies[0], options.rate or 0.7 * found["requests_s"], options)
    ends.set()
    swapper.join()
    if options.swap:
        found["swap_s"] = swaps
    own = found["samples_per_cpu_s"]
    return found | {
        "in_process_samples_per_cpu_s": round(rates["in_process"]),
        "ratio": round(own / rates["in_process"], 3),
        "rows_per_cpu_s": round(rates["lookups"]),
    }


def asked(pids: list[int], url: str, bodies: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """What wrk says of a server with these processes, which it asks as fast as it gets answers."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "ask.lua")
        script.write_text(lua(bodies), encoding="utf-8")
        command = [
            "wrk",
            "-t1",
            f"-c{options.connections}",
            f"-d{int(options.seconds)}s",
            "--latency",
            "-s",
            str(script),
            url,
        ]
        before = sum(cpu_s(pids).values())
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return parsed(out, sum(cpu_s(pids).values()) - before, options)


def lua(bodies: list[bytes]) -> str:
    """A script for wrk, which asks with one body after another."""
    listed = ",\n".join(f"[==[{body.decode()}]==]" for body in bodies)
    return (
        f"local bodies = {{{listed}}}\nlocal at = 0\n"
        'request = function()\n  at = at % #bodies + 1\n  return wrk.format("POST", nil, '
        '{["Content-Type"] = "application/json"}, bodies[at])\nend\n'
    )


def parsed(out: str, used: float, options: argparse.Namespace) -> dict[str, Any]:
    """What wrk says."""
    (requests,) = re.findall(r"(\d+) requests in", out)
    rate = float(re.findall(r"Requests/sec:\s+([\d.]+)", out)[0])
    refused = re.findall(r"Non-2xx or 3xx responses: (\d+)", out)
    return {
        "requests_s": round(rate, 1),
        "samples_s": round(rate * options.samples),
        "samples_per_cpu_s": round(int(requests) * options.samples / used),
        "cpu_ms_a_request": round(used / int(requests) * 1e3, 3),
        "refused": int(refused[0]) if refused else 0,
        "peak_p50": re.findall(r"\n +50%\s+(\S+)", out)[0],
        "peak_p99": re.findall(r"\n +99%\s+(\S+)", out)[0],
    }


def latencies(url: str, body: bytes, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """In ms, of requests that do not wait for the answers to others."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(body)
        file.flush()
        command = [sys.executable, "benchmarks/open_loop.py", url, file.name, "--rate", str(rate)]
        command += ["--seconds", str(options.seconds)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    return {f"open_{name}": value for name, value in found.items()}


def held_back(run: str, train: Callable[[int], str], count: int) -> list[tuple[Path, Path]]:
    """Publishes further versions and takes their pointers away. Where each lies and where it belongs, in order."""
    command = [sys.executable, "-m", "podembed", "publish", run, "--keep", str(count + 1)]
    for step in range(5, 5 + count):
        train(step)
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    aside = Path(run).parent / "pointers"
    aside.mkdir()
    found = [(aside / file.name, file) for file in sorted(Path(run, "publish/pointers").iterdir())[1:]]
    for away, here in found:
        here.rename(away)
    return found


def swap(
    address: str, pointers: list[tuple[Path, Path]], seconds: float, ends: threading.Event, swaps: list[float]
) -> None:
    """Offers one version after another, and appends how long each took to answer."""
    for away, here in pointers:
        if ends.wait(seconds):
            return
        away.rename(here)
        began_s = time.monotonic()
        while f"podembed_serve_pointer {int(here.stem)}.0" not in _text(f"{address}/metrics"):
            time.sleep(0.05)
        swaps.append(round(time.monotonic() - began_s, 2))


def _text(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    main()
