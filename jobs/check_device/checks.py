"""The checks of `podembed check-device`, in their order.

Most are done by a process on the devices and by one on the CPU, with the same inputs, and their arrays are compared.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from podembed.jobs.check_device.answers import Answers, DeviceCheck, last_line
from podembed.jobs.check_device.findings import (
    FAILED,
    MEASURED,
    NOT_RUN,
    OF_DEFAULT,
    DeviceFinding,
    compared,
    without_names,
)
from podembed.jobs.check_device.jobs import write_rows
from podembed.jobs.check_device.programs import NUM_STEPS, committed
from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.preflight.compiling import compile_for
from podembed.tools.preflight.slices import CHIPS, parse_slice
from podembed.workers.job.reference import JobReference

_JOBS = "podembed.jobs.check_device.jobs"
# Kinds of TPUs as JAX calls them: those of `podembed compile`, and by how much the number in a slice's name is larger
# than that of devices. Names of v4, v5p and tpu7x count two cores a chip, of which JAX shows those of tpu7x alone.
_KINDS = {
    "TPU v4": ("v4", 2),
    "TPU v5 lite": ("v5e", 1),
    "TPU v5": ("v5p", 2),
    "TPU v6 lite": ("v6e", 1),
    "TPU7x": ("tpu7x", 1),
}


def _run(name: str, model: str, *, type: str = "float32", precision: str = "highest", **arguments: Any) -> DeviceCheck:
    return DeviceCheck(name, "run", type, {"model": model, **arguments}, precision)


_DLRM = _run("dlrm", "dlrm")
_COMPARED = (
    DeviceCheck("bits", "bits", "bits"),
    _DLRM,
    _run("dlrm, products by default", "dlrm", type="default", precision="default"),
    _run("dlrm in bfloat16", "dlrm", type="bfloat16", compute_dtype="bfloat16"),
    *(_run(f"tables on {place}", "tables", place=place) for place in ("host", "replicated", "sharded")),
    DeviceCheck("pieces", "pieces", "float32"),
    _run("sasrec, sharded", "sasrec", place="sharded"),
    *(_run(model, model) for model in ("hstu", "din", "dcn_v2", "deepfm", "two_towers")),
)
_MEASURED = (DeviceCheck("copies", "copies"), DeviceCheck("steps", "steps", "", {"batch_sizes": (512, 2048, 8192)}))
NAMES = (*(check.name for check in (*_COMPARED, *_MEASURED)), "bound", "recovery")


class Checking:
    """The checks of one command. Mutated: what checks need of those before them.

    Args:
      folder: empty folder, which is theirs.
      environ: environment of their processes.
      left_s: seconds that are left.
    """

    def __init__(self, folder: str, environ: Mapping[str, str], left_s: Callable[[], float]) -> None:
        self._folder, self._environ, self._left_s = folder, environ, left_s
        self._answers = Answers(folder, environ, left_s)
        self._names = (platform.node(), platform.node().split(".")[0], Path.home().name)
        self._expected: Mapping[str, Any] = {}
        self._steps: Mapping[str, Any] = {}

    @property
    def devices(self) -> dict[str, Any]:
        """What is known of the devices."""
        return self._answers.devices

    def of(self, names: Sequence[str]) -> Generator[DeviceFinding, None, None]:
        """The findings of these checks, as they come. Ends where the time does."""
        write_rows(Path(self._folder))
        both = [check for check in _COMPARED if check.name in names]
        with (
            closing(self._answers.to(both, on_devices=True)) as ours,
            closing(self._answers.to(both, on_devices=False)) as theirs,
        ):
            for check, one, other in zip(both, ours, theirs, strict=False):
                if check is _DLRM:
                    self._expected = other.get("arrays", {})
                yield self._compared(check, one, other)
        measured = [check for check in _MEASURED if check.name in names]
        with closing(self._answers.to(measured, on_devices=True)) as answers:
            for check, answer in zip(measured, answers, strict=False):
                yield self._measured(check, answer)
        for name, does in (("bound", self._bound), ("recovery", self._recovery)):
            if name in names and self._left_s() > 0:
                yield does()

    def _compared(self, check: DeviceCheck, one: Mapping[str, Any], other: Mapping[str, Any]) -> DeviceFinding:
        if "failed" in one:
            return self._failed(check.name, one["failed"])
        if "failed" in other:
            return self._failed(check.name, f"on the CPU: {other['failed']}")
        kind = self._default_type if check.type == "default" else check.type
        return compared(check.name, kind, one["arrays"], other["arrays"], one["seconds"])

    def _measured(self, check: DeviceCheck, answer: Mapping[str, Any]) -> DeviceFinding:
        if "failed" in answer:
            return self._failed(check.name, answer["failed"])
        self._steps = answer["figures"] if check.name == "steps" else self._steps
        return DeviceFinding(name=check.name, state=MEASURED, figures=answer["figures"], seconds=answer["seconds"])

    def _failed(self, name: str, why: str, state: str = FAILED) -> DeviceFinding:
        return DeviceFinding(name=name, state=state, sentence=without_names(why, self._names))

    @property
    def _default_type(self) -> str:
        return OF_DEFAULT.get(self.devices.get("platform", ""), "bfloat16")

    def _bound(self) -> DeviceFinding:
        """The longest measured step beside what the TPU's compiler makes of it."""
        if not self._steps:
            return self._failed("bound", "no step was measured; `steps` does that", NOT_RUN)
        kind = self.devices["kind"]
        if kind not in _KINDS:
            return self._failed("bound", f"`podembed compile` knows TPUs, and no {kind}", NOT_RUN)
        samples, (name, cores) = max(map(int, self._steps)), _KINDS[kind]
        job = JobReference(function=f"{_JOBS}:timed_job", arguments={"batch_size": samples})
        try:
            wanted = parse_slice(f"{name}-{cores * self.devices['count']}", num_hosts=1)
            (account,) = compile_for(job, [wanted], environ=self._environ)
        except ConfigurationError as error:
            return self._failed("bound", str(error), NOT_RUN)
        programs = [one for one in account.programs if one.name.startswith("train")]
        if not programs:
            return self._failed("bound", account.refusal or next(iter(account.failures.values()), "nothing compiled"))
        part, seconds = programs[0].bound(account.wanted.rates)
        measured_ms = self._steps[str(samples)]["ms"]
        figures = {
            "samples": samples,
            "measured_ms": measured_ms,
            "bound_ms": round(1e3 * seconds, 3),
            "bound_by": part,
            "times": round(measured_ms / 1e3 / seconds, 1),
            "topology": wanted.compiler_name,
        }
        return DeviceFinding(name="bound", state=MEASURED, figures=figures)

    def _recovery(self) -> DeviceFinding:
        """A run of which the device process is killed. It must end as the undisturbed one on the CPU."""
        if not self.devices:
            # No check before has found out what they are.
            with closing(self._answers.to([_DLRM], on_devices=True)) as answers:
                next(answers, None)
        if not self.devices:
            return self._failed("recovery", "the devices could not be asked what they are", NOT_RUN)
        seconds, code, last = self._killed_run()
        if self._left_s() <= 0:
            return self._failed("recovery", "the time was over; --minutes gives more", NOT_RUN)
        if code or not seconds:
            return self._failed("recovery", f"the run ended with {code} after {len(seconds)} recoveries: {last}")
        expected = self._expected or next(self._answers.to([_DLRM], on_devices=False), {}).get("arrays", {})
        rows = {key: values for key, values in expected.items() if key not in ("losses", "evaluation")}
        found = compared("recovery", self._default_type, committed(f"{self._folder}/killed"), rows, seconds[0])
        return replace(found, figures={**found.figures, "total_s": seconds[0]})

    def _killed_run(self) -> tuple[list[float], int, str]:
        """The seconds of its recoveries, its exit code, and the last line of its complaints."""
        faults = [{"point": "device.step", "action": "kill", "rank": "device 0", "step": NUM_STEPS - 1}]
        plan, words = Path(self._folder, "plan.json"), Path(self._folder, "recovery.log")
        plan.write_text(json.dumps({"folder": f"{self._folder}/faults", "faults": faults}), encoding="utf-8")
        count, kind = self.devices.get("count", 1), self.devices.get("platform")
        devices = ("--devices-per-host", str(count))
        if kind in ("gpu", "tpu"):
            # Ray counts chips.
            chips = count // CHIPS["v7x"].devices if self.devices["kind"] == "TPU7x" else count
            devices = ("--resources", "CPU=2", f"{kind.upper()}={chips}")
        line = [sys.executable, "-m", "podembed", "train", "--job", f"{_JOBS}:check_job"]
        line += ["--set", f"rows={self._folder}/rows.parquet", "model=dlrm", "--storage", self._folder]
        line += ["--name", "killed", "--log", "json", "--max-steps", str(NUM_STEPS), "--checkpoint-every", "1"]
        line += ["--fault-plan", str(plan), *devices]
        seconds: list[float] = []
        with words.open("w+", errors="replace") as errors:
            process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environ)
            timer = threading.Timer(self._left_s(), process.terminate)
            timer.start()
            try:
                for text in process.stdout or ():
                    with suppress(json.JSONDecodeError):
                        event = json.loads(text)
                        seconds += [round(event["values"]["total_s"], 2)] if event["event"] == "recovery" else []
                code = process.wait()
            finally:
                timer.cancel()
                process.terminate()
                process.wait()
        return seconds, code, last_line(words.read_text(errors="replace"))
