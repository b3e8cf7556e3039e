"""Whether the claims and bases of a run can be read and belong together."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from podembed.orchestrator.commit.holder import Claim
from podembed.orchestrator.commit.lease_files import generations_with_base, lease_file, read_base, read_claims
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.verification import Damage
from podembed.orchestrator.run.history_record import FOLDER as HISTORY
from podembed.orchestrator.run.policy_record import FOLDER as POLICIES
from podembed.workers.storage.records import decode
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

_MAX_CLAIM_BYTES = 1 << 14
_OF_GENERATION = re.compile(r"g(\d{8,12})\b.*\.json")


def lease_findings(store: Store) -> Iterator[Damage]:
    """Claims and bases that cannot be read, or that contradict their names, and bases without a claim.

    A claim alone is no damage: its driver ended before it chose a base, and later drivers pass over it. A generation
    that left anything else must have a base, and so must one whose commit is the base of another: its own commits may
    be deleted by now.
    """
    # Before the bases are listed: a driver that is at work writes the base first.
    traces = _generations_with_traces(store)
    claims = read_claims(store)
    for generation in claims:
        yield from _claim_findings(store, generation)
    with_base = generations_with_base(store)
    for generation in sorted({*with_base, *traces, *_generations_begun_from(store)}):
        if generation in with_base and generation not in claims:
            found = f"a base, but no g{generation:08d}.claim"
            yield Damage(
                name=lease_file(generation, "base.json"), found=found, expected="a claim, which is never deleted"
            )
        try:
            read_base(store, generation)
        except DocumentRefused as error:
            yield Damage(name=error.name, found=error.found, expected=error.expected)
        except NameNotFound as error:
            what = "a base, which every generation has that wrote anything, and which is never deleted"
            yield Damage(name=error.name, found=error.found, expected=what)
        except StorageError as error:
            yield Damage(name=lease_file(generation, "base.json"), found=str(error), expected="a base that can be read")


def _generations_with_traces(store: Store) -> set[int]:
    """Those of which there are records, or files of a save."""
    names = (name for folder in (POLICIES, HISTORY) for name in store.children(folder))
    records = {int(match.group(1)) for name in names if (match := _OF_GENERATION.fullmatch(name))}
    return records | {parsed[1] for name in store.children("data") if (parsed := parse_commit_name(name))}


def _generations_begun_from(store: Store) -> set[int]:
    """Those whose commits other generations began from, as far as bases can be read."""
    found = set()
    for generation in generations_with_base(store):
        with contextlib.suppress(StorageError):
            found.add(parse_commit_name(read_base(store, generation).commit or ""))
    return {parsed[1] for parsed in found if parsed is not None}


def _claim_findings(store: Store, generation: int) -> Iterator[Damage]:
    name = lease_file(generation, "claim")
    try:
        claim = decode(Claim, name, store.read(name, max_bytes=_MAX_CLAIM_BYTES))
    except DocumentRefused as error:
        yield Damage(name=name, found=error.found, expected=error.expected)
    except NameNotFound:
        yield Damage(name=name, found="no file", expected="a claim, which is never deleted")
    except StorageError as error:
        yield Damage(name=name, found=str(error), expected="a claim that can be read")
    else:
        if claim.generation != generation:
            yield Damage(name=name, found=f"the claim of generation {claim.generation}", expected=f"of {generation}")
