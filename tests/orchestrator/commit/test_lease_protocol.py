"""The pure half of the lease: transitions, and the rule that says which commits count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.commit.lease_protocol import (
    Base,
    DriverState,
    LeasePhase,
    after,
    head,
    is_fenced,
    lineage,
    propose,
)
from podembed.orchestrator.commit.manifest import commit_name


def name(step: int, generation: int) -> str:
    return commit_name(step=step, generation=generation)


def ready(generation: int = 3, commit: str | None = None) -> DriverState:
    return DriverState(phase=LeasePhase.READY, generation=generation, head=commit)


class TestTransitions:
    def test_a_driver_that_finds_the_base_of_a_newer_generation_is_too_late(self) -> None:
        """It was held up between its claim and this look. Its own base would name a commit of the future."""
        claimed = DriverState(phase=LeasePhase.READ_BASE, generation=3)
        assert after(claimed, Base(4, name(9, 2))).phase is LeasePhase.FENCED
        assert after(claimed, Base(2, name(9, 1))).phase is LeasePhase.LIST_COMMITS
        assert after(claimed, None).phase is LeasePhase.LIST_COMMITS
        choosing = DriverState(phase=LeasePhase.CHOOSE_BASE, generation=3, head=name(9, 2))
        assert after(choosing, name(12, 4)).phase is LeasePhase.FENCED
        assert after(choosing, name(9, 2)).phase is LeasePhase.CREATE_BASE

    def test_an_undisturbed_driver_claims_then_looks_then_commits(self) -> None:
        state = DriverState()
        answers = [[1, 2], True, Base(2, None), [name(5, 2)], name(5, 2), True, [1, 2, 3]]
        phases = []
        for answer in answers:
            phases.append(state.phase)
            state = after(state, answer)
        assert [phase.value for phase in phases] == [
            "list claims",
            "claim",
            "read base",
            "list commits",
            "choose base",
            "create base",
            "confirm claim",
        ]
        assert state == DriverState(phase=LeasePhase.READY, generation=3, head=name(5, 2))
        state = propose(state, name(9, 3))
        for answer in (True, [1, 2, 3], None):
            state = after(state, answer)
        assert state == DriverState(phase=LeasePhase.READY, generation=3, head=name(9, 3))

    def test_a_lost_claim_starts_over(self) -> None:
        assert after(DriverState(phase=LeasePhase.CLAIM, generation=4), False).phase is LeasePhase.LIST_CLAIMS
        assert after(DriverState(phase=LeasePhase.CREATE_BASE, generation=4), False).phase is LeasePhase.LIST_CLAIMS

    @pytest.mark.parametrize("phase", [LeasePhase.CONFIRM_CLAIM, LeasePhase.CONFIRM_COMMIT])
    def test_a_newer_claim_fences(self, phase: LeasePhase) -> None:
        state = DriverState(phase=phase, generation=4, pending=name(1, 4))
        assert after(state, [3, 4, 5]).phase is LeasePhase.FENCED
        assert after(state, [3, 4]).phase is not LeasePhase.FENCED

    def test_a_commit_that_exists_already_fences(self) -> None:
        assert (
            after(DriverState(phase=LeasePhase.PUBLISH, generation=4, pending=name(1, 4)), False).phase
            is LeasePhase.FENCED
        )

    @pytest.mark.parametrize("phase", [LeasePhase.READY, LeasePhase.FENCED])
    def test_nothing_is_due_when_ready_or_fenced(self, phase: LeasePhase) -> None:
        with pytest.raises(ValueError, match="No action is due"):
            after(DriverState(phase=phase), None)

    @pytest.mark.parametrize(
        ("state", "commit"),
        [
            (ready(3, name(5, 2)), name(4, 3)),
            (ready(3, name(5, 3)), name(5, 3)),
            (ready(3, name(5, 2)), name(6, 2)),
            (ready(3, name(5, 2)), name(6, 4)),
            (ready(3, None), "garbage"),
            (DriverState(phase=LeasePhase.FENCED, generation=3), name(6, 3)),
        ],
    )
    def test_only_later_steps_of_the_own_generation_are_proposed(self, state: DriverState, commit: str) -> None:
        with pytest.raises(ValueError, match="commit each step once"):
            propose(state, commit)

    def test_a_generation_may_commit_the_step_that_it_started_from(self) -> None:
        assert propose(ready(3, name(5, 2)), name(5, 3)).pending == name(5, 3)

    def test_fenced_by_newer_claims_only(self) -> None:
        assert is_fenced(3, [1, 4])
        assert not is_fenced(3, [1, 2, 3])
        assert not is_fenced(3, [])


class TestLineage:
    @pytest.mark.parametrize(
        ("base", "commits", "expected"),
        [
            (None, [], None),
            (None, [name(5, 1)], None),
            (Base(1, None), [], None),
            (Base(1, None), [name(5, 1), name(9, 1)], name(9, 1)),
            (Base(2, name(5, 1)), [name(5, 1), name(9, 1)], name(5, 1)),
            (Base(2, name(5, 1)), [name(5, 1), name(9, 1), name(7, 2)], name(7, 2)),
            (Base(2, name(5, 1)), [name(5, 1), name(8, 3)], name(5, 1)),
            (Base(2, name(5, 1)), [], name(5, 1)),
            (Base(2, None), [name(5, 1)], None),
        ],
    )
    def test_the_head_is_the_last_of_the_newest_generation_or_its_base(self, base, commits, expected) -> None:
        assert head(base, commits) == expected

    def test_a_zombies_late_commits_do_not_count(self) -> None:
        bases = {1: None, 2: name(10, 1), 3: name(20, 2)}
        commits = [name(10, 1), name(20, 1), name(30, 1), name(15, 2), name(20, 2), name(25, 2), name(21, 3)]
        expected = (name(21, 3), name(20, 2), name(15, 2), name(10, 1))
        assert lineage(Base(3, bases[3]), commits, bases.__getitem__) == expected

    def test_deleted_ancestors_are_left_out_but_not_the_head(self) -> None:
        bases = {1: None, 2: name(10, 1), 3: name(20, 2)}
        assert lineage(Base(3, bases[3]), [], bases.__getitem__) == (name(20, 2),)
        assert lineage(Base(3, bases[3]), [name(30, 3)], bases.__getitem__) == (name(30, 3),)

    def test_bases_older_than_every_commit_are_not_read(self) -> None:
        def unread(generation: int) -> str | None:
            raise AssertionError(generation)

        assert lineage(Base(9, name(20, 8)), [name(30, 9)], unread) == (name(30, 9),)

    def test_a_base_that_points_forward_is_damaged(self) -> None:
        with pytest.raises(ValueError, match="damaged"):
            lineage(Base(2, name(5, 2)), [], lambda _: None)

    @given(st.data())
    def test_the_rule_finds_what_the_parents_say(self, data) -> None:
        """Random histories of drivers and zombies, against a walk along recorded parents."""
        parents: dict[str, str | None] = {}
        bases: dict[int, str | None] = {}
        heads: dict[int, str | None] = {}
        for steps in range(1, 1 + data.draw(st.integers(1, 15))):
            if not bases or data.draw(st.integers(0, 3)) == 0:
                generation = max(bases, default=0) + 1
                bases[generation] = head(Base(max(bases), bases[max(bases)]), parents) if bases else None
                heads[generation] = bases[generation]
            generation = data.draw(st.sampled_from(sorted(bases)))
            parents[name(steps, generation)] = heads[generation]
            heads[generation] = name(steps, generation)
        newest = Base(max(bases), bases[max(bases)])
        walked, at = [], heads[newest.generation]
        while at is not None:
            walked.append(at)
            at = parents[at]
        assert head(newest, parents) == heads[newest.generation]
        assert lineage(newest, list(parents), bases.__getitem__) == tuple(walked)
