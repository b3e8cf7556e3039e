"""Ctrl-C, SIGTERM and SIGHUP from the first moment of a command to its last, and the first words of one that trains.

Imports take seconds, and on a busy machine up to a minute. So the command line imports this module before all that
takes time, and it imports nothing that does. While a run trains, `orchestrator.api.signals.StopSignals` has the signals
instead, and commits. Where this module has them there is nothing to commit: before a run trains, after it, and in
commands that do not train.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from podembed.jobs.search_path import is_the_command

EXIT_STOPPED = 85  # of `orchestrator.api.run_errors`, which is imported later
EXIT_INTERRUPTED = 130
EXIT_OF_SIGNALS = 128  # as shells have it, with the signal's number
TRAINING = ("train", "resume", "supervise")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CommandSignals:
    """The signals of this process while no run has them. Mutated: which signal came, and what it does.

    Until `begin` nothing has been begun, so a signal ends the process on the spot. Afterwards it raises
    `KeyboardInterrupt`, so that the command ends its processes and files in order. Once the exit code is known, it ends
    the process with that.

    Args:
      arguments: arguments of the command line.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = os.getpid()
        self._is_training = bool(arguments) and arguments[0] in TRAINING
        self._has_begun = False
        self._exit_code: int | None = None
        self._came: list[int] = []

    def take_over(self) -> None:
        """Takes the signals from here on; one that the program was started to ignore stays ignored."""
        # The first one to be registered runs last: Python gives the signals back to the kernel after it, and whatever
        # comes then would change the exit code of a command that is over.
        atexit.register(self._ignore)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def begin(self) -> None:
        """From here on the command has something to end in order."""
        self._has_begun = True

    def leave_with(self, exit_code: int) -> None:
        """From here on a signal ends the process with this code, which has been told already."""
        self._exit_code = exit_code

    @property
    def exit_code(self) -> int | None:
        """The exit code of a command that a signal ended; None if no signal came."""
        if not self._came:
            return None
        if not self._is_training:
            return EXIT_OF_SIGNALS + self._came[0]
        return EXIT_STOPPED if len(self._came) == 1 else EXIT_INTERRUPTED

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if os.getpid() != self._process:
            # A fork that has not become another program yet.
            os._exit(EXIT_OF_SIGNALS + number)
        if self._exit_code is not None:
            _leave(self._exit_code)
        # A closed terminal sends SIGHUP beside what else comes.
        if self._came and signal.SIGHUP in (number, *self._came):
            return
        self._came.append(number)
        if number == signal.SIGHUP:
            # Imported where it is needed, since it takes time.
            from podembed.orchestrator.api.signals import let_go_of_terminal

            let_go_of_terminal()
        if len(self._came) == 1:
            self._say(number)
        if not self._has_begun:
            _leave(self.exit_code or 0)
        raise KeyboardInterrupt

    def _say(self, number: int) -> None:
        name = signal.Signals(number).name
        what = "leaving; no step is under way" if self._is_training else "the command ends"
        # Not `print`: a signal may come in the middle of another one, whose buffer cannot be entered again.
        with contextlib.suppress(OSError):
            os.write(2, f"\npodembed: {name}: {what}. What was committed stands.\n".encode())

    def _ignore(self) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _leave(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def is_announced(arguments: Sequence[str]) -> bool:
    """Whether a command says that it loads: one that trains, for a person."""
    return arguments[:1] in (["train"], ["resume"]) and not {"--help", "-h", "json", "--log=json"} & {*arguments}


COMMAND_SIGNALS = CommandSignals(sys.argv[1:])
if is_the_command():
    COMMAND_SIGNALS.take_over()
    if is_announced(sys.argv[1:]):
        with contextlib.suppress(OSError):
            os.write(2, b"podembed: loading the program\n")
