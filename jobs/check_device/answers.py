"""`Answers`: the processes that do the checks, on the devices and on one CPU device.

A process that dies is followed by another one, for the checks behind the one that it died of.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from podembed.tools.preflight.answering import answers_of

CHILD = "podembed.jobs.check_device.child"


class DeviceCheck(NamedTuple):
    """What a process does for a check.

    Attributes:
      name: as in the report.
      does: name of a function of the process.
      type: name of a tolerance; empty for what is measured and not compared.
      arguments: arguments of the job, or of the measurement.
      precision: how float32 is multiplied: `highest`, or `default`.
    """

    name: str
    does: str
    type: str = ""
    arguments: Mapping[str, Any] = {}
    precision: str = "highest"


class Answers:
    """Mutated: what is known of the devices, and the last words of a process.

    Args:
      folder: where processes find their data and leave arrays.
      environ: environment of the processes.
      left_s: seconds that are left; then processes are killed.

    Attributes:
      devices: what a process has said of the devices; empty before.
    """

    def __init__(self, folder: str, environ: Mapping[str, str], left_s: Callable[[], float]) -> None:
        self._folder, self._left_s = folder, left_s
        self._on_devices = dict(environ)
        # One CPU device, whatever JAX is told to pretend.
        flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if "force_host_platform" not in flag]
        self._on_cpu = {**environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        self._last_words = ""
        self.devices: dict[str, Any] = {}

    def to(self, checks: Sequence[DeviceCheck], *, on_devices: bool) -> Generator[dict[str, Any], None, None]:
        """An answer for each check: `arrays` or `figures` with `seconds`, or why it `failed`. Fewer, where the time is
        over.
        """
        waiting, has_begun = list(checks), False
        while waiting and self._left_s() > 0:
            with closing(self._lines(waiting, on_devices=on_devices)) as lines:
                for line in lines:
                    if "platform" in line:
                        self.devices, has_begun = line if on_devices else self.devices, True
                        continue
                    if "arrays" in line:
                        with np.load(line["arrays"], allow_pickle=False) as arrays:
                            line["arrays"] = dict(arrays)
                    waiting.pop(0)
                    yield line
            if waiting and self._left_s() > 0:
                # The process is gone. Where one does not find its devices, no other one would.
                gone = 1 if has_begun else len(waiting)
                del waiting[:gone]
                yield from [{"failed": self._last_words}] * gone

    def _lines(self, checks: Sequence[DeviceCheck], *, on_devices: bool) -> Generator[dict[str, Any], None, None]:
        """The lines of a process, which is killed when nobody reads on."""
        side = "devices" if on_devices else "cpu"
        request = {
            "folder": self._folder,
            "on_devices": on_devices,
            "arrays": f"{self._folder}/{side}",
            "checks": [check._asdict() for check in checks],
        }
        environ = self._on_devices if on_devices else self._on_cpu
        code, words = yield from answers_of(CHILD, request, environ=environ, limit_s=self._left_s())
        self._last_words = f"the process ended with {code}: {last_line(words)}"


def last_line(text: str) -> str:
    """The last one that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
