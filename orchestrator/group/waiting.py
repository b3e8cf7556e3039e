"""Who holds up whom when a group of workers finishes nothing: pure functions over what the workers last said of
themselves.

A host that waits in an exchange names the hosts whose frame has not come. While its device process computes, it names
that one. A device process that has nothing to do names its host. Following these names leads to a worker that waits for
no other. It is at fault, whatever the others' phases are. Workers that wait for each other in a circle have lost what
one sent the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.workers.liveness.progress import Progress
from podembed.workers.liveness.worker import Worker

MAX_NAMED = 4


def blocked(progress: Mapping[Worker, Progress], workers: Sequence[Worker], *, timeout_s: float) -> list[Failure]:
    """The failures of a group that has finished nothing for `timeout_s`, those at fault first.

    Args:
      progress: last status of each worker; those missing have never answered.
      workers: workers that still have work to do.

    Returns:
      One failure a worker: HUNG for those at fault, PEER for those that only wait for them.
    """
    waits = {worker: _known(progress, worker) for worker in workers}
    circles = _circles(waits)
    guilty = [worker for worker in workers if not waits[worker]] or sorted(circles)
    failures = []
    for worker in workers:
        is_guilty = worker in guilty
        failures.append(
            Failure(
                worker=worker,
                kind=FailureKind.HUNG if is_guilty else FailureKind.PEER,
                message=_sentence(progress, worker, waits, circles, timeout_s=timeout_s),
            )
        )
    return sorted(failures, key=lambda failure: failure.kind is not FailureKind.HUNG)


def severed(progress: Mapping[Worker, Progress], *, silent: Collection[Worker], unheard_s: float) -> list[Failure]:
    """The failures of hosts between whose machines nothing passes any more, the one at fault first; none where all hear
    each other.

    Args:
      silent: workers that leave a call of the driver unanswered; what they said last does not count.
      unheard_s: a shorter silence is none.
    """
    pairs = {
        (worker, Worker("host", other)): seconds
        for worker, state in progress.items()
        for other, seconds in state.unheard_s.items()
        if worker not in silent and seconds >= unheard_s
    }
    if not pairs:
        return []
    guilty = _most_cut_off(pairs, silent)
    seconds, witness = max((seconds, worker) for (worker, other), seconds in pairs.items() if guilty in (worker, other))
    other = witness if witness != guilty else next(b for a, b in pairs if a == guilty)
    why = (
        f"nothing has come over the network between {other} and {guilty} for {seconds:.0f} s, not even from the kernel "
        "of the other machine"
    )
    rest = sorted({worker for worker, _ in pairs} - {guilty})
    echoes = [Failure(worker=worker, kind=FailureKind.PEER, message=f"hears nothing from {guilty}") for worker in rest]
    return [Failure(worker=guilty, kind=FailureKind.HUNG, message=why), *echoes]


def charged(failures: Sequence[Failure]) -> Sequence[Failure]:
    """The failures. Where all only report other workers, and some name a machine without a sign of life, the host that
    most pairs lack is at fault.
    """
    pairs = [(failure.worker, other) for failure in failures for other in failure.unreached if failure.worker]
    if not pairs or any(failure.kind is not FailureKind.PEER for failure in failures):
        return failures
    guilty = _most_cut_off(pairs, ())
    witness = next(failure for failure in failures if guilty in (failure.worker, *failure.unreached))
    other = witness.unreached[0] if witness.worker == guilty else witness.worker
    why = f"found no way over the network between {other} and {guilty}. {witness.message}"
    return [replace(witness, worker=guilty, kind=FailureKind.HUNG, message=why), *failures]


def _most_cut_off(pairs: Collection[tuple[Worker, Worker]], silent: Collection[Worker]) -> Worker:
    """The host to be given up. That is one that the driver does not hear either, or else the one that most others lack.
    Among equals it is the one of the highest number.
    """
    others = Counter(host for pair in {tuple(sorted(pair)) for pair in pairs} for host in pair)
    return max(others, key=lambda host: (host in silent, others[host], host.number))


def _known(progress: Mapping[Worker, Progress], worker: Worker) -> tuple[Worker, ...]:
    return progress[worker].waits_for if worker in progress else ()


def _circles(waits: Mapping[Worker, Sequence[Worker]]) -> set[Worker]:
    """Workers from which following those that are waited for leads back to themselves."""

    def reaches(start: Worker) -> bool:
        seen: set[Worker] = set()
        todo = list(waits.get(start, ()))
        while todo:
            at = todo.pop()
            if at == start:
                return True
            if at not in seen:
                seen.add(at)
                todo += waits.get(at, ())
        return False

    return {worker for worker in waits if reaches(worker)}


def _sentence(
    progress: Mapping[Worker, Progress],
    worker: Worker,
    waits: Mapping[Worker, Sequence[Worker]],
    circles: set[Worker],
    *,
    timeout_s: float,
) -> str:
    if worker not in progress:
        return f"no answer for {timeout_s:.0f} s"
    own = progress[worker]
    place = _place(worker, own)
    if waits[worker]:
        others = list(waits[worker])
        named = ", ".join(_described(progress, other) for other in others[:MAX_NAMED])
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        mutual = [other for other in others if other in circles and worker in waits.get(other, ())]
        cut = f"; they wait for each other, so look at the network between {worker} and {mutual[0]}" if mutual else ""
        return f"has waited {own.phase_s:.0f} s in {place} for {named}{more}{cut}"
    waiters = [other for other, names in waits.items() if worker in names]
    behind = "" if not waiters else f"; {_described(progress, waiters[0], waits_for=worker)}"
    more = f" and {len(waiters) - 1} more wait for it" if len(waiters) > 1 else ""
    return f"nothing finished for {timeout_s:.0f} s; it is in {place} for {own.phase_s:.0f} s{behind}{more}"


def _described(progress: Mapping[Worker, Progress], worker: Worker, *, waits_for: Worker | None = None) -> str:
    """A worker and where it is, for the middle of a sentence about another one."""
    if worker not in progress:
        return f"{worker}, which does not answer"
    state = progress[worker]
    if waits_for:
        return f"{worker} has waited {state.phase_s:.0f} s in {_place(worker, state)} for {waits_for}"
    return f"{worker}, which is in {_place(worker, state)}"


def _place(worker: Worker, state: Progress) -> str:
    # Only hosts count steps; a device process does what its host announces.
    return f"{state.phase} of step {state.step}" if worker.is_host else state.phase
