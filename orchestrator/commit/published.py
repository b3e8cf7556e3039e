"""`publish/`: which commits are offered to servers, so that the keep policies spare them.

`publish/pointers/<number>.json` is a log that only grows: the highest number counts, and names the version that servers
answer with. `publish/pins/<commit>.json` keeps one commit. Versions themselves are `serving.publish`'s.

A copy for servers has the same, and `COPY.json` in place of the record of a run.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.manifest import commit_name
from podembed.workers.storage.records import decode, encode, read_document
from podembed.workers.storage.storage_errors import NameNotFound, NotAFolder
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

POINTERS, PINS = "publish/pointers", "publish/pins"
COPY_FILE = "COPY.json"
COPY_VERSION = 1
_POINTER = re.compile(r"(\d{8,12})\.json")
_VERSION = re.compile(r"v(\d{9,})-g(\d{8,})-([0-9a-f]{12})")
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Content of a pointer.

    Attributes:
      number: its own number, from 1.
      version: name of the version that counts from here on.
      action: `publish` or `rollback`.
      keep: number of the newest different versions whose commits are kept.
      unix_s: wall clock of the publisher, for people.
    """

    number: int
    version: str
    action: str
    keep: int
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Content of a pin: a commit that is kept, and why.

    Attributes:
      until_unix_s: when it ends by itself; None for a pin that stays until somebody removes it.
    """

    commit: str
    reason: str
    unix_s: float
    until_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRecord:
    """Content of `COPY.json`: what a copy for servers is made of.

    Attributes:
      format_version: of the copy.
      run_id: id of the run whose versions are copied.
      source: location of the run, for people.
      rows: form of all rows, `float32`, `bfloat16` or `int8`.
      min_count: keys that were seen less often are left out; 0 for none.
      created_unix_s: wall clock of the publisher, for people.
    """

    format_version: int
    run_id: str
    source: str
    rows: str
    min_count: int
    created_unix_s: float


def read_copy(store: Store) -> CopyRecord:
    """The record of a copy.

    Raises:
      NameNotFound: this is none; DocumentRefused: it is damaged, or of another format.
    """
    record = decode(CopyRecord, COPY_FILE, read_document(store, COPY_FILE, max_bytes=_MAX_BYTES))
    if record.format_version != COPY_VERSION:
        raise DocumentRefused(COPY_FILE, f"format version {record.format_version}", str(COPY_VERSION))
    return record


def is_copy(store: Store) -> bool:
    """Whether a copy for servers lies here."""
    try:
        return store.exists(COPY_FILE)
    except NotAFolder:
        return False


def refuse_copy(store: Store) -> None:
    """Raises:
    ConfigurationError: a copy for servers lies here, which is no run.
    """
    if is_copy(store):
        raise ConfigurationError(
            f"Found a copy for servers in {store.location}. Expected a run: a copy has no optimizer slots and no "
            f"positions in the data, so nothing is trained or read from it. Name the run that it is made of, which "
            f"{COPY_FILE} says."
        )


def version_name(*, step: int, generation: int, digest: str) -> str:
    """`v000001200-g00000007-0123456789ab`: the commit, and twelve digits of what is served of it."""
    return f"v{step:09d}-g{generation:08d}-{digest[:12]}"


def commit_of_version(name: str) -> str | None:
    """The name of a version's commit, or None for any other text."""
    match = _VERSION.fullmatch(name)
    return commit_name(step=int(match[1]), generation=int(match[2])) if match else None


def pointer_numbers(store: Store) -> list[int]:
    """The numbers of all pointers, rising."""
    found = (_POINTER.fullmatch(name) for name in store.children(POINTERS))
    return sorted(int(match[1]) for match in found if match)


def read_pointer(store: Store, number: int) -> Pointer:
    """One pointer.

    Raises:
      NameNotFound: there is none of this number; DocumentRefused: it is damaged.
    """
    name = _pointer_file(number)
    try:
        pointer = decode(Pointer, name, read_document(store, name, max_bytes=_MAX_BYTES))
        if pointer.number != number or commit_of_version(pointer.version) is None:
            raise DocumentRefused(name, f"pointer {pointer.number} to {pointer.version[:60]!r}", f"pointer {number}")
    except DocumentRefused as error:
        remedy = (
            f"Servers go on with the version that they have. Move {store.locate(name)} away: without it the pointer "
            "before it counts. Then name the version that should count: podembed rollback, or podembed publish."
        )
        raise DocumentRefused(error.name, error.found, error.expected, remedy) from error
    return pointer


