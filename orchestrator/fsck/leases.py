"""Whether the claims and bases of a run can be read and belong together."""

from __future__ import annotations

from collections.abc import Iterator

from podembed.orchestrator.commit.holder import Claim
from podembed.orchestrator.commit.lease_files import generations_with_base, lease_file, read_base, read_claims
from podembed.orchestrator.commit.verification import Damage
from podembed.workers.storage.errors import NameNotFound, StorageError
from podembed.workers.storage.records import decode
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

_MAX_CLAIM_BYTES = 1 << 14


def lease_findings(store: Store) -> Iterator[Damage]:
    """Claims and bases that cannot be read, or that contradict their names, and bases without a claim.

    A claim without a base is no damage: its driver ended before it chose one, and later drivers pass over it.
    """
    claims = read_claims(store)
    for generation in claims:
        yield from _claim_findings(store, generation)
    for generation in generations_with_base(store):
        if generation not in claims:
            found = f"a base, but no g{generation:08d}.claim"
            yield Damage(
                name=lease_file(generation, "base.json"), found=found, expected="a claim, which is never deleted"
            )
        try:
            read_base(store, generation)
        except DocumentRefused as error:
            yield Damage(name=error.name, found=error.found, expected=error.expected)
        except NameNotFound as error:
            expected = "a base, which every generation with a commit has"
            yield Damage(name=error.name, found=error.found, expected=expected)
        except StorageError as error:
            yield Damage(name=lease_file(generation, "base.json"), found=str(error), expected="a base that can be read")


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
