"""Whether what servers read can be read: pointers, pins, and the versions whose commits are kept for them."""

from __future__ import annotations

from collections.abc import Iterator

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.published import PINS, POINTERS, read_pins, recent_pointers
from podembed.orchestrator.commit.verification import Damage
from podembed.serving.publish.versions import manifest_digest, read_file, read_version, version_file
from podembed.tools.fsck.findings import Finding, damage_of, finding_of_run
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def version_findings(store: Store) -> Iterator[Finding]:
    """What is wrong with them. A run of which nothing was published has nothing wrong."""
    try:
        read_pins(store)
    except DocumentRefused as error:
        yield finding_of_run(damage_of(error.name, error, f"a record in {PINS}"), "which commits are pinned")
    try:
        names: dict[str, None] = {}
        keep = None
        for pointer in recent_pointers(store):
            # While fewer were kept, the commit of an older one may have gone.
            keep = pointer.keep if keep is None else min(keep, pointer.keep)
            names[pointer.version] = None
            if len(names) >= keep:
                break
    except DocumentRefused as error:
        place = "which version servers answer with"
        yield finding_of_run(damage_of(error.name, error, f"a record in {POINTERS}"), place)
        return
    for name in names:
        yield from _of_version(store, name)


def _of_version(store: Store, name: str) -> Iterator[Finding]:
    place = f"version {name}"
    try:
        version = read_version(store, name)
    except (ConfigurationError, DocumentRefused) as error:
        damage = Damage(name=version_file(name), found=getattr(error, "found", "no file"), expected="its record")
        yield finding_of_run(damage, place)
        return
    for file in version.files:
        try:
            read_file(store, version, file)
        except DocumentRefused as error:
            yield finding_of_run(damage_of(error.name, error, file), f"{place}, {file}")
    try:
        found = "another manifest" if manifest_digest(store, version.commit) != version.manifest_sha256 else None
    except (NameNotFound, DocumentRefused) as error:
        found = error.found
    if found is not None:
        damage = Damage(name=f"commit/{version.commit}.json", found=found, expected="the manifest of that commit")
        yield finding_of_run(damage, place)
