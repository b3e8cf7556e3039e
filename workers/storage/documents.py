"""Sealed documents of a store, read within a bound whatever lies under their names."""

from __future__ import annotations

from podembed.workers.storage.errors import NotAPlainFile, WrongSize
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused


def read_document(store: Store, name: str, *, max_bytes: int) -> bytes:
    """The content of a document. One that is too large, or no file at all, is as damaged as one with other bytes.

    Raises:
      DocumentRefused: nothing was read; NameNotFound: it does not exist.
    """
    try:
        return store.read(name, max_bytes=max_bytes)
    except WrongSize as error:
        raise DocumentRefused(name, f"{error.found_bytes} bytes", f"at most {max_bytes}") from error
    except NotAPlainFile as error:
        raise DocumentRefused(name, error.found, "a plain file") from error
