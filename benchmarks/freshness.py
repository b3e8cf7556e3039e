"""How old the newest sample is that an answer knows of: training, `publish --follow` and `serve` as real processes.

    python benchmarks/freshness.py --commit-seconds 4 --commits 12

The job `drift` is trained: each of its days brings new items. For each commit, `trained` is the moment at which its
last step was done and the save began, `committed` when the driver said so, and `answered` when the server first
answered with a version of that step or a later one. It is asked every 20 ms. `newest_sample_s` is from `trained` to
`answered`. `any_sample_s` is the same of all samples, most of which were trained earlier, but after the commit before.

After each new version the server is asked about the most frequent new item of the last day of which the commit has seen
enough, and about that of the next day. It must know the first and not the second, which its counter of unknown ids
says. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from podembed.orchestrator.commit.published import recent_pointers  # noqa: E402
from podembed.workers.storage.store import Store  # noqa: E402

ASK_S = 0.02
# Small steps, so that a day takes some seconds.
BATCH = 64
SAMPLES_PER_DAY = 100_000
# Of a day, before its most frequent new item must be known, and before which the next day's cannot be.
SURE_SAMPLES = 20_000
DYNAMIC = "dynamic_items"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit-seconds", type=float, default=4.0, help="between two commits")
    parser.add_argument("--commits", type=int, default=12, help="that are measured")
    parser.add_argument(
        "--days", type=int, default=40, help="of the job, which is stopped when all commits are measured"
    )
    parser.add_argument("--cache", default="", help="folder for the data of the job, else made anew")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(Path(scratch), options)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run = folder / "runs" / "run"
    data = Path(options.cache or folder / "data")
    settings = {"cache": str(data), "days": options.days, "batch_size": BATCH, "models": ["dynamic"]}
    train = ["train", "--job", "drift", "--storage", str(run.parent), "--name", run.name, "--hosts", "1"]
    train += ["--checkpoint-seconds", str(options.commit_seconds), "--full-every", "20", "--log", "json"]
    train += ["--set", *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
    with process(train) as training:
        begun, committed = {}, {}
        reader = threading.Thread(target=read_commits, args=(training, begun, committed), daemon=True)
        reader.start()
        wait_for(lambda: len(committed) > 1, training)
        with process(["publish", str(run), "--follow"]) as publishing:
            first_line(publishing, "is offered")
            with process(["serve", str(run), "--port", "0"]) as serving:
                address = first_line(serving, "answers at").split()[2]
                answered, keys = follow(address, data, committed, options, training)
        training.send_signal(signal.SIGINT)
        training.wait(60)
    # The version that the server began with does not count.
    steps = sorted(step for step in committed if step > min(answered))[: options.commits]
    moments = [min(at for step, at in answered.items() if step >= own) for own in steps]
    offers = {int(one.version[1:10]): one.unix_s for one in recent_pointers(Store(str(run)))}
    offered = [min(at for step, at in offers.items() if step >= own) for own in steps]
    starts = [max(at for step, at in begun.items() if step < own) for own in steps]
    # Training goes on at an even pace between two commits.
    ages = [
        moment - np.linspace(start, begun[step], 100)
        for step, start, moment in zip(steps, starts, moments, strict=True)
    ]
    gaps = [begun[step] - start for step, start in zip(steps, starts, strict=True)]
    any_sample = figures(np.concatenate(ages))
    return {
        "commits": len(steps),
        "versions": len(set(moments)),
        "commit_interval_s": figures(gaps),
        "newest_sample_s": figures([moment - begun[step] for step, moment in zip(steps, moments, strict=True)]),
        "any_sample_s": any_sample,
        "answered_after_committed_s": figures([at - committed[step] for step, at in zip(steps, moments, strict=True)]),
        "answered_after_offered_s": figures([at - offer for offer, at in zip(offered, moments, strict=True)]),
        "new_keys": dict(keys),
        "is_met": any_sample["p99"] <= figures(gaps)["p50"] + 5,
    }


def figures(seconds: list[float] | np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(np.max(seconds)), 2)}


@contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command of podembed, which is ended with the block."""
    command = [sys.executable, "-m", "podembed", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGINT)
                try:
                    started.wait(60)
                except subprocess.TimeoutExpired:
                    started.kill()


