"""`new_folder`: a folder of this machine that appears when it is complete, for what commands export."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.storage.store import place


@contextmanager
def new_folder(out: str) -> Iterator[str]:
    """A folder to fill; it gets its name when the block ends well, and goes when it does not.

    Raises:
      ConfigurationError: the name is taken, or nothing can be written there.
    """
    folder = os.path.abspath(place(out))
    parent, leaf = os.path.split(folder)
    if os.path.lexists(folder):
        raise taken(out)
    unfinished = os.path.join(parent, f".{leaf[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        os.makedirs(unfinished)
    except OSError as error:
        raise ConfigurationError(
            f"Found no way to write to {parent} ({error.strerror}). Expected a folder that this user may write to. "
            "Choose another --out."
        ) from error
    try:
        yield unfinished
        try:
            # A rename onto a folder with files fails.
            os.rename(unfinished, folder)
        except OSError:
            raise taken(out) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def taken(out: str) -> ConfigurationError:
    """What is raised where a name is not free."""
    return ConfigurationError(f"Found something at {out}. Expected a name that is free. Choose another --out.")