def newest_pointer(store: Store) -> Pointer | None:
    """The pointer that counts, or None before the first.

    Raises:
      DocumentRefused: it is damaged. An older one is no answer: it may be what was rolled back.
    """
    numbers = pointer_numbers(store)
    return read_pointer(store, numbers[-1]) if numbers else None


def add_pointer(store: Store, *, version: str, action: str, keep: int, unix_s: float) -> Pointer:
    """Makes a version the one that counts. Of two publishers at once, the later pointer counts."""
    while True:
        number = newest_number(store) + 1
        pointer = Pointer(number=number, version=version, action=action, keep=keep, unix_s=unix_s)
        if store.create_exclusive(_pointer_file(number), encode(pointer)):
            return pointer


def forget_pointers(store: Store, *, keep: int) -> None:
    """Deletes all pointers but the newest ones, the oldest first. The highest number stays, so numbers go on rising.

    Args:
      keep: number of pointers, at least 1.
    """
    for number in pointer_numbers(store)[:-keep]:
        store.delete(_pointer_file(number))


def recent_pointers(store: Store) -> Iterator[Pointer]:
    """All pointers, the newest first.

    Raises:
      DocumentRefused: one is damaged.
    """
    for number in reversed(pointer_numbers(store)):
        yield read_pointer(store, number)


def add_pin(store: Store, commit: str, *, reason: str, unix_s: float) -> None:
    """Keeps a commit, until `remove_pin`. One that is pinned stays so."""
    pin = Pin(commit=commit, reason=reason, unix_s=unix_s, until_unix_s=None)
    store.create_exclusive(_pin_file(commit), encode(pin))


def remove_pin(store: Store, commit: str) -> None:
    """Leaves a commit to the keep policies again."""
    store.delete(_pin_file(commit))


def hold(store: Store, commit: str, *, reason: str, unix_s: float, seconds: float) -> str:
    """Keeps a commit for some time, beside any other pin of it. Returns the name of the file, which its owner deletes.
    One that is killed leaves it behind, and then it ends by itself.
    """
    name = f"{PINS}/{commit}-{secrets.token_hex(8)}.json"
    pin = Pin(commit=commit, reason=reason, unix_s=unix_s, until_unix_s=unix_s + seconds)
    store.create_exclusive(name, encode(pin))
    return name


def newest_number(store: Store) -> int:
    """The number of the newest pointer; 0 before the first."""
    return max(pointer_numbers(store), default=0)


def is_quiet(store: Store, *, since: int, now_unix_s: float) -> bool:
    """Whether nobody is about to offer a version, and nobody has since the newest pointer had a number."""
    return not is_held(store, now_unix_s=now_unix_s) and newest_number(store) == since


def is_held(store: Store, *, now_unix_s: float) -> bool:
    """Whether somebody holds a commit: a publisher or a rollback at work, or one that was killed not long ago."""
    return any(pin.until_unix_s is not None and pin.until_unix_s >= now_unix_s for pin in read_pins(store))


def remove_ended(store: Store, *, now_unix_s: float) -> None:
    """Deletes what killed owners of `hold` left."""
    for name, pin in _pins(store):
        if pin.until_unix_s is not None and pin.until_unix_s < now_unix_s:
            store.delete(name)


def read_pins(store: Store) -> list[Pin]:
    """All pins, by rising commit.

    Raises:
      DocumentRefused: one is damaged.
    """
    return [pin for _, pin in _pins(store)]


def _pins(store: Store) -> Iterator[tuple[str, Pin]]:
    for file in store.children(PINS):
        name = f"{PINS}/{file}"
        try:
            yield name, decode(Pin, name, read_document(store, name, max_bytes=_MAX_BYTES))
        except NameNotFound:
            continue  # Removed meanwhile.


def published_commits(store: Store, *, now_unix_s: float | None = None) -> set[str]:
    """The commits of pins, and of as many of the newest versions as the newest pointer keeps.

    Args:
      now_unix_s: the wall clock, for pins that have ended; None takes those, too.

    Raises:
      DocumentRefused: a pin or pointer is damaged, so it is unknown what is needed.
    """
    now_unix_s = now_unix_s or 0.0
    kept = {pin.commit for pin in read_pins(store) if pin.until_unix_s is None or pin.until_unix_s >= now_unix_s}
    versions: list[str] = []
    keep = 1
    for pointer in recent_pointers(store):
        keep = keep if versions else pointer.keep
        if pointer.version not in versions:
            versions.append(pointer.version)
        if len(versions) >= keep:
            break
    return kept | {commit for version in versions if (commit := commit_of_version(version))}


def _pointer_file(number: int) -> str:
    return f"{POINTERS}/{number:08d}.json"


def _pin_file(commit: str) -> str:
    return f"{PINS}/{commit}.json"
