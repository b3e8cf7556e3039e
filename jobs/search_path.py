"""Keeps the current folder from standing in for modules: whoever looks at a run from within its folder must not run
what lies there.

`python -m` puts the current folder first on the search path, and so may PYTHONPATH. Importing this module as the
command line takes it off. A job's module is still found there, by `workers.job.reference`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import podembed

COMMAND = "podembed"
_SAFE_PATH = "PYTHONSAFEPATH"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(podembed.__file__)))


def without_folder(path: list[str], folder: str, *, is_needed: bool) -> list[str]:
    """A search path without a folder; with it, if it is needed, as the last one or before another copy of the program.

    A Ray job brings the program in its working folder to machines that may have one installed. Modules of both must not
    run as one program.
    """
    kept = [entry for entry in path if os.path.realpath(entry or ".") != os.path.realpath(folder)]
    if not is_needed:
        return kept
    place = next((index for index, entry in enumerate(kept) if _holds_program(entry)), len(kept))
    return [*kept[:place], folder, *kept[place:]]


def _holds_program(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, COMMAND, "__main__.py"))


def current_folder() -> str:
    """The folder in which the command was given; empty if it was removed since, where nothing can lie."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def new_process() -> list[str]:
    """The command line that begins `podembed` in a process of its own, whose interpreter does not look in the current
    folder either.
    """
    # Where the program itself was found there alone, it must be found there again; it then takes the folder off as
    # here.
    flags = [] if _is_found_in(current_folder()) else ["-P"]
    return [sys.executable, *flags, "-m", COMMAND]


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Interpreters that start within the block do not look in the current folder; a spawned one gets the path of this
    one later.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def _is_found_in(folder: str) -> bool:
    return bool(folder) and os.path.realpath(_ROOT) == os.path.realpath(folder)


def is_the_command() -> bool:
    """Whether this process is `podembed` or `python -m podembed`, and no program that uses a part of them."""
    main = sys.modules["__main__"]
    specification = getattr(main, "__spec__", None)
    if specification is not None:
        return specification.name in (COMMAND, f"{COMMAND}.__main__")
    return os.path.basename(getattr(main, "__file__", None) or "") == "podembed"


if is_the_command() and current_folder():
    sys.path[:] = without_folder(sys.path, current_folder(), is_needed=_is_found_in(current_folder()))
