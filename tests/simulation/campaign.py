"""Many seeds, one after the other or in several processes, and a table of what happened to them.

python -m tests.simulation --seeds 1000
python -m tests.simulation --seed 17 --log
python -m tests.simulation --seeds 300 --mutation base_before_claim
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.mutations import MUTATIONS
from tests.simulation.schedule import ACTIONS, Schedule, draw
from tests.simulation.simulation import Outcome, simulate

SHOWN_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A seed that broke something, and what."""

    seed: int
    kind: str
    message: str


@dataclass(slots=True)
class Tally:
    """Sums over seeds. Mutated by `add`."""

    struck: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    most_lost_steps: int = 0
    failed: list[Failed] = field(default_factory=list)

    def add(self, outcome: Outcome | Failed) -> None:
        self.totals["seeds"] += 1
        if isinstance(outcome, Failed):
            self.failed.append(outcome)
            return
        self.struck += outcome.struck
        self.endings += outcome.endings
        self.totals["generations"] += outcome.num_generations
        self.totals["commits"] += outcome.num_commits
        self.totals["acknowledged"] += outcome.num_acknowledged
        self.totals["deletions"] += outcome.num_deletions
        self.totals["survivors"] += outcome.num_survivors
        self.totals["buckets kept"] += outcome.buckets_kept
        self.totals["buckets wrong"] += outcome.buckets_wrong
        self.totals["buckets moved"] += outcome.buckets_moved
        self.totals["events"] += outcome.num_events
        self.totals["simulated hours"] += round(outcome.seconds)
        self.most_lost_steps = max(self.most_lost_steps, outcome.most_lost_steps)


def run_seed(seed: int) -> Outcome | Failed:
    """One seed. An error of any kind is a failure of the seed, so that the others still run."""
    try:
        return simulate(draw(seed))
    except Exception as error:
        return Failed(seed=seed, kind=type(error).__name__, message=str(error))


def run_seeds(seeds: Sequence[int], *, num_processes: int) -> Iterator[Outcome | Failed]:
    """All seeds, in order."""
    if num_processes == 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes, _stay_on_one_core) as pool:
        yield from pool.imap(run_seed, seeds, chunksize=10)


def _stay_on_one_core() -> None:
    """Threads take turns; handing over is faster where nothing has to be woken on another core."""
    cores = sorted(os.sched_getaffinity(0))
    number = multiprocessing.current_process()._identity[0] if multiprocessing.current_process()._identity else 0
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def smallest(schedule: Schedule) -> Schedule:
    """The schedule without the faults that its failure does not need."""
    at = 0
    while at < len(schedule.faults):
        fewer = schedule.without(at)
        try:
            simulate(fewer)
            at += 1
        except Exception:
            schedule = fewer
    return schedule


def render(tally: Tally, *, wall_s: float, seeds: Sequence[int]) -> str:
    """Text of a campaign."""
    totals = tally.totals
    lines = [
        f"seeds {seeds[0]} to {seeds[-1]}: {totals['seeds'] - len(tally.failed)} green, {len(tally.failed)} failed, in "
        f"{wall_s:.1f} s "
        f"({totals['seeds'] / wall_s:.1f} seeds/s), {totals['simulated hours'] / 3600:.1f} simulated hours",
        f"generations {totals['generations']}, commits {totals['commits']} ({totals['acknowledged']} acknowledged), "
        "files deleted "
        f"{totals['deletions']}, most steps lost to one fault {tally.most_lost_steps}, events {totals['events']}",
        f"hosts that lived on {totals['survivors']}, with {totals['buckets kept']} buckets; buckets found wrong and "
        "read "
        f"{totals['buckets wrong']}; buckets that came from another host {totals['buckets moved']}",
        "checked in each: I1 I2 I3 I4 I5 I6 I8 I9 I10 I11 I12 I13 I15 I18 I19, see docs/simulation.md",
        "faults that struck:",
        *(f"  {tally.struck[action]:6}  {action}: {what}" for action, what in ACTIONS.items()),
        "drivers ended:",
        *(f"  {count:6}  {ending}" for ending, count in tally.endings.most_common()),
    ]
    for failed in tally.failed[:SHOWN_FAILURES]:
        first = failed.message.splitlines()[0] if failed.message else ""
        lines += [f"FAILED seed {failed.seed}: {failed.kind}: {first[:300]}", f"  make simulate SEED={failed.seed}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one alone, with what happened")
    parser.add_argument("--schedule", type=Path, help="replay a schedule that was kept in a file")
    parser.add_argument(
        "--smallest", action="store_true", help="of --seed: leave out the faults that its failure does not need"
    )
    parser.add_argument("--keep", type=Path, help="of --seed: write the schedule to this file")
    parser.add_argument("--mutation", choices=[*MUTATIONS], help="with the code broken on purpose")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    with MUTATIONS[options.mutation]() if options.mutation else nullcontext():
        if options.schedule is not None:
            schedule = Schedule.from_json(options.schedule.read_text())
            return _replay(schedule, finds_smallest=options.smallest, keep=options.keep)
        if options.seed is not None:
            return _replay(draw(options.seed), finds_smallest=options.smallest, keep=options.keep)
        seeds = range(options.first, options.first + options.seeds)
        started, tally = time.monotonic(), Tally()
        for outcome in run_seeds(seeds, num_processes=1 if options.mutation else options.processes):
            tally.add(outcome)
    print(render(tally, wall_s=time.monotonic() - started, seeds=seeds))
    return 1 if tally.failed else 0


def _replay(schedule: Schedule, *, finds_smallest: bool, keep: Path | None) -> int:
    if finds_smallest:
        schedule = smallest(schedule)
    if keep is not None:
        keep.write_text(schedule.to_json() + "\n")
    print(schedule)
    try:
        outcome = simulate(schedule, keeps_log=True)
    except Exception as error:
        print(*getattr(error, "__notes__", ()), sep="\n")
        print(f"{type(error).__name__}: {error}")
        return 1
    print(*outcome.log, sep="\n")
    return 0
