"""JSON from storage, read as if an adversary had written it, and sealed so that one changed byte is found.

A sealed document is one JSON object on one line whose last member is the SHA-256 of the object without that member. The
check needs the raw bytes alone: cut the fixed-length tail, put `}` back, hash. Limits on size, depth and number range
apply before anything is built from the content. What the members mean is decided by the callers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from podembed.workers.storage.storage_errors import StorageError

MAX_DOCUMENT_BYTES = 1 << 20
MAX_DEPTH = 16
# Far above what the largest real document holds. A manifest has some ten lists and objects for each array of a table,
# and its numbers and texts stand in long lists. A small value costs many times its text in memory, so a forged file of
# few bytes could otherwise cost gigabytes.
MAX_CONTAINERS = 1 << 20
MAX_VALUES = 1 << 23
# Of one text, such as a name or a path. A long one costs several times its size before its meaning is looked at.
MAX_TEXT_BYTES = 4 << 20
_MAX_INT = 2**63 - 1
_MIN_INT = -(2**63)
_TAIL_PREFIX = b',"sha256":"'
_TAIL_LENGTH = len(_TAIL_PREFIX) + 64 + len(b'"}\n')
# Everything up to the next bracket outside of strings, or to a string without an end; possessive, so that it is passed
# over once.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}"]|\Z)', re.DOTALL)

_BACKSLASH = ord("\\")
# Of a text, from behind its first quote up to its last one.
_IN_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)

_REMEDY = "The file is damaged or not ours: restore it from a copy, or load an older commit."


class DocumentRefused(StorageError):
    """A JSON document is damaged, hostile, or not of the expected form."""

    def __init__(self, name: str, found: str, expected: str, remedy: str = _REMEDY):
        super().__init__(f"'{name}': found {found}; expected {expected}. {remedy}")
        self.name = name
        self.found = found
        self.expected = expected


def canonical_bytes(document: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only.

    Raises:
      ValueError: a number is not finite.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def seal(document: dict[str, Any]) -> bytes:
    """Canonical JSON plus its own checksum as the last member, and a newline."""
    body = canonical_bytes(document)
    if body == b"{}" or "sha256" in document:
        raise ValueError("A sealed document needs at least one member, and none called 'sha256'. Rename the member.")
    return body[:-1] + _TAIL_PREFIX + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unseal(
    name: str, data: bytes, *, max_bytes: int = MAX_DOCUMENT_BYTES, max_text_bytes: int = MAX_TEXT_BYTES
) -> dict[str, Any]:
    """The document that `seal` was given.

    Raises:
      DocumentRefused: any byte differs from what was sealed, or the content breaks a limit of `parse_strictly`.
    """
    # Hashed where it lies: a copy of a large document would cost its size once more.
    body = hashlib.sha256(memoryview(data)[:-_TAIL_LENGTH])
    body.update(b"}")
    if data[-_TAIL_LENGTH:] != _TAIL_PREFIX + body.hexdigest().encode() + b'"}\n':
        raise DocumentRefused(name, f"{len(data)} bytes whose checksum does not match them", "the bytes as written")
    document = parse_strictly(name, data, max_bytes=max_bytes + _TAIL_LENGTH, max_text_bytes=max_text_bytes)
    if not isinstance(document, dict):
        raise DocumentRefused(name, type(document).__name__, "a JSON object")
    del document["sha256"]
    return document


def parse_strictly(
    name: str,
    data: bytes,
    *,
    max_bytes: int = MAX_DOCUMENT_BYTES,
    max_text_bytes: int = MAX_TEXT_BYTES,
) -> Any:
    """Parses JSON, refusing what a careless reader would accept.

    Args:
      max_text_bytes: most bytes of a text, as it is written.

    Raises:
      DocumentRefused: too large, a text too long, too deep, not UTF-8, not JSON, a member twice, an integer outside 64
        bits, NaN or infinity.
    """
    beyond = beyond_limits(data, max_bytes=max_bytes)
    if beyond is not None:
        raise DocumentRefused(name, *beyond)
    if len(data) > max_text_bytes:
        _check_texts(name, data, max_text_bytes)
    _check_depth(name, data)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _without_repeats(name, pairs),
            parse_constant=lambda text: _refuse_number(name, text),
            parse_int=lambda text: _bounded_int(name, text),
            parse_float=lambda text: _finite_float(name, text),
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DocumentRefused(name, f"{type(error).__name__}: {error}"[:200], "JSON in UTF-8") from None


def beyond_limits(data: bytes, *, max_bytes: int) -> tuple[str, str] | None:
    """The limit of `parse_strictly` that a document exceeds, found and expected; None if it may be read. Writers ask,
    too.

    Counts what the parser would build an object for; characters inside strings count as well, of which real documents
    have few.
    """
    if len(data) > max_bytes:
        return f"{len(data)} bytes", f"at most {max_bytes}"
    containers, values = data.count(b"[") + data.count(b"{"), data.count(b",") + 1
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        return (
            f"about {values:,} values in {containers:,} lists and objects",
            f"at most {MAX_VALUES:,} in {MAX_CONTAINERS:,}",
        )
    return None


def _check_texts(name: str, data: bytes, max_text_bytes: int) -> None:
    """Looks for quotes, which takes a fiftieth of the time of an expression that passes over each character."""
    end = -1
    while start := data.find(b'"', end + 1) + 1:
        end = data.find(b'"', start)
        if end < 0:
            end = len(data)  # a text without an end, at which the parser will stop
        elif data[end - 1] == _BACKSLASH and (match := _IN_TEXT.match(data, start, start + max_text_bytes + 2)):
            end = match.end()  # that quote may be one of the text itself
        if end - start > max_text_bytes:
            raise DocumentRefused(name, f"a text of more than {max_text_bytes:,} bytes", "shorter ones")


def _check_depth(name: str, data: bytes) -> None:
    """Counts brackets outside strings: the parser itself would recurse before anybody could stop it."""
    depth = 0
    for match in _TO_BRACKET.finditer(data):
        token = match.group(1)
        if token in (b'"', b""):
            # The end, or a text without one, at which the parser stops as well; looking on would read the rest again
            # for every quote.
            break
        if token in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise DocumentRefused(name, f"more than {MAX_DEPTH} levels of nesting", f"at most {MAX_DEPTH}")
        elif token in b"]}":
            depth -= 1


def _without_repeats(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise DocumentRefused(name, "a member that appears twice", "each member once")
    return document


def _refuse_number(name: str, text: str) -> float:
    raise DocumentRefused(name, f"the number {text}", "finite numbers")


def _bounded_int(name: str, text: str) -> int:
    value = int(text) if len(text) <= 20 else _MAX_INT + 1
    if not _MIN_INT <= value <= _MAX_INT:
        raise DocumentRefused(name, f"the integer {text[:30]}", "integers of 64 bits")
    return value


def _finite_float(name: str, text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DocumentRefused(name, f"the number {text[:30]}", "finite numbers")
    return value
