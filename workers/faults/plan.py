"""`FaultPlan`: which faults a run is to suffer, where and when. Values, and the names of all points; nothing
happens here.

A fault names a point in the code, the process, the step and the hit at which it strikes, and what it does there. Plans
are made by `podembed chaos` or by hand, and reach the driver and its workers as fields of their settings. A run without
one has no fault points at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_STEP_PHASES = {
    "read": "the batch is about to be read",
    "dedup": "distinct ids are about to be found",
    "id_exchange": "ids are about to go to their owners",
    "group": "bags of pooled tables are about to be grouped by row",
    "split": "rows that the step under way does not touch are about to be found",
    "early_gather": "rows are about to be gathered ahead of the update",
    "early_pool": "bags are about to be pooled ahead of the update",
    "early_exchange": "what was found early is about to be exchanged",
    "gather": "rows are about to be gathered",
    "pool_for_others": "bags of other hosts are about to be pooled",
    "pool": "own bags are about to be pooled",
    "activation_exchange": "rows and pooled vectors are about to be sent or awaited; hit twice a step",
    "device": "the device is about to be awaited",
    "gradient_sum": "gradients are about to be summed per row",
    "gradient_exchange": "gradients are about to be exchanged",
    "update": "tables are about to be updated",
}

POINTS: Mapping[str, str] = {
    **{f"step.{phase}": f"host, in a step: {what}" for phase, what in _STEP_PHASES.items()},
    "step.update.between": "host: a table is about to be updated; hit once a table",
    "step.update.mid": "host: half of the rows of a table are updated, the others not; hit once a table; kill, stop "
    "and raise only",
    "step.done": "host: a step is done",
    "step.end_of_window": "host: a window of steps is done and not yet reported",
    "step.wait_for_save": "host: an update waits for the save under way",
    "start.begin": "host or device: a worker is about to start",
    "start.ready": "host or device: a worker has started and not yet said so",
    "step.join": "device: it is about to join its host and its gang",
    "step.compile": "device: it is about to compile",
    "step.serve": "device: it is about to serve a window",
    "step.undo": "host: it lived on, and is about to go back to the commit in memory",
    "step.restore": "host or device: a commit is about to be restored",
    "step.bucket_exchange": "host: buckets that get another owner are about to be offered",
    "move.round": "host: buckets are about to be sent to their new owners; hit once a round",
    "restore.file": "host: a bucket or a delta has been restored",
    "verify.begin": "host: buckets that it kept are about to be compared with the commit; nan spoils the first one",
    "verify.bucket": "host: a bucket that it kept is about to be compared with the commit; nan makes it a wrong one",
    "device.step": "device: a batch is about to be trained; nan spoils the activations",
    "device.gradients": "device: gradients lie in the shared memory and are not yet announced; nan spoils them",
    "step.copy_for_save": "device: dense arrays are about to be copied for a save",
    "save.begin": "host: the moment to be saved is about to be frozen",
    "save.write": "host: a save is about to be written",
    "save.file": "host or device: a bucket, or the dense arrays, are written",
    "save.receipt": "host: all is written and not yet reported",
    "driver.window": "driver: a window has been reported",
    "driver.acknowledge": "driver: a commit stands and is about to be told",
    "driver.fault": "driver: a generation is lost and the next one not yet claimed",
    "driver.recovered": "driver: a new generation runs after a fault",
    "storage.size": "any: the size of a file is about to be asked; the detail is its name",
    "storage.read": "any: a file is about to be read",
    "storage.write": "any: a file is about to be written",
    "storage.create": "any: a file is about to be created exclusively: claims, bases, manifests",
    "storage.replace": "any: a file is about to be replaced: heartbeats",
    "storage.written": "any: a file was written or created",
    "storage.list": "any: a folder is about to be listed",
    "storage.delete": "any: a file is about to be deleted",
    "mesh.send": "host: a frame is about to be sent; the detail is such as 'ROWS to 1'",
}

# What any point can do: it happens to the process, or to the call that is under way.
PROCESS_ACTIONS = frozenset({"kill", "stop", "raise", "delay", "signal", "no_space"})
_READS = frozenset({"short_read", "flip"})
_CREATES = frozenset({"torn", "lost", "lost_answer", "flip", "http_error", "throttle"})
_FRAMES = frozenset({"drop", "duplicate", "flip", "truncate", "cut"})
_DATA_ACTIONS: Mapping[str, frozenset[str]] = {
    "storage.size": frozenset({"http_error"}),
    "storage.read": _READS | {"http_error", "throttle"},
    "storage.write": _CREATES | {"kill_midway"},
    "storage.create": _CREATES | {"precondition_failed"},
    "storage.replace": frozenset({"http_error"}),
    "storage.list": frozenset({"stale", "http_error"}),
    "storage.delete": frozenset({"http_error"}),
    "mesh.send": _FRAMES,
    "verify.begin": frozenset({"nan"}),
    "verify.bucket": frozenset({"nan"}),
    "device.step": frozenset({"nan"}),
    "device.gradients": frozenset({"nan"}),
}
ACTIONS = frozenset().union(PROCESS_ACTIONS, *_DATA_ACTIONS.values())
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "raise": frozenset({"type", "message"}),
    "delay": frozenset({"seconds"}),
    "stop": frozenset({"wake_s"}),
    "signal": frozenset({"name"}),
    "flip": frozenset({"byte", "bit"}),
    "http_error": frozenset({"code"}),
    "throttle": frozenset({"bytes_per_s"}),
}


class JaxRuntimeError(RuntimeError):
    """Stands for the one type that JAX raises for everything: the driver goes by its name and its words."""


ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (OSError, RuntimeError, MemoryError, ValueError, ConnectionError, TimeoutError, JaxRuntimeError)
}
SIGNALS = frozenset({"SIGTERM", "SIGINT"})
_RANK = re.compile(r"driver|host|device|(host|device) \d{1,6}")


class FaultPlanError(ValueError):
    """A plan that cannot be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
      point: a key of `POINTS`.
      action: one of `ACTIONS` that the point can do.
      rank: `driver`, `host 0`, `device 1`; `host` and `device` mean any of them, None any process.
      step: the step that the process works on; None for any. Points of the storage and of the start know none.
      nth: at which hit it strikes, counted in each process by itself.
      times: how often it strikes in the whole run, at successive hits.
      for_s: after it struck it goes on striking for so many seconds, without being counted.
      match: regular expression that must be found in the point's detail.
      after: number of another fault of the plan, from 0, that must have struck before.
      arguments: arguments of the action. `type` and `message` of `raise`, `seconds` of `delay`, `wake_s` of `stop`,
        `name` of `signal`. Also `byte` and `bit` of `flip`, `code` of `http_error`, `bytes_per_s` of `throttle`.
    """

    point: str
    action: str
    rank: str | None = None
    step: int | None = None
    nth: int = 1
    times: int = 1
    for_s: float = 0.0
    match: str | None = None
    after: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise FaultPlanError(
                f"Found the fault point '{self.point}'. Expected one of:\n  " + "\n  ".join(sorted(POINTS))
            )
        can = PROCESS_ACTIONS | _DATA_ACTIONS.get(self.point, frozenset())
        if self.point == "step.update.mid":
            can = frozenset({"kill", "stop", "raise"})
        if self.action not in can:
            raise FaultPlanError(
                f"Found the action '{self.action}' at {self.point}. Expected one that this point can do: "
                f"{', '.join(sorted(can))}."
            )
        if self.rank is not None and not _RANK.fullmatch(self.rank):
            raise FaultPlanError(f"Found rank '{self.rank}'. Expected driver, host, device, or one such as 'host 0'.")
        if self.nth < 1 or self.times < 1 or self.for_s < 0 or (self.after or 0) < 0:
            raise FaultPlanError(
                f"Found nth={self.nth}, times={self.times}, for_s={self.for_s}, after={self.after}. Expected at least "
                "1, 1, 0 and 0."
            )
        if self.match is not None:
            _check_pattern(self.match)
        self._check_arguments()

    def _check_arguments(self) -> None:
        allowed = _ARGUMENTS.get(self.action, frozenset())
        if unknown := set(self.arguments) - allowed:
            raise FaultPlanError(
                f"Found arguments {sorted(unknown)} of the action '{self.action}'. Expected some of {sorted(allowed)}, "
                "or none."
            )
        kind = self.arguments.get("type", "RuntimeError")
        if kind not in ERRORS:
            raise FaultPlanError(f"Found the error type {kind!r}. Expected one of {', '.join(ERRORS)}.")
        if self.action == "signal" and self.arguments.get("name") not in SIGNALS:
            raise FaultPlanError(
                f"Found the signal {self.arguments.get('name')!r}. Expected one of {', '.join(sorted(SIGNALS))}."
            )
        numbers = {name: value for name, value in self.arguments.items() if name not in ("type", "message", "name")}
        wrong = [
            name for name, value in numbers.items() if isinstance(value, bool) or not isinstance(value, int | float)
        ]
        if wrong or any(value < 0 for value in numbers.values()):
            raise FaultPlanError(f"Found arguments {dict(self.arguments)}. Expected numbers of at least 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Faults of one run.

    Attributes:
      folder: where each fault that strikes is recorded first, so that it strikes once, in whichever process or attempt.
        A folder that all processes of the run reach.
    """

    folder: str
    faults: tuple[Fault, ...] = ()


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise FaultPlanError(f"Found match={pattern!r} ({error}). Expected a regular expression.") from error
