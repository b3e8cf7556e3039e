"""Every interleaving of several drivers, explored state by state with the functions that the real drivers run.

The storage is modelled as sets; each action of `lease_protocol` is one atomic step, so two listings of one driver may
see different times. A driver that crashes or stalls for ever is one that is not scheduled any more, which the
exploration contains; one that restarts is another driver. Assumed, and probed on real storage: creation is exclusive,
and a listing shows what was created before it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from podembed.orchestrator.commit.lease_protocol import Base, DriverState, LeasePhase, after, head, lineage, propose
from podembed.orchestrator.commit.manifest import commit_name, parse_commit_name
from tests.long_tests import is_long

After = Callable[[DriverState, object], DriverState]


@dataclass(frozen=True, slots=True)
class Storage:
    """What all drivers share. `parents` holds (commit, parent) of every commit ever published; `commits` what is still
    there.
    """

    claims: frozenset[int] = frozenset()
    bases: frozenset[Base] = frozenset()
    commits: frozenset[str] = frozenset()
    parents: frozenset[tuple[str, str | None]] = frozenset()
    acknowledged: frozenset[str] = frozenset()

    @property
    def newest_base(self) -> Base | None:
        return max(self.bases, key=lambda base: base.generation, default=None)


@dataclass(frozen=True, slots=True)
class Driver:
    """One driver: where it is, how many commits it still wants, and what it plans to delete."""

    state: DriverState
    commits_left: int
    condemned: tuple[str, ...] = ()


World = tuple[Storage, tuple[Driver, ...]]


def act(storage: Storage, state: DriverState) -> tuple[Storage, object]:
    """Carries out the action that is due, on the model. Returns the storage afterwards and the answer."""
    generation, newest = state.generation, storage.newest_base
    match state.phase:
        case LeasePhase.LIST_CLAIMS | LeasePhase.CONFIRM_CLAIM | LeasePhase.CONFIRM_COMMIT:
            return storage, storage.claims
        case LeasePhase.CLAIM:
            return replace(storage, claims=storage.claims | {generation}), generation not in storage.claims
        case LeasePhase.READ_BASE:
            return storage, newest
        case LeasePhase.LIST_COMMITS:
            return storage, storage.commits
        case LeasePhase.CHOOSE_BASE:
            return storage, state.head
        case LeasePhase.CREATE_BASE:
            taken = any(base.generation == generation for base in storage.bases)
            base = Base(generation, state.head)
            return (storage, False) if taken else (replace(storage, bases=storage.bases | {base}), True)
        case LeasePhase.PUBLISH:
            assert state.pending is not None
            if state.pending in storage.commits:
                return storage, False
            commits, parents = storage.commits | {state.pending}, storage.parents | {(state.pending, state.head)}
            return replace(storage, commits=commits, parents=parents), True
        case LeasePhase.ACKNOWLEDGE:
            assert state.pending is not None
            return replace(storage, acknowledged=storage.acknowledged | {state.pending}), None
    raise AssertionError(state.phase)


def moves(storage: Storage, driver: Driver, after: After, keep: int | None) -> Iterator[tuple[Storage, Driver]]:
    """What this driver can do next."""
    state = driver.state
    if state.phase is LeasePhase.FENCED:
        return
    if driver.condemned:
        # The manifests planned for deletion go one by one; between any two everybody else may act.
        gone, *rest = driver.condemned
        yield replace(storage, commits=storage.commits - {gone}), replace(driver, condemned=tuple(rest))
    if state.phase is LeasePhase.READY:
        if driver.commits_left:
            step = (parse_commit_name(state.head or "") or (0, 0))[0] + 1
            proposed = propose(state, commit_name(step=step, generation=state.generation))
            yield storage, replace(driver, state=proposed, commits_left=driver.commits_left - 1)
        return
    changed, answer = act(storage, state)
    moved = replace(driver, state=after(state, answer))
    if keep is not None and state.phase is LeasePhase.ACKNOWLEDGE:
        chain = ancestors(changed, moved.state.head)
        moved = replace(moved, condemned=tuple(name for name in reversed(chain[keep:]) if name in changed.commits))
    yield changed, moved


def ancestors(storage: Storage, newest: str | None) -> list[str]:
    """The commit and those before it, along the recorded parents."""
    parents, chain = dict(storage.parents), []
    while newest is not None:
        chain.append(newest)
        newest = parents[newest]
    return chain


@functools.cache
def violation(storage: Storage) -> str | None:
    """What the protocol promises, checked in one state."""
    newest = storage.newest_base
    chain = ancestors(storage, head(newest, storage.commits))
    if lost := storage.acknowledged - set(chain):
        return f"acknowledged commit lost: {sorted(lost)}"
    latest = next((name for name in chain if name in storage.acknowledged), None)
    if latest is not None and latest not in storage.commits:
        return f"the newest acknowledged commit was deleted: {latest}"
    starts = [(parent, parse_commit_name(name)[1]) for name, parent in storage.parents]  # pyright: ignore
    if len(set(starts)) != len(starts):
        return "a generation forked"
    bases = {base.generation: base.commit for base in storage.bases}
    counting = lineage(newest, storage.commits, bases.__getitem__)
    if counting != tuple(name for name in chain if name in storage.commits or name == chain[0]):
        return f"the lineage by names {counting} is not the one by parents {chain}"
    return None


def explore(
    *,
    drivers: int,
    commits: int,
    keep: int | None = None,
    after: After = after,
    start: LeasePhase = LeasePhase.LIST_CLAIMS,
):
    """Breadth first over all reachable states, drivers being interchangeable. Returns (number of states, violation or
    None).
    """
    first = Driver(state=DriverState(phase=start), commits_left=commits)
    initial: World = (Storage(), (first,) * drivers)
    seen, todo = {initial}, deque([initial])
    while todo:
        storage, everybody = todo.popleft()
        if found := violation(storage):
            return len(seen), found
        for at, driver in enumerate(everybody):
            if at and driver == everybody[at - 1]:
                continue
            for changed, moved in moves(storage, driver, after, keep):
                others = (*everybody[:at], *everybody[at + 1 :], moved)
                world = (changed, tuple(sorted(others, key=_order)))
                if world not in seen:
                    seen.add(world)
                    todo.append(world)
    return len(seen), None


@functools.cache
def _order(driver: Driver) -> str:
    return repr(driver)


def base_before_claim(state: DriverState, answer: object) -> DriverState:
    """The tempting order: look for the newest commit first, then claim and start from it."""
    moved = after(state, answer)
    if state.phase is LeasePhase.CHOOSE_BASE:
        return replace(moved, phase=LeasePhase.LIST_CLAIMS)
    if state.phase is LeasePhase.CLAIM:
        return replace(moved, phase=LeasePhase.CREATE_BASE if answer else LeasePhase.READ_BASE)
    return moved


def no_check_before_acknowledging(state: DriverState, answer: object) -> DriverState:
    """Trusts that publishing was enough."""
    moved = after(state, answer)
    return replace(moved, phase=LeasePhase.ACKNOWLEDGE) if state.phase is LeasePhase.CONFIRM_COMMIT else moved


@pytest.mark.parametrize(
    ("drivers", "commits", "keep"),
    [(1, 3, 1), (2, 2, None), (2, 4, 2), (3, 1, None), (3, 2, 1)],
    ids=lambda value: str(value),
)
def test_no_acknowledged_commit_is_ever_lost(drivers: int, commits: int, keep: int | None) -> None:
    states, found = explore(drivers=drivers, commits=commits, keep=keep)
    assert found is None
    assert states > 20 * drivers


@is_long
@pytest.mark.parametrize(("drivers", "commits", "keep"), [(3, 2, None), (4, 1, None)])
def test_no_acknowledged_commit_is_ever_lost_by_more_drivers(drivers: int, commits: int, keep: int | None) -> None:
    states, found = explore(drivers=drivers, commits=commits, keep=keep)
    assert found is None
    assert states > 2000


def test_choosing_the_base_before_claiming_loses_an_acknowledged_commit() -> None:
    _, found = explore(drivers=2, commits=1, after=base_before_claim, start=LeasePhase.READ_BASE)
    assert found is not None
    assert found.startswith("acknowledged commit lost")


def test_acknowledging_without_a_look_at_the_claims_loses_a_commit() -> None:
    _, found = explore(drivers=2, commits=1, after=no_check_before_acknowledging)
    assert found is not None
    assert found.startswith("acknowledged commit lost")
