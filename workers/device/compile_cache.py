"""Where compiled steps of JAX are kept on this machine, so that a process that takes the place of a lost one need not
compile.

What lies there is machine code that JAX runs, so the folder must be this user's alone; any other one is left unused. A
program is kept for each member of a gang. What a member compiles carries its number, and JAX looks for it under a name
of its own.

Several processes read and write it at a time, and any of them may be killed. So a program gets its name when its file
is whole. JAX by itself would leave half of one, compile anew at every start and never write that name again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

KEPT_S = 30 * 24 * 3600.0
"""How long a program is kept that nobody reads."""


def use_compile_cache(folder: str) -> bool:
    """Makes JAX keep its programs in a folder, which is created in one that exists. Returns whether it keeps any.

    A cache that the user has set up for JAX stays the one that is used.
    """
    _write_whole_files()
    # JAX makes its settings attributes as it goes.
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None:
        return True
    with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
        os.mkdir(folder, mode=0o700)
    if not _is_private(folder):
        return False
    _remove_old(folder)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True


@contextlib.contextmanager
def every_member_writes() -> Iterator[None]:
    """Inside, what this member of a gang compiles is kept, unless the cache is a remote one. The backend must have been
    started before.

    JAX writes for the first member alone, to spare remote storage many writers at a time, although the others never
    find what that one wrote.
    """
    settings: Any = jax.config
    if "://" in (settings.jax_compilation_cache_dir or "://"):
        yield
        return
    # The compiler reads the number for this purpose only; there is no public name for it.
    from jax._src.distributed import global_state

    number, global_state.process_id = global_state.process_id, 0
    try:
        yield
    finally:
        global_state.process_id = number


def _write_whole_files() -> None:
    """JAX has no setting for this."""
    import jax._src.lru_cache

    LRUCache: Any = jax._src.lru_cache.LRUCache
    put = LRUCache.put
    if put.__module__ == __name__:
        return

    def put_whole(cache: Any, key: str, value: bytes) -> None:
        # What a cache of limited size holds is counted under a lock. Remote storage has whole objects only.
        if cache.eviction_enabled or "://" in str(cache.path):
            return put(cache, key, value)
        part = f"{key}-{os.getpid()}-{threading.get_ident()}"
        # JAX ends the names of its files like this.
        file = cache.path / f"{part}-cache"
        try:
            put(cache, part, value)
            file.replace(cache.path / f"{key}-cache")
        finally:
            # It is still there if the disk is full.
            file.unlink(missing_ok=True)

    LRUCache.put = put_whole


def _remove_old(folder: str) -> None:
    """JAX has a limit of bytes, but then it locks the folder for each program."""
    now_s = time.time()
    # Other processes do the same.
    with contextlib.suppress(OSError):
        for entry in [*os.scandir(folder)]:
            found = entry.stat(follow_symlinks=False)
            if now_s - max(found.st_atime, found.st_mtime) > KEPT_S and stat.S_ISREG(found.st_mode):
                os.unlink(entry.path)


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
