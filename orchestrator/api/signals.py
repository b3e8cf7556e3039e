"""Ctrl-C, SIGTERM, and the SIGHUP of a terminal that is closed.

The first asks the driver to commit and leave at the end of the window, the second means now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

NOW_S = 3.0  # that an end which is to be now waits for a storage


class StoppedAtStart(Exception):
    """A stop was requested before the first step of a generation; nothing needs a commit.

    Attributes:
      reason: why, such as the signal.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} came before the first step.")
        self.reason = reason


class StopSignals:
    """Context manager that takes over SIGINT, SIGTERM and SIGHUP while a run goes on, where Python allows it (the main
    thread).

    A signal that the program was started to ignore, as SIGHUP under `nohup`, stays ignored.

    Args:
      words: what is said when the first signal comes.

    Attributes:
      reason: None, or why the run should stop.
      is_signalled: whether it was a signal that asked. Its sender waits, and may kill the program after a while.
      is_now: whether it was asked a second time, which wants it to end at once.
    """

    def __init__(self, words: str = "the run commits what it has trained and leaves") -> None:
        self.reason: str | None = None
        self.is_signalled = False
        self.is_now = False
        self._words = words
        self._previous: dict[int, Any] = {}

    def request(self, reason: str) -> None:
        """Asks for a stop after the current window."""
        self.reason = reason

    def __enter__(self) -> StopSignals:
        self.claim()
        return self

    def claim(self) -> None:
        """Takes the signals over, again if a library has installed handlers of its own meanwhile, as Ray does when it
        connects.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._previous.setdefault(number, signal.signal(number, self._on_signal))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def ending(self, action: Callable[[], None]) -> None:
        """Does what belongs to the end of a run. Where that is to be now, for `NOW_S` at most: then the action is left
        behind, undone or not.

        Raises:
          Whatever `action` raises.
        """
        if not self.is_now:
            action()
            return
        raised: list[Exception] = []

        def act() -> None:
            try:
                action()
            except Exception as error:
                raised.append(error)

        # A storage may hang in the middle of a request, and the program must not wait for the thread either.
        thread = threading.Thread(target=act, name="ending", daemon=True)
        thread.start()
        thread.join(NOW_S)
        if raised:
            raise raised[0]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_signalled = True
        if number == signal.SIGHUP:
            let_go_of_terminal()
        # Shell and kernel both send SIGHUP when a terminal is closed, and systemd one beside SIGTERM: none of these
        # senders means "now" by it.
        if self.reason is not None and (number == signal.SIGHUP or self.reason == signal.SIGHUP.name):
            if number != signal.SIGHUP:
                self.reason = signal.Signals(number).name
            return
        if self.reason is not None:
            self.is_now = True
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        _say(f"\n{self.reason}: {self._words}. Once more to leave at once.")


def let_go_of_terminal() -> None:
    """Writing to a terminal that is gone is an error, in the middle of the commit that is to be the last. From now on
    the output goes nowhere.
    """
    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _say(text: str) -> None:
    """Prints, also in the middle of another print, whose buffer cannot be entered again, and where no program reads."""
    try:
        print(text, flush=True)
    except (RuntimeError, OSError):
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())
