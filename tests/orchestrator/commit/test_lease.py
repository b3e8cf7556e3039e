"""The lease on real files: claims, bases, fencing, heartbeats, and damage to each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION, EXIT_FENCED
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import HEARTBEAT_EVERY_S, HEARTBEAT_FRESH_S, Holder, RunIsHeld, read_heartbeat
from podembed.orchestrator.commit.lease import Fenced, PublicationUnsettled
from podembed.orchestrator.commit.lease_files import read_claims, read_head, read_lineage
from podembed.orchestrator.commit.manifest import commit_name
from podembed.workers.storage.storage_errors import StorageError, StoreUnavailable
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def elsewhere(submission: str) -> Holder:
    """A driver on a machine that we know nothing about."""
    return Holder(submission=submission, hostname="far-away", process=1, machine="another boot")


def name(step: int, generation: int) -> str:
    return commit_name(step=step, generation=generation)


class FailsOnce:
    """A store whose request number `at` fails, before or after it took effect."""

    def __init__(self, store: Store, at: int, *, is_done: bool) -> None:
        self._store, self._left, self._is_done = store, at, is_done
        self.has_failed = False

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._store, attribute)
        return self._failing(found) if callable(found) else found

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def request(*arguments: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self.has_failed = True
                if self._is_done:
                    call(*arguments, **more)
                raise StoreUnavailable("request", attempts=1, elapsed_s=0.0, last=TimeoutError())
            return call(*arguments, **more)

        return request

    def ask(self, question: Callable[[], Any]) -> Any:
        """Twice, if need be."""
        try:
            return question()
        except StoreUnavailable:
            return question()


class TestGenerations:
    def test_they_grow_by_one(self, store: Store) -> None:
        assert [acquire(store, holder=elsewhere("a")).generation for _ in range(3)] == [1, 2, 3]
        assert read_claims(store) == [1, 2, 3]

    def test_a_generation_starts_from_the_newest_commit(self, store: Store) -> None:
        first = acquire(store, holder=elsewhere("a"))
        assert first.head is None
        first.publish(name(10, 1), b"{}")
        first.publish(name(20, 1), b"{}")
        second = acquire(store, holder=elsewhere("a"))
        assert second.head == name(20, 1)
        second.publish(name(25, 2), b"{}")
        assert read_head(store) == name(25, 2)
        assert read_lineage(store) == (name(25, 2), name(20, 1), name(10, 1))

    def test_the_user_may_choose_an_ancestor(self, store: Store) -> None:
        first = acquire(store, holder=elsewhere("a"))
        for step in (10, 20, 30):
            first.publish(name(step, 1), b"{}")
        second = acquire(store, holder=elsewhere("a"), choose_base=lambda newest: name(20, 1))
        assert second.head == name(20, 1)
        assert read_lineage(store) == (name(20, 1), name(10, 1))
        second.publish(name(30, 2), b"{}")
        assert read_lineage(store) == (name(30, 2), name(20, 1), name(10, 1))

    def test_a_claim_whose_base_could_not_be_chosen_changes_nothing(self, store: Store) -> None:
        first = acquire(store, holder=elsewhere("a"))
        first.publish(name(10, 1), b"{}")

        def damaged(newest: str | None) -> str | None:
            raise StorageError("damaged")

        with pytest.raises(StorageError, match="damaged"):
            acquire(store, holder=elsewhere("a"), choose_base=damaged)
        assert read_head(store) == name(10, 1)
        assert acquire(store, holder=elsewhere("a")).generation == 3

    @pytest.mark.parametrize("is_done", [False, True])
    def test_an_outage_at_any_request_of_a_claim_can_be_waited_for(self, tmp_path: Path, is_done: bool) -> None:
        """Every request fails once, before or after it took effect; a driver that recovers takes its own claim for
        nobody else's.
        """
        for at in range(100):
            store = Store(tmp_path / str(at))
            first = acquire(store, holder=elsewhere("a"))
            first.publish(name(10, 1), b"{}")
            failing = FailsOnce(store, at, is_done=is_done)
            lease = acquire(failing, holder=elsewhere("a"), held=1, patiently=failing.ask)  # type: ignore[arg-type]
            assert (lease.generation, lease.head) == (2, name(10, 1))
            assert read_claims(store) == [1, 2]
            if not failing.has_failed:
                break
            lease.publish(name(20, 2), b"{}")
            assert read_lineage(store) == (name(20, 2), name(10, 1))
        assert 8 < at < 99

    def test_a_storage_that_fails_does_not_hide_why_a_driver_gave_up(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def damaged(newest: str | None) -> str | None:
            raise DocumentRefused("commit/x.json", "half of it", "all of it")

        def away(name: str) -> None:
            raise StorageError("the storage is away")

        monkeypatch.setattr(store, "delete", away)
        with pytest.raises(DocumentRefused):
            acquire(store, holder=elsewhere("a"), choose_base=damaged)


class TestFencing:
    def test_an_older_driver_cannot_check_publish_or_acknowledge(self, store: Store) -> None:
        old = acquire(store, holder=elsewhere("a"))
        old.publish(name(10, 1), b"{}")
        old.check()
        new = acquire(store, holder=elsewhere("b"), take_over=True)
        with pytest.raises(Fenced) as caught:
            old.check()
        assert (caught.value.generation, caught.value.newest, caught.value.exit_code) == (1, 2, EXIT_FENCED)
        with pytest.raises(Fenced):
            old.publish(name(20, 1), b"{}")
        with pytest.raises(ValueError, match="fenced"):
            old.publish(name(30, 1), b"{}")
        new.publish(name(11, 2), b"{}")
        assert read_lineage(store) == (name(11, 2), name(10, 1))

    def test_a_driver_that_is_overtaken_while_it_starts_stops(self, store: Store) -> None:
        def overtaken(newest: str | None) -> str | None:
            acquire(store, holder=elsewhere("b"), take_over=True)
            return newest

        with pytest.raises(Fenced):
            acquire(store, holder=elsewhere("a"), choose_base=overtaken)
        assert read_claims(store) == [1, 2]

    def test_a_driver_that_recovers_does_not_take_the_run_back(self, store: Store) -> None:
        """Also not with `take_over`, which was meant for the driver that it met when it started."""
        first = acquire(store, holder=elsewhere("a"), take_over=True)
        again = acquire(store, holder=elsewhere("a"), take_over=True, held=first.generation)
        newer = acquire(store, holder=elsewhere("b"), take_over=True)
        with pytest.raises(Fenced) as caught:
            acquire(store, holder=elsewhere("a"), take_over=True, held=again.generation)
        assert (caught.value.generation, caught.value.newest) == (2, 3)
        assert read_claims(store) == [1, 2, 3]
        newer.check()

    def test_nor_if_the_newer_claim_is_made_just_before_its_own(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = acquire(store, holder=elsewhere("a"))
        create, met = store.create_exclusive, []

        def overtaken(name: str, data: bytes) -> bool:
            if name.endswith("2.claim") and not met:
                met.append(acquire(Store(store.url), holder=elsewhere("b"), take_over=True))
            return create(name, data)

        monkeypatch.setattr(store, "create_exclusive", overtaken)
        with pytest.raises(Fenced):
            acquire(store, holder=elsewhere("a"), take_over=True, held=first.generation)
        assert read_claims(store) == [1, 2]
        met[0].check()

    @pytest.mark.parametrize("was_created", [False, True])
    def test_a_publication_without_an_answer_is_settled_before_another(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, was_created: bool
    ) -> None:
        """Whether the commit stands is unknown, so nothing may follow it until that is known."""
        lease, real = acquire(store, holder=elsewhere("a")), store.create_exclusive

        def fail(name: str, data: bytes) -> bool:
            if was_created:
                real(name, data)
            raise ConnectionError("answer lost")

        monkeypatch.setattr(store, "create_exclusive", fail)
        monkeypatch.setattr(Store, "answers_late", True)
        with pytest.raises(PublicationUnsettled, match="unknown"):
            lease.publish(name(10, 1), b"{}")
        with pytest.raises(PublicationUnsettled):
            lease.settle()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="fenced"):
            lease.publish(name(20, 1), b"{}")
        assert (lease.head, lease.head_step) == (None, 0)
        lease.settle()
        assert (lease.head, lease.head_step) == (name(10, 1), 10)
        lease.publish(name(20, 1), b"{}")
        assert read_lineage(store) == (name(20, 1), name(10, 1))

    def test_where_nothing_takes_effect_late_a_failed_publication_was_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Store(tmp_path / "local")
        lease = acquire(store, holder=elsewhere("a"))

        def fail(*_: object) -> bool:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "create_exclusive", fail)
        with pytest.raises(OSError, match="No space left"):
            lease.publish(name(10, 1), b"{}")
        monkeypatch.undo()
        lease.publish(name(20, 1), b"{}")
        assert read_lineage(store) == (name(20, 1),)

    def test_a_publication_that_is_settled_after_a_takeover_is_not_acknowledged(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease = acquire(store, holder=elsewhere("a"))

        def fail(*_: object) -> bool:
            raise ConnectionError("answer lost")

        monkeypatch.setattr(store, "create_exclusive", fail)
        monkeypatch.setattr(Store, "answers_late", True)
        with pytest.raises(PublicationUnsettled):
            lease.publish(name(10, 1), b"{}")
        monkeypatch.undo()
        successor = acquire(store, holder=elsewhere("b"), take_over=True)
        with pytest.raises(Fenced):
            lease.settle()
        assert (lease.head, successor.head, read_head(store)) == (None, None, None)

    @pytest.mark.parametrize("found", [b"by hand", b"{}"])
    def test_a_commit_that_somebody_put_there_by_hand_is_not_ours(self, store: Store, found: bytes) -> None:
        """Not even where it has the bytes of ours: nothing of ours was lost that could have written them."""
        lease = acquire(store, holder=elsewhere("a"))
        store.create_exclusive(f"commit/{name(10, 1)}.json", found)
        with pytest.raises(StorageError, match="by hand"):
            lease.publish(name(10, 1), b"{}")


class TestHeartbeat:
    def test_a_living_driver_of_another_submission_is_left_alone(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock)
        clock.now_s += HEARTBEAT_FRESH_S - 1
        with pytest.raises(RunIsHeld, match=r"submission 'a', process 1 on far-away.*take_over") as caught:
            acquire(store, holder=elsewhere("b"), unix_s=clock)
        assert caught.value.exit_code == EXIT_CONFIGURATION
        assert read_claims(store) == [1]

    def test_a_silent_one_is_replaced(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock)
        clock.now_s += HEARTBEAT_FRESH_S
        assert acquire(store, holder=elsewhere("b"), unix_s=clock).generation == 2

    def test_take_over_and_the_own_submission_do_not_wait(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock)
        assert acquire(store, holder=elsewhere("a"), unix_s=clock).generation == 2
        assert acquire(store, holder=elsewhere("b"), unix_s=clock, take_over=True).generation == 3

    def test_a_released_lease_does_not_make_anybody_wait(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock).release()
        assert acquire(store, holder=elsewhere("b"), unix_s=clock).generation == 2

    def test_a_process_of_this_machine_that_is_gone_does_not_make_anybody_wait(
        self, store: Store, clock: Clock
    ) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait(timeout=120)
        here = Holder.current("a")
        dead = Holder(submission="a", hostname=here.hostname, process=gone.pid, machine=here.machine)
        acquire(store, holder=dead, unix_s=clock)
        assert acquire(store, holder=Holder.current("b"), unix_s=clock).generation == 2
        with pytest.raises(RunIsHeld, match=f"process {os.getpid()}"):
            acquire(store, holder=Holder.current("c"), unix_s=clock)

    def test_a_clock_ahead_of_ours_looks_alive(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock)
        clock.now_s -= 3600
        with pytest.raises(RunIsHeld):
            acquire(store, holder=elsewhere("b"), unix_s=clock)

    def test_it_is_written_only_every_few_seconds(self, store: Store, clock: Clock) -> None:
        lease = acquire(store, holder=elsewhere("a"), unix_s=clock)
        lease.heartbeat()
        written = read_heartbeat(store, 1)
        assert written is not None
        assert written.written_unix_s == clock.now_s
        clock.now_s += HEARTBEAT_EVERY_S / 2
        lease.heartbeat()
        assert read_heartbeat(store, 1) == written
        clock.now_s += HEARTBEAT_EVERY_S
        lease.heartbeat()
        beat = read_heartbeat(store, 1)
        assert beat is not None
        assert beat.written_unix_s == clock.now_s

    def test_a_damaged_heartbeat_stops_nobody(self, store: Store, clock: Clock) -> None:
        acquire(store, holder=elsewhere("a"), unix_s=clock)
        store.replace("lease/g00000001.hb", b'{"torn')
        assert read_heartbeat(store, 1) is None
        assert acquire(store, holder=elsewhere("b"), unix_s=clock).generation == 2

    def test_one_that_cannot_be_written_costs_no_generation(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: Store, name: str, data: bytes) -> None:
            raise StoreUnavailable(f"replace '{name}'", attempts=1, elapsed_s=0.0, last=ConnectionError("away"))

        with monkeypatch.context() as patched:
            patched.setattr(Store, "replace", refuse)
            lease = acquire(store, holder=elsewhere("a"), unix_s=clock)
        assert (lease.generation, read_heartbeat(store, 1)) == (1, None)
        clock.now_s += HEARTBEAT_EVERY_S
        lease.heartbeat()
        assert read_heartbeat(store, 1) is not None


class TestAnAwakenedDriver:
    """One that was frozen while another took the run over, and would now begin its next generation."""

    @pytest.mark.parametrize("take_over", [False, True])
    def test_it_never_takes_the_run_back(self, store: Store, take_over: bool) -> None:
        old = acquire(store, holder=elsewhere("old"))
        old.require_newest()
        new = acquire(store, holder=elsewhere("new"), take_over=True)
        with pytest.raises(Fenced) as caught:
            old.require_newest()
        assert (caught.value.generation, caught.value.newest) == (1, 2)
        with pytest.raises(Fenced):
            acquire(store, holder=elsewhere("old"), take_over=take_over, held=old.generation)
        assert read_claims(store) == [1, 2]
        new.require_newest()

    def test_one_that_nobody_replaced_goes_on(self, store: Store) -> None:
        lease = acquire(store, holder=elsewhere("a"))
        assert acquire(store, holder=elsewhere("a"), held=lease.generation).generation == 2


class TestDamage:
    @pytest.mark.parametrize("at", [0, 20, -2])
    def test_a_changed_base_is_refused(self, store: Store, at: int) -> None:
        acquire(store, holder=elsewhere("a"))
        path = Path(store.locate("lease/g00000001.base.json"))
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(DocumentRefused, match=r"g00000001\.base\.json"):
            read_head(store)
        with pytest.raises(DocumentRefused):
            acquire(store, holder=elsewhere("a"))

    def test_the_base_of_another_generation_is_refused(self, store: Store) -> None:
        acquire(store, holder=elsewhere("a"))
        data = store.read("lease/g00000001.base.json", max_bytes=9999)
        store.create_exclusive("lease/g00000002.base.json", data)
        with pytest.raises(DocumentRefused, match="generation 1"):
            read_head(store)

    def test_foreign_files_in_the_folders_are_ignored(self, store: Store) -> None:
        lease = acquire(store, holder=elsewhere("a"))
        lease.publish(name(10, 1), b"{}")
        for foreign in (
            "lease/README",
            "lease/g9.claim",
            "lease/g00000009.claim.bak",
            "commit/notes.json",
            "commit/s1-g1.json",
        ):
            store.write_new(foreign, [b"x"])
        assert read_claims(store) == [1]
        assert read_lineage(store) == (name(10, 1),)
