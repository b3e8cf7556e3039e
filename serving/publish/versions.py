"""A version: a sealed record below `publish/versions/`, and the files that it names.

Rows and dense arrays stay where the commit has them. A version adds the program, the schema of its input, vocabularies
and a probe. These lie in `publish/files/`, named by their SHA-256, so versions that have the same share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.manifest import MAX_MANIFEST_BYTES, commit_file
from podembed.orchestrator.commit.published import commit_of_version, recent_pointers
from podembed.workers.storage.records import decode, encode, read_document
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import MAX_DOCUMENT_BYTES, DocumentRefused, canonical_bytes

VERSIONS, FILES, REFUSED = "publish/versions", "publish/files", "publish/refused"
SCHEMA, PROGRAM, PROBE = "schema.json", "forward.jax", "probe.json"
VERSION_FORMAT = 1
_MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file below `publish/files/`."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What is served of one commit.

    Attributes:
      name: as `version_name` makes it.
      format_version: of this record.
      run_id: id of the run.
      commit: name of the commit, whose rows and dense arrays are served.
      manifest_sha256: digest of the commit's manifest, which has the checksums of all of its files.
      files: by what they are: `schema.json`, `forward.jax`, `probe.json`, `vocabularies/0.txt`.
      metrics: of the commit's evaluation, on which the gate decided.
      parent: the version that counted before, or None.
      created_unix_s: wall clock of the publisher, for people.
    """

    name: str
    format_version: int
    run_id: str
    commit: str
    manifest_sha256: str
    files: Mapping[str, NamedFile]
    metrics: Mapping[str, float]
    parent: str | None
    created_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedVersion:
    """Why a version was not offered."""

    version: str
    reason: str
    unix_s: float


def content_digest(commit: str, manifest_sha256: str, files: Mapping[str, NamedFile]) -> str:
    """The digest in a version's name: of all that decides its answers."""
    named = {name: file.sha256 for name, file in files.items()}
    content: dict[str, Any] = {"commit": commit, "manifest": manifest_sha256, "files": named}
    return hashlib.sha256(canonical_bytes(content)).hexdigest()


def version_file(name: str) -> str:
    return f"{VERSIONS}/{name}.json"


def write_version(store: Store, version: Version) -> None:
    """Writes the record, unless there is one of this name, which then says the same of answers."""
    store.create_exclusive(version_file(version.name), encode(version))


def read_version(store: Store, name: str) -> Version:
    """One version.

    Raises:
      ConfigurationError: there is none of this name; DocumentRefused: its record is damaged.
    """
    file = version_file(name)
    try:
        if commit_of_version(name) is None:
            raise NameNotFound(name, store.location)
        version = decode(Version, file, read_document(store, file, max_bytes=MAX_DOCUMENT_BYTES))
    except NameNotFound as error:
        raise ConfigurationError(
            f"Found no version {name[:80]!r} in {store.location}. Expected one of those that `podembed versions "
            f"{store.location}` lists."
        ) from error
    is_own = version.name == name and version.commit == commit_of_version(name)
    if not is_own or version.format_version != VERSION_FORMAT:
        raise DocumentRefused(file, f"version {version.name[:80]} of format {version.format_version}", name)
    if content_digest(version.commit, version.manifest_sha256, version.files)[:12] != name[-12:]:
        raise DocumentRefused(file, "other files than its name says", name)
    return version


def write_refusal(store: Store, refusal: RefusedVersion) -> None:
    """Keeps the reason, unless there is one already."""
    store.create_exclusive(f"{REFUSED}/{refusal.version}.json", encode(refusal))


def read_refusals(store: Store) -> dict[str, RefusedVersion]:
    """All refusals, by version.

    Raises:
      DocumentRefused: one is damaged.
    """
    files = [f"{REFUSED}/{file}" for file in store.children(REFUSED)]
    found = (decode(RefusedVersion, name, read_document(store, name, max_bytes=MAX_DOCUMENT_BYTES)) for name in files)
    return {one.version: one for one in found}


def version_names(store: Store) -> list[str]:
    """The names of all versions, by rising commit, whether they were offered or not."""
    names = (file.removesuffix(".json") for file in store.children(VERSIONS))
    return sorted(name for name in names if commit_of_version(name))


def find_version(store: Store, wanted: str) -> str:
    """The name that a person means by a version's name, the beginning of one, or the step of its commit.

    Raises:
      ConfigurationError: none or several.
    """
    names = version_names(store)
    found = [name for name in names if name == wanted] or [
        name for name in names if name.startswith(wanted) or (wanted.isdigit() and name[1:10] == wanted.zfill(9))
    ]
    if len(found) > 1:
        # Of one commit several versions may have been made. The one that was offered last is meant.
        offered = [pointer.version for pointer in recent_pointers(store) if pointer.version in found]
        found = offered[:1] or found
    if len(found) != 1:
        raise ConfigurationError(
            f"Found {len(found)} versions for {wanted!r} in {store.location}. Expected one: its name, the beginning of "
            f"it, or its step. There are {', '.join(names[-8:]) or 'none'}."
        )
    return found[0]


def write_file(store: Store, data: bytes) -> NamedFile:
    """Keeps some bytes under their digest. Files of the same bytes are one; a damaged one is written anew."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = f"{FILES}/{sha256}"
    try:
        if read_document(store, path, max_bytes=len(data)) == data:
            return NamedFile(sha256=sha256, size_bytes=len(data))
        store.delete(path)
    except NameNotFound:
        pass
    except DocumentRefused:
        store.delete(path)
    store.create_exclusive(path, data)
    return NamedFile(sha256=sha256, size_bytes=len(data))


def read_file(store: Store, version: Version, name: str) -> bytes:
    """The bytes of one file of a version.

    Raises:
      DocumentRefused: it is missing, or has other bytes.
    """
    file = version.files.get(name)
    if file is None:
        raise DocumentRefused(version_file(version.name), f"no file {name!r}", "one")
    path = f"{FILES}/{file.sha256}"
    try:
        data = read_document(store, path, max_bytes=min(file.size_bytes, _MAX_FILE_BYTES))
    except NameNotFound as error:
        raise DocumentRefused(path, "no file", f"{name} of version {version.name}") from error
    if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise DocumentRefused(path, "other bytes", f"{name} of version {version.name}")
    return data


def read_manifest(store: Store, commit: str) -> bytes:
    """The bytes of a commit's manifest.

    Raises:
      NameNotFound: there is no such commit.
    """
    return read_document(store, commit_file(commit), max_bytes=MAX_MANIFEST_BYTES)


def manifest_digest(store: Store, commit: str) -> str:
    """SHA-256 of a commit's manifest.

    Raises:
      NameNotFound: there is no such commit.
    """
    return hashlib.sha256(read_manifest(store, commit)).hexdigest()
