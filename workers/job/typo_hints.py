"""`typo_hint`: what is written wrongly in the file of a user's job, told in a sentence with its line.

A typo is a name, an attribute, a module or an argument that does not exist, on a line of the user's own. Any other
error of the user's code is left to its traceback, which says more.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_OURS = "podembed"


def typo_hint(error: Exception, module: str) -> str | None:
    """The typo behind an error, with its place; None for an error that its traceback explains better.

    Args:
      module: the job's, by the name it is imported with. What lies in its package or in its folder is the user's too.
    """
    package = module.partition(".")[0]
    if isinstance(error, SyntaxError):
        return (
            f"Found no Python in {error.filename}, line {error.lineno}: {error.msg}. Expected a module that can be "
            "imported. Correct the line."
        )
    if not isinstance(error, TypeError | NameError | AttributeError | ImportError):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    # A module whose import failed is in no list of modules, but its lines are on the way to the error.
    folders = {os.path.dirname(frame.f_code.co_filename) for frame, _ in frames if _package(frame) == package}
    while frames and (_answers_names(frames[-1][0]) or _misses_arguments(frames[-1][0], error)):
        frames.pop()
    if not frames:
        return None
    frame, line = frames[-1]
    is_users = _package(frame) == package or os.path.dirname(frame.f_code.co_filename) in folders
    if _package(frame) == _OURS or not is_users:
        return None
    return f"Found {type(error).__name__} in {frame.f_code.co_filename}, line {line}: {error}. {_remedy(error, frame)}"


def _answers_names(frame: FrameType) -> bool:
    """Our modules load their names when they are first used; the line that uses one is meant."""
    return _package(frame) == _OURS and frame.f_code.co_name == "__getattr__"


def _misses_arguments(frame: FrameType, error: Exception) -> bool:
    """Whether a class of ours says that its caller left an argument out, in Python's words."""
    return _package(frame) == _OURS and bool(re.search(r"__init__\(\) missing \d+ required", str(error)))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _remedy(error: Exception, frame: FrameType) -> str:
    words = str(error)
    if isinstance(error, ModuleNotFoundError):
        return "Expected a module that can be imported. Install it, or correct the line."
    if isinstance(error, TypeError):
        called = _called(words, frame)
        if called is None:
            return "Expected a line that runs. Correct it."
        names = [*inspect.signature(called).parameters]
        unknown = re.search(r"unexpected keyword argument '(\w+)'", words)
        near = _nearest(unknown[1], names) if unknown else None
        return f"Expected arguments of {getattr(called, '__name__', 'it')}: {', '.join(names)}. " + (
            f"Write {near}=." if near else "Correct the line."
        )
    near = None
    if isinstance(error, AttributeError) and error.name:
        near = _nearest(error.name, _names_of(error.obj))
    elif isinstance(error, NameError) and error.name:
        near = _nearest(error.name, [*frame.f_locals, *frame.f_globals])
    elif (found := re.match(r"cannot import name '(\w+)' from '([\w.]+)'", words)) and found[2] in sys.modules:
        near = _nearest(found[1], _names_of(sys.modules[found[2]]))
    return f"Expected a name that exists. Write {near}." if near else "Expected a name that exists. Correct the line."


def _names_of(value: Any) -> Iterable[str]:
    return {*dir(value), *getattr(value, "__all__", ())}


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def _called(words: str, frame: FrameType) -> Callable[..., Any] | None:
    """The function or class whose arguments Python refused, as the line that called it knows it."""
    found = re.match(r"([\w.<>]+?)(\.__init__|\.__new__)?\(\) (?:got|missing|takes)", words)
    name = found[1].rpartition(".")[2] if found else ""
    seen = {**frame.f_globals, **frame.f_locals}
    called = seen.get(name) or next((getattr(v, name) for v in seen.values() if hasattr(v, name)), None)
    # What is written in C has no signature to show.
    return called if inspect.isclass(called) or inspect.isfunction(called) else None
