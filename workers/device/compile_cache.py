"""Where compiled steps of JAX are kept on this machine, so that a process that takes the place of a lost one need not
compile.

What lies there is machine code that JAX runs, so the folder must be this user's alone; any other one is left unused. A
program is kept for each member of a gang. What a member compiles carries its number, and JAX looks for it under a name
of its own.

A process that is killed while it writes a program leaves half of it. JAX then compiles anew, says so in a warning, and
never writes a name again that is there. Such a file is therefore removed, and the next process writes it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

_UNREADABLE = r"Error reading persistent compilation cache entry for '([^'/]+)'"


def use_compile_cache(folder: str) -> bool:
    """Makes JAX keep its programs in a folder, which is created in one that exists. Returns whether it does.

    A cache that the user has set up for JAX stays as it is.
    """
    # JAX makes its settings attributes as it goes.
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None:
        return True
    with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
        os.mkdir(folder, mode=0o700)
    if not _is_private(folder):
        return False
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True


@contextlib.contextmanager
def every_member_writes(folder: str) -> Iterator[None]:
    """Inside, what this member of a gang compiles is kept, if the cache is that folder. The backend must have been
    started before.

    Programs that could not be read are removed at the end.

    JAX writes for the first member alone, to spare storage that all share, although the others never find what that one
    wrote.
    """
    settings: Any = jax.config
    if not folder or settings.jax_compilation_cache_dir != folder:
        yield
        return
    # The compiler reads the number for this purpose only; there is no public name for it.
    from jax._src.distributed import global_state

    number, global_state.process_id = global_state.process_id, 0
    try:
        with _removing_unreadable(folder):
            yield
    finally:
        global_state.process_id = number


@contextlib.contextmanager
def _removing_unreadable(folder: str) -> Iterator[None]:
    """JAX names the program, by which its files begin. Those of other members go with it; they are compiled once
    more.
    """
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.filterwarnings("always", message="Error reading persistent compilation cache entry")
            yield
    finally:
        for warning in told:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
            if found := re.match(_UNREADABLE, str(warning.message)):
                for file in Path(folder).glob(f"{glob.escape(found.group(1))}-*"):
                    file.unlink(missing_ok=True)


def _is_private(folder: str) -> bool:
    """Whether no other user can write into a folder, or put another one in its place."""
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return False
        for above in Path(folder).absolute().parents:
            found = os.lstat(above)
            if found.st_uid == os.getuid() and not found.st_mode & 0o077:
                # Others do not get here, whatever the folders in between allow.
                return True
            if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
                return False
    except OSError:
        return False
    return True
