"""Three real driver processes that fight for one run on a real disk, round after round, and what their history must
look like afterwards.

    python -m tests.orchestrator.commit.races.lease_races --rounds 200

A round of a driver is a life: it claims the next generation, taking the run over from whoever has it, commits a few
times and acknowledges, until it is through or finds itself fenced. The three go on without waiting for each other, so
claims, bases and commits meet in all orders.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podembed.orchestrator.api.run_errors import EXIT_FENCED
from podembed.orchestrator.commit.lease_files import read_base, read_claims, read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store

ROOT = Path(__file__).parents[4]
NUM_DRIVERS = 3
COMMITS_PER_LIFE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Races:
    """What was left behind. `num_fenced`: generations that another driver ended before they were through."""

    num_generations: int
    num_acknowledged: int
    num_counting: int
    num_fenced: int


def start(url: Path, rounds: int, commits: int, *options: str) -> subprocess.Popen[str]:
    """One driver process; see `racing_driver`."""
    command = [
        sys.executable,
        "-m",
        "tests.orchestrator.commit.races.racing_driver",
        str(url),
        str(rounds),
        str(commits),
        *options,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], *, timeout_s: float = 120.0) -> list[str]:
    """What it acknowledged."""
    out, errors = process.communicate(timeout=timeout_s)
    assert process.returncode in (0, EXIT_FENCED), errors
    return out.split()


def race(url: Path, *, rounds: int, timeout_s: float) -> Races:
    """Lets the drivers fight for so many rounds each, and checks that there is one history with all that was
    acknowledged.

    Raises:
      AssertionError: there is not.
    """
    processes = [start(url, rounds, COMMITS_PER_LIFE, "together") for _ in range(NUM_DRIVERS)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        # Now that all are there, so that they meet.
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        acknowledged = [name for process in processes for name in finish(process, timeout_s=timeout_s)]
    finally:
        for process in processes:
            process.kill()
    store = Store(url)
    lineage, claims = read_lineage(store), read_claims(store)
    assert set(acknowledged) <= set(lineage), sorted(set(acknowledged) - set(lineage))
    assert len(acknowledged) == len(set(acknowledged))
    assert len(acknowledged) >= COMMITS_PER_LIFE, "the last driver always gets through"
    assert claims == list(range(1, len(claims) + 1))
    assert len(claims) >= NUM_DRIVERS * rounds
    order = [parse_commit_name(name) for name in lineage]
    assert order == sorted(order, reverse=True)  # pyright: ignore[reportArgumentType]
    for generation in claims:
        _check_base(store, generation, lineage)
    assert not [file for file in os.listdir(url / "lease") if file.startswith(".tmp")]
    through = {parse_commit_name(name)[1]: 0 for name in lineage}  # type: ignore[index]
    for name in acknowledged:
        through[parse_commit_name(name)[1]] += 1  # type: ignore[index]
    whole = sum(count == COMMITS_PER_LIFE for count in through.values())
    return Races(
        num_generations=len(claims),
        num_acknowledged=len(acknowledged),
        num_counting=len(lineage),
        num_fenced=len(claims) - whole,
    )


def _check_base(store: Store, generation: int, lineage: Sequence[str]) -> None:
    """A generation of the lineage starts from a commit of the lineage: nothing forks off."""
    own = [name for name in lineage if (parse_commit_name(name) or (0, 0))[1] == generation]
    try:
        base = read_base(store, generation).commit
    except NameNotFound:
        assert not own, f"generation {generation} has commits and no base"
        return
    assert not own or base is None or base in lineage, f"generation {generation} forks off at {base}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="lives of each driver")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="podembed-races-") as folder:
        started = time.monotonic()
        races = race(Path(folder) / "run", rounds=rounds, timeout_s=60.0 + 3.0 * rounds)
        seconds = time.monotonic() - started
    print(
        f"{rounds} rounds of {NUM_DRIVERS} drivers in {seconds:.1f} s: {races.num_generations} generations, "
        f"{races.num_fenced} of them fenced; "
        f"{races.num_acknowledged} commits acknowledged, {races.num_counting} count, in one history"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
