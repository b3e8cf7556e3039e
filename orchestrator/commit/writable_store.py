"""Opening the storage of a run for a writing program, after a test that it can keep a second such program out.

Everything that is promised about two drivers rests on one primitive, that exactly one of several writers creates a
name. Whether a storage offers it depends on the service, its version and the client, so it is tried out with real files
at every start.
"""

from __future__ import annotations

import warnings

from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.storage.storage_errors import (
    NotAFolder,
    SingleWriterStore,
    StoreCannotCreateExclusively,
    SystemRefused,
)
from podembed.workers.storage.store import Store


def open_for_writing(url: str, *, single_writer: bool) -> Store:
    """A store whose exclusive creation was tried out.

    Args:
      single_writer: only warn if the storage cannot create exclusively.

    Raises:
      StoreCannotCreateExclusively: it cannot, and that was not accepted.
      ConfigurationError: nothing can be written there.
    """
    store = Store(url)
    try:
        store.probe()
    except StoreCannotCreateExclusively as error:
        if not single_writer:
            raise
        warnings.warn(SingleWriterStore(error.location, error.found), stacklevel=2)
    except (OSError, NotAFolder) as error:
        reason = error.reason if isinstance(error, SystemRefused) else error
        raise ConfigurationError(
            f"Found no way to write to {store.location} ({reason}). Expected a folder for runs that this user may "
            "write to. Choose another one: --storage, RunConfig(storage_path=...)."
        ) from error
    return store
