"""Who may commit, as pure functions: the steps that a driver takes to get a generation, to publish a commit and to
acknowledge it.

Safety rests on one primitive, that exactly one caller creates a name, and on the order of these steps. It rests neither
on clocks nor on killing a driver in time. A driver claims the next generation, and only then looks for the newest
commit. A driver that published looks for newer claims before it acknowledges the commit. So of two drivers, either the
newer sees the commit or the older sees the claim. `lease` carries the steps out on a store; the model checker in the
tests explores every interleaving of these same functions. Here is no I/O and no state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from podembed.orchestrator.commit.manifest import parse_commit_name


@dataclass(frozen=True, slots=True)
class Base:
    """The commit that a generation starts from; None at the beginning of a run."""

    generation: int
    commit: str | None


class LeasePhase(Enum):
    """The progress of a driver. In each phase but READY and FENCED exactly one action is due."""

    LIST_CLAIMS = "list claims"
    CLAIM = "claim"
    READ_BASE = "read base"
    LIST_COMMITS = "list commits"
    CHOOSE_BASE = "choose base"
    CREATE_BASE = "create base"
    CONFIRM_CLAIM = "confirm claim"
    READY = "ready"
    PUBLISH = "publish"
    CONFIRM_COMMIT = "confirm commit"
    ACKNOWLEDGE = "acknowledge"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class DriverState:
    """One driver between two actions.

    Attributes:
      generation: claimed, or about to be.
      base: the newest one seen, whose generation decides which commits count.
      head: the commit that the next one follows; None before the first.
      pending: the commit under way between PUBLISH and ACKNOWLEDGE.
    """

    phase: LeasePhase = LeasePhase.LIST_CLAIMS
    generation: int = 0
    base: Base | None = None
    head: str | None = None
    pending: str | None = None


def after(state: DriverState, answer: Any) -> DriverState:
    """The state after the due action was carried out with this answer.

    Answers by phase:

    * LIST_CLAIMS, CONFIRM_CLAIM and CONFIRM_COMMIT: the generations claimed.
    * CLAIM, CREATE_BASE and PUBLISH: whether we created the name.
    * READ_BASE: the base of the highest generation that has one, or None.
    * LIST_COMMITS: names.
    * CHOOSE_BASE: the name to start from, usually `state.head`.
    * ACKNOWLEDGE: nothing.

    Raises:
      ValueError: no action is due.
    """
    match state.phase:
        case LeasePhase.LIST_CLAIMS:
            return replace(state, phase=LeasePhase.CLAIM, generation=max(answer, default=0) + 1)
        case LeasePhase.CLAIM:
            return replace(state, phase=LeasePhase.READ_BASE if answer else LeasePhase.LIST_CLAIMS)
        case LeasePhase.READ_BASE:
            # A driver that was held up since its claim may meet the base of a newer driver. That must not become its
            # own base.
            is_late = answer is not None and answer.generation > state.generation
            return replace(state, phase=LeasePhase.FENCED if is_late else LeasePhase.LIST_COMMITS, base=answer)
        case LeasePhase.LIST_COMMITS:
            return replace(state, phase=LeasePhase.CHOOSE_BASE, base=None, head=head(state.base, answer))
        case LeasePhase.CHOOSE_BASE:
            # Who checks the commits reads the lineage anew, which may be that of a newer generation by now.
            is_late = answer is not None and _parsed(answer)[1] >= state.generation
            return replace(state, phase=LeasePhase.FENCED if is_late else LeasePhase.CREATE_BASE, head=answer)
        case LeasePhase.CREATE_BASE:
            return replace(state, phase=LeasePhase.CONFIRM_CLAIM if answer else LeasePhase.LIST_CLAIMS)
        case LeasePhase.CONFIRM_CLAIM:
            return replace(state, phase=_unless_fenced(state, answer, LeasePhase.READY))
        case LeasePhase.PUBLISH:
            return replace(state, phase=LeasePhase.CONFIRM_COMMIT if answer else LeasePhase.FENCED)
        case LeasePhase.CONFIRM_COMMIT:
            return replace(state, phase=_unless_fenced(state, answer, LeasePhase.ACKNOWLEDGE))
        case LeasePhase.ACKNOWLEDGE:
            return replace(state, phase=LeasePhase.READY, head=state.pending, pending=None)
    raise ValueError(
        f"No action is due in phase '{state.phase.value}'. Call `propose` when ready; start over when fenced."
    )


def propose(state: DriverState, name: str) -> DriverState:
    """Starts a commit that follows the head.

    Raises:
      ValueError: the driver is not ready, or the name is not a later commit of its generation. That steps grow within a
        generation is what lets `head` and `lineage` order commits by their names.
    """
    parsed, before = parse_commit_name(name), parse_commit_name(state.head or "")
    # A generation may commit the step it started from once more, under its own name.
    follows = parsed is not None and parsed[1] == state.generation and (before is None or parsed > before)
    if state.phase is not LeasePhase.READY or not follows:
        raise ValueError(
            f"Commit {name} in phase '{state.phase.value}' of generation {state.generation} after {state.head}. A "
            "ready driver and a later step of its own generation are expected: commit each step once, in order."
        )
    return replace(state, phase=LeasePhase.PUBLISH, pending=name)


def head(base: Base | None, commits: Iterable[str]) -> str | None:
    """The newest commit that counts: the last of the highest generation that has a base, else that generation's base.

    Commits of one generation come from one driver with growing steps, so their names order them. Commits of other
    generations count only if a base leads to them.
    """
    if base is None:
        return None
    own = _of_generation(base.generation, commits)
    return own[0] if own else base.commit


def lineage(base: Base | None, commits: Collection[str], base_of: Callable[[int], str | None]) -> tuple[str, ...]:
    """The commits that count, newest first: those of the highest generation, then those up to its base, and so on.

    Only bases and names are needed, so a damaged manifest cuts nothing. Names that were deleted by the keep policy are
    left out, except the head itself.

    Args:
      base: base of the highest generation that has one.
      base_of: generation → the commit it started from; asked only for generations that commits or bases name.
    """
    chain: list[str] = []
    oldest = min((_parsed(name)[1] for name in commits), default=0)
    last_step: int | None = None
    while base is not None:
        own = _of_generation(base.generation, commits)
        chain += [name for name in own if last_step is None or _parsed(name)[0] <= last_step]
        if base.commit is None:
            break
        if not chain and base.commit not in commits:
            chain.append(base.commit)
        last_step, generation = _parsed(base.commit)
        if generation >= base.generation:
            raise ValueError(
                f"Generation {base.generation} starts from {base.commit}; a commit of an older generation is expected. "
                "Its base is damaged."
            )
        base = Base(generation, base_of(generation)) if generation >= oldest else None
    return tuple(chain)


def is_fenced(generation: int, claims: Iterable[int]) -> bool:
    """Whether a newer generation has been claimed."""
    return any(claim > generation for claim in claims)


def _unless_fenced(state: DriverState, claims: Iterable[int], phase: LeasePhase) -> LeasePhase:
    return LeasePhase.FENCED if is_fenced(state.generation, claims) else phase


def _of_generation(generation: int, commits: Iterable[str]) -> list[str]:
    """Names of one generation, newest first."""
    return sorted((name for name in commits if _parsed(name)[1] == generation), key=_parsed, reverse=True)


def _parsed(name: str) -> tuple[int, int]:
    parsed = parse_commit_name(name)
    if parsed is None:
        raise ValueError(f"'{name[:60]}' is no commit name; s<step>-g<generation> is expected. Filter listings before.")
    return parsed
