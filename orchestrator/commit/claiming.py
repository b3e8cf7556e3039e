"""Claiming the next generation of a run: the steps of `lease_protocol` up to a `Lease`, on a store."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from podembed.orchestrator.commit.holder import Claim, Holder, refuse_if_held
from podembed.orchestrator.commit.lease import Fenced, Lease, holds
from podembed.orchestrator.commit.lease_files import (
    BaseRecord,
    lease_file,
    read_claims,
    read_commit_names,
    read_newest_base,
    read_used_generations,
)
from podembed.orchestrator.commit.lease_protocol import DriverState, LeasePhase, after, is_fenced
from podembed.orchestrator.commit.storage_wait import at_once
from podembed.orchestrator.commit.vanished import require_own
from podembed.workers.storage.records import encode
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


def acquire(
    store: Store,
    *,
    holder: Holder,
    take_over: bool = False,
    held: int = 0,
    held_files: Mapping[str, bytes] | None = None,
    rebuild: bool = False,
    choose_base: Callable[[str | None], str | None] = lambda newest: newest,
    patiently: Callable[[Callable[[], Any]], Any] = at_once,
    unix_s: Callable[[], float] = time.time,
) -> Lease:
    """Claims the next generation of a run and fixes the commit that it starts from.

    Args:
      take_over: fence a driver of another submission even if its heartbeat is fresh.
      held: the generation that this driver had before, 0 for none. A newer one means that somebody took the run over,
        which a driver that recovers must not undo.
      held_files: `Lease.own_files` of that generation.
      rebuild: go on although the newest base is lost or damaged; see `lease_files.read_newest_base`.
      choose_base: function that gets the newest commit's name and checks it. Returns it or, if the user allows, an
        ancestor. If it raises, the claim has no base, which changes nothing for later drivers.
      patiently: asks the storage; may ask again if it is away.
      unix_s: the wall clock, for heartbeats and records only.

    Raises:
      RunIsHeld: another submission's driver is alive and `take_over` is not set.
      Fenced: a newer claim appeared meanwhile.
      RunVanished: what this driver wrote for the generation before is gone.
      BaseLost: the newest base cannot be read, and `rebuild` is not set.
    """
    state = DriverState()
    own: dict[str, bytes] = {}
    while state.phase is not LeasePhase.READY:
        generation = state.generation
        match state.phase:
            case LeasePhase.LIST_CLAIMS:
                answer: Any = patiently(partial(read_used_generations, store))
                if held and is_fenced(held, answer):
                    raise Fenced(held, max(answer), store.location)
                # Without them the run would begin again, in an empty folder.
                patiently(partial(require_own, store, held_files or {}))
                if not take_over:
                    patiently(partial(refuse_if_held, store, answer, holder, unix_s()))
            case LeasePhase.CLAIM:
                claim = Claim(
                    generation=generation, holder=holder, created_unix_s=unix_s(), token=secrets.token_hex(16)
                )
                file, content = lease_file(generation, "claim"), encode(claim)
                answer = patiently(_Creation(store, file, content))
                # If the claim is ours, it is what later looks must find.
                own = {file: content}
                held, held_files = (generation, own) if answer else (held, held_files)
            case LeasePhase.READ_BASE:
                # It is tried once, so a short outage of the storage may lose it; no generation should be given up for
                # that.
                with contextlib.suppress(StorageError, OSError):
                    Lease(store=store, holder=holder, state=state, unix_s=unix_s).heartbeat()
                with _letting_go(Lease(store=store, holder=holder, state=state, unix_s=unix_s)):
                    answer = patiently(partial(read_newest_base, store, rebuild=rebuild))
            case LeasePhase.LIST_COMMITS:
                answer = patiently(partial(read_commit_names, store))
            case LeasePhase.CHOOSE_BASE:
                with _letting_go(Lease(store=store, holder=holder, state=state, unix_s=unix_s)):
                    answer = patiently(partial(choose_base, state.head))
            case LeasePhase.CREATE_BASE:
                record = BaseRecord(
                    generation=generation, commit=state.head, created_unix_s=unix_s(), token=secrets.token_hex(16)
                )
                file, content = lease_file(generation, "base.json"), encode(record)
                answer = patiently(_Creation(store, file, content))
                own[file] = content
            case LeasePhase.CONFIRM_CLAIM:
                answer = patiently(partial(read_claims, store))
            case _:
                raise Fenced(generation, max(read_claims(store), default=0), store.location)
        state = after(state, answer)
    return Lease(store=store, holder=holder, state=state, unix_s=unix_s, own_files=own)


@contextlib.contextmanager
def _letting_go(lease: Lease) -> Iterator[None]:
    """Ends the heartbeat if the block raises: no other driver should wait for one that gave up."""
    try:
        yield
    except BaseException:
        # The error matters more than a heartbeat that stays and makes others wait.
        lease.release_if_possible()
        raise


class _Creation:
    """A file that is to be created exclusively. Called again after the storage failed, it knows its own file. Mutated:
    how often it was called.
    """

    def __init__(self, store: Store, file: str, data: bytes) -> None:
        self._store, self._file, self._data = store, file, data
        self._calls = itertools.count()

    def __call__(self) -> bool:
        """Whether the file is ours."""
        is_again = next(self._calls) > 0
        is_new = self._store.create_exclusive(self._file, self._data)
        return is_new or (is_again and holds(self._store, self._file, self._data))
