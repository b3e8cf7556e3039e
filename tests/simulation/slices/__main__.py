"""Many schedules of slices, and a table of what happened.

python -m tests.simulation.slices --seeds 200
python -m tests.simulation.slices --seed 17
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulation.slices.simulation import EVENTS, draw, simulate


@dataclass(slots=True)
class SliceTally:
    """Sums over seeds. Mutated by `run`."""

    happened: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)

    def run(self, seed: int) -> None:
        self.totals["seeds"] += 1
        try:
            found = simulate(seed)
        except Exception as error:
            self.failed[seed] = f"{type(error).__name__}: {error}"
            return
        self.happened += found.happened
        self.endings += found.outcome.endings
        self.totals["generations"] += found.outcome.num_generations
        self.totals["survivors"] += found.outcome.num_survivors
        self.totals["buckets kept"] += found.outcome.buckets_kept
        self.totals["machines"] += found.num_lives
        self.totals["refused"] += found.num_refused

    def render(self, seconds: float) -> str:
        totals = self.totals
        lines = [
            f"{totals['seeds']} schedules of slices: {totals['seeds'] - len(self.failed)} green, {len(self.failed)} "
            f"failed, in {seconds:.1f} s; generations {totals['generations']}, machines {totals['machines']}, hosts "
            f"that lived on {totals['survivors']}, with {totals['buckets kept']} buckets; reservations refused "
            f"{totals['refused']}",
            *(f"  {self.happened[action]:6}  {action}: {what}" for action, what in EVENTS.items()),
            "drivers ended: " + ", ".join(f"{count} {ending}" for ending, count in self.endings.most_common()),
            *(f"FAILED seed {seed}: {why.splitlines()[0][:300]}" for seed, why in self.failed.items()),
        ]
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.slices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one alone, with what happened")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(options.seed)
    began_s, tally = time.monotonic(), SliceTally()
    for seed in range(options.first, options.first + options.seeds):
        tally.run(seed)
    print(tally.render(time.monotonic() - began_s))
    return 1 if tally.failed else 0


def _replay(seed: int) -> int:
    schedule, events = draw(seed)
    print(schedule, *events, sep="\n")
    try:
        print(*simulate(seed, keeps_log=True).outcome.log, sep="\n")
    except Exception as error:
        print(*getattr(error, "__notes__", ()), sep="\n")
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
