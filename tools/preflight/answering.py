"""A process of its own that gets one request and answers in lines of JSON: `answers_of` has it, `answering` is in it.

What works in a compiler, or on devices, may end its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple


class EndedProcess(NamedTuple):
    """How a process ended: its exit code, negative for a signal, and what it said beside its answers."""

    code: int
    words: str


def answers_of(
    module: str, request: Mapping[str, Any], *, environ: Mapping[str, str], limit_s: float | None = None
) -> Generator[dict[str, Any], None, EndedProcess]:
    """The answers of a module that is run. Its process is killed when nobody reads on.

    Args:
      limit_s: seconds after which it is killed.
    """
    with ExitStack() as opened:
        asked = opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
        words = opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        json.dump(request, asked)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=dict(environ),
        )
        opened.callback(process.wait)
        opened.callback(process.kill)
        if limit_s is not None:
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            opened.callback(timer.cancel)
        for line in process.stdout or ():
            # One that was killed may leave a part of a line.
            if line.endswith("\n"):
                yield json.loads(line)
        code = process.wait()
        words.seek(0)
        return EndedProcess(code, words.read())


def answering() -> tuple[dict[str, Any], Callable[..., None]]:
    """The request of this process, and what tells an answer, given by names. What else is printed goes to its other
    stream.
    """
    request = json.load(sys.stdin)
    # Libraries and jobs may print.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**values: Any) -> None:
        out.write(json.dumps(values) + "\n")
        out.flush()

    return request, tell
