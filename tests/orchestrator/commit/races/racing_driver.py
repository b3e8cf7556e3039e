"""A driver in a process of its own, for races and kills: claims, commits a few times, and says on stdout what it
acknowledged.

Usage: python -m tests.orchestrator.commit.races.racing_driver RUN ROUNDS COMMITS [pause | together]. With `pause`, it
stops itself (SIGSTOP) after publishing a commit and before looking at the claims. With `together`, it says that it is
up, and begins when a line comes in.
"""

from __future__ import annotations

import os
import signal
import sys

from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.manifest import commit_name, parse_commit_name
from podembed.workers.storage.store import Store


class PausingStore(Store):
    """Stops the process at the worst moment: the commit is published, the claims have not been read again."""

    def create_exclusive(self, name: str, data: bytes) -> bool:
        answer = super().create_exclusive(name, data)
        if name.startswith("commit/"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return answer


def drive(store: Store, num_commits: int) -> None:
    """One life of a driver. Prints each acknowledged commit."""
    lease = acquire(store, holder=Holder.current(f"driver-{os.getpid()}"), take_over=True)
    for _ in range(num_commits):
        step, _ = parse_commit_name(lease.head or "") or (0, 0)
        name = commit_name(step=step + 1, generation=lease.generation)
        lease.publish(name, b"{}")
        print(name, flush=True)


def main() -> int:
    _, url, rounds, num_commits, *options = sys.argv
    if "together" in options:
        print("up", flush=True)
        sys.stdin.readline()
    store = PausingStore(url) if "pause" in options else Store(url)
    fenced = 0
    for _ in range(int(rounds)):
        try:
            drive(store, int(num_commits))
        except Fenced as error:
            fenced = error.exit_code
    return fenced if int(rounds) == 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