def read_commits(training: subprocess.Popen[str], begun: dict[int, float], committed: dict[int, float]) -> None:
    """Moments of each commit, by its step, in seconds since 1970."""
    assert training.stdout is not None
    for line in training.stdout:
        # The job prints tables of its own.
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "commit":
            values = event["values"]
            at_s = datetime.fromisoformat(event["time"]).timestamp()
            begun[values["step"]] = at_s - values["seconds"]
            committed[values["step"]] = at_s


def first_line(started: subprocess.Popen[str], words: str) -> str:
    assert started.stdout is not None
    for line in started.stdout:
        if words in line:
            # What comes later must not fill the pipe.
            threading.Thread(target=started.stdout.read, daemon=True).start()
            return line
    raise SystemExit(f"Found no line with {words!r}. Expected one. Try the command alone: {started.args}")


def wait_for(is_done: Any, training: subprocess.Popen[str]) -> None:
    while not is_done():
        if training.poll() is not None:
            raise SystemExit("Found training ended. Expected it to go on. Pass more --days.")
        time.sleep(ASK_S)


def follow(
    address: str, data: Path, committed: dict[int, float], options: argparse.Namespace, training: Any
) -> tuple[dict[int, float], Counter[str]]:
    """When each step was answered with first, and what became of new keys."""
    example = json.load(urllib.request.urlopen(f"{address}/example"))
    answered: dict[int, float] = {}
    keys: Counter[str] = Counter()
    new_items: dict[int, int] = {}
    while True:
        version = ask(address, example)
        now_s = time.time()
        step = int(re.match(r"v(\d+)-", version)[1])  # pyright: ignore[reportOptionalSubscript]
        if step not in answered:
            answered[step] = now_s
            samples = step * BATCH
            day, within = divmod(samples, SAMPLES_PER_DAY)
            last = day if within >= SURE_SAMPLES else day - 1
            for number, is_known in ((last, True), (day + 1, False)):
                item = new_items.setdefault(number, new_item(data, number))
                unknown = unknown_ids(address)
                # Where another version has taken over meanwhile, its turn comes.
                if ask(address, {**example, "item": [item]}) == version:
                    is_right = (unknown_ids(address) == unknown) == is_known
                    keys[f"{'seen' if is_known else 'not seen yet'}, {'right' if is_right else 'WRONG'}"] += 1
            if len([one for one in committed if min(answered) < one <= step]) >= options.commits:
                return answered, keys
        if training.poll() is not None:
            raise SystemExit("Found training ended before all commits. Expected more. Pass more --days.")
        time.sleep(ASK_S)


def ask(address: str, columns: dict[str, Any]) -> str:
    """The version that answers."""
    request = urllib.request.Request(
        f"{address}/score", json.dumps(columns).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request))["model_version"]


def unknown_ids(address: str) -> float:
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    found = re.findall(rf'podembed_serve_unknown_ids_total{{table="{DYNAMIC}"}} (\S+)', text)
    return float(found[0]) if found else 0.0


def new_item(data: Path, day: int) -> int:
    """The most frequent item of a day that no day before had."""
    (folder,) = (path for path in data.iterdir() if path.is_dir())
    before: set[int] = set()
    for number in range(max(0, day - 1), day):
        before |= set(np.unique(pq.read_table(folder / f"day-{number:03d}.parquet").column("item").to_numpy()).tolist())
    items, counts = np.unique(
        pq.read_table(folder / f"day-{day:03d}.parquet").column("item").to_numpy(), return_counts=True
    )
    return int(next(items[at] for at in np.argsort(-counts) if items[at] not in before))


if __name__ == "__main__":
    main()
