"""Real processes of serving, killed at random while clients ask: workers over shared memory, shards with a process that
scores, publishers.

Each answer must be the score of `podembed predict` for the commit that it names, or a refusal in words.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil

from podembed.orchestrator.commit.published import commit_of_version
from tests.serving.campaign.schedule import Base

_START_S, _AFTER_S = 120.0, 60.0


class Served:
    """A process that is started again when it was killed. Mutated by its thread.

    Attributes:
      process: the one that runs.
    """

    def __init__(self, flags: Sequence[str], folder: Path) -> None:
        self._command = [sys.executable, "-m", "podembed", *flags]
        self._log = (folder / "log.txt").open("ab")
        self._ends = threading.Event()
        self.process = self._started()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            kill(pid)
        self.process.wait()
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=environment)

    def _watch(self) -> None:
        while not self._ends.wait(0.1):
            if self.process.poll() is not None:
                self.process = self._started()


def children_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Client:
    """Asks one server all the time. Mutated by its thread.

    Attributes:
      counts: answers by kind.
      wrong: what no client should get.
    """

    def __init__(self, base: Base, port: int) -> None:
        self._base, self._url = base, f"http://127.0.0.1:{port}/score"
        columns = {name: values for name, values in base.columns.items() if name not in ("label", "sample_id")}
        self._body = json.dumps(columns).encode()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.last = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask_all, daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _ask_all(self) -> None:
        while not self._ends.wait(0.02):
            try:
                with urllib.request.urlopen(self._url, self._body, timeout=30) as answer:
                    found = json.load(answer)
                commit = commit_of_version(found["model_version"]) or ""
                is_right = np.array(found["score"], np.float32).tobytes() == self._base.answers[commit]
                self.counts["right" if is_right else "wrong"] += 1
                self.last = commit
                if not is_right:
                    self.wrong.append(f"other scores of {commit}")
            except urllib.error.HTTPError as error:
                words = error.read().decode()
                self.counts[f"status {error.code}"] += 1
                if error.code != 503 or "Expected" not in words:
                    self.wrong.append(f"{error.code}: {words}")
            except OSError:
                # Of a process that is not there.
                self.counts["no connection"] += 1


def run_kills(base: Base, folder: Path, *, kills: int, seed: int, ports: Sequence[int]) -> dict[str, object]:
    """Kills processes, then sees whether all go on.

    Args:
      ports: four free ones.

    Raises:
      AssertionError: an answer is wrong, or something does not go on.
    """
    choose, run = random.Random(seed), str(base.run)
    many, scorer, *shards = ports
    urls = [f"http://127.0.0.1:{port}" for port in shards]
    publish(base, base.commits[0]).wait()
    killed: Counter[str] = Counter()
    with ExitStack() as stack:
        start = [
            Served(["serve", run, "--workers", "2", "--port", str(many)], folder),
            Served(["serve", run, "--shards", *urls, "--port", str(scorer)], folder),
            *(
                Served(["serve", run, "--shard", f"{at}/{len(shards)}", "--port", str(port)], folder)
                for at, port in enumerate(shards)
            ),
        ]
        served = [stack.enter_context(one) for one in start]
        clients = [stack.enter_context(Client(base, port)) for port in (many, scorer)]
        until(lambda: all(client.counts["right"] for client in clients), _START_S, "an answer of each server")
        while sum(killed.values()) < kills:
            publisher = publish(base, choose.choice(base.commits))
            time.sleep(choose.uniform(0.2, 4.0))
            victim = choose.choice(("publisher", "worker", "teller", "scorer", "shard"))
            pids = {
                "publisher": [publisher.pid] if publisher.poll() is None else [],
                "worker": children_of(served[0].process.pid),
                "teller": [served[0].process.pid],
                "scorer": [served[1].process.pid],
                "shard": [choose.choice(served[2:]).process.pid],
            }[victim]
            if pids:
                kill(choose.choice(pids))
                killed[victim] += 1
            publisher.wait()
        publish(base, base.commits[-1]).wait()
        until(lambda: {client.last for client in clients} == {base.commits[-1]}, _AFTER_S, "the last version of all")
        wrong = [one for client in clients for one in client.wrong]
        assert not wrong, wrong[:5]
        found = {"workers": dict(clients[0].counts), "shards": dict(clients[1].counts)}
    return {"killed": dict(killed), **found}


def publish(base: Base, commit: str) -> subprocess.Popen[bytes]:
    """Starts to offer a commit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "podembed", "publish", str(base.run), "--commit", commit]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def until(found: Callable[[], bool], seconds: float, what: str) -> None:
    """Raises:
    AssertionError: it does not come.
    """
    end_s = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end_s, f"Found no {what} within {seconds:g} s."
        time.sleep(0.1)
