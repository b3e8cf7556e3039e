"""`podembed check-device`: its flags, its checks in their order, and the processes that do them.

A check is done by a process on the devices and by one on the CPU, with the same inputs. A process that dies is followed
by another one, for the checks behind the one that it died of. What the budget leaves no time for is listed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from podembed.jobs.check_device.findings import DeviceFinding

EXIT_DIFFERS, EXIT_INTERRUPTED = 1, 130
CHILD = "podembed.jobs.check_device.child"
_VERSIONS = ("podembed", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")
_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
"""Kinds of TPUs as JAX calls them, and as `podembed compile` does."""


@dataclass(frozen=True, kw_only=True)
class CheckDevice:
    """Check that this machine's TPUs or GPUs compute what its CPU computes, and measure them: copies, steps, the three
    places of tables, and the recovery of a run. Prints a page, and writes a report that names no machine and no path.
    Exits with 1 if a number disagrees or a check fails.
    """

    out: str
    """File of the report, in JSON."""
    minutes: float = 20.0
    """Minutes that it may take. What does not fit is listed as not run."""
    only: tuple[str, ...] = ()
    """Checks to do, by their names in the report or their beginnings. Default: all."""


class _Check(NamedTuple):
    """`does` is a function of the processes; `type` names a tolerance, empty for what is measured and not compared."""

    name: str
    does: str
    type: str = ""
    arguments: Mapping[str, Any] = {}
    precision: str = "highest"


def _run(name: str, model: str, *, type: str = "float32", precision: str = "highest", **arguments: Any) -> _Check:
    return _Check(name, "run", type, {"model": model, **arguments}, precision)


_DLRM = _run("dlrm", "dlrm")
_COMPARED = (
    _Check("bits", "bits", "bits"),
    _DLRM,
    _run("dlrm, products by default", "dlrm", type="default", precision="default"),
    _run("dlrm in bfloat16", "dlrm", type="bfloat16", compute_dtype="bfloat16"),
    *(_run(f"tables on {place}", "tables", place=place) for place in ("host", "replicated", "sharded")),
    _Check("pieces", "pieces", "float32"),
    _run("sasrec, sharded", "sasrec", place="sharded"),
    *(_run(model, model) for model in ("hstu", "din", "dcn_v2", "deepfm", "two_towers")),
)
_MEASURED = (_Check("copies", "copies"), _Check("steps", "steps", "", {"batch_sizes": (512, 2048, 8192)}))
_OTHERS = ("bound", "recovery")
NAMES = (*(check.name for check in (*_COMPARED, *_MEASURED)), *_OTHERS)


def run(command: CheckDevice, environ: Mapping[str, str], *, monotonic_s: Callable[[], float]) -> int:
    """Checks, prints and writes. Returns the exit code.

    Raises:
      ConfigurationError: there is no such check, or the file cannot be written.
    """
    from podembed.jobs.check_device.findings import DIFFERS, FAILED, NOT_RUN, DeviceFinding, page
    from podembed.orchestrator.api.config import ConfigurationError

    if unknown := [name for name in command.only if not any(known.startswith(name) for known in NAMES)]:
        raise ConfigurationError(f"Found --only {unknown[0]!r}. Expected the beginning of one of {', '.join(NAMES)}.")
    out = Path(command.out)
    try:
        # Before the time is spent.
        out.touch()
    except OSError as error:
        raise ConfigurationError(f"Found that --out cannot be written: {error}. Name another file.") from error
    wanted = [name for name in NAMES if not command.only or name.startswith(command.only)]
    began, code, why = monotonic_s(), 0, "no time was left; give more --minutes"
    found: list[DeviceFinding] = []
    with tempfile.TemporaryDirectory(prefix="podembed-check-") as folder:
        checking = _Checking(folder, environ, began + 60 * command.minutes, monotonic_s)
        try:
            with closing(checking.all(wanted)) as findings:
                for one in findings:
                    print(f"{one.name}: {one.state}", file=sys.stderr, flush=True)
                    found.append(one)
        except KeyboardInterrupt:
            code, why = EXIT_INTERRUPTED, "interrupted"
    missing = [name for name in wanted if name not in {one.name for one in found}]
    found += [DeviceFinding(name=name, state=NOT_RUN, sentence=why) for name in missing]
    report = {
        "versions": {name: version for name in _VERSIONS if (version := _version(name))}
        | {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"},
        "devices": checking.devices,
        "seconds": round(monotonic_s() - began, 1),
        "checks": [one.as_json() for one in found],
    }
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(page(report))
    return code or (EXIT_DIFFERS if any(one.state in (DIFFERS, FAILED) for one in found) else 0)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class _Checking:
    """The checks of one command. Mutated: what is known of the devices, and arrays of the CPU by check."""

    def __init__(
        self, folder: str, environ: Mapping[str, str], ends_s: float, monotonic_s: Callable[[], float]
    ) -> None:
        self._folder, self._ends_s, self._monotonic_s = folder, ends_s, monotonic_s
        self._on_devices = dict(environ)
        # One CPU device, whatever JAX is told to pretend.
        flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if "force_host_platform" not in flag]
        self._on_cpu = {**environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        self._names = (platform.node(), platform.node().split(".")[0], Path.home().name)
        self.devices: dict[str, Any] = {}
        self._last_words = ""
        self._expected: dict[str, Mapping[str, Any]] = {}
        self._steps: Mapping[str, Any] = {}

    @property
    def _left_s(self) -> float:
        return self._ends_s - self._monotonic_s()

    def all(self, wanted: Sequence[str]) -> Generator[DeviceFinding, None, None]:
        """The findings of these checks, as they come. Ends where the time does."""
        from podembed.jobs.check_device.jobs import write_rows

        write_rows(Path(self._folder))
        both = [check for check in _COMPARED if check.name in wanted]
        yield from self._compared(both)
        measured = [check for check in _MEASURED if check.name in wanted]
        with closing(self._answers(measured, on_devices=True)) as answers:
            for check, answer in zip(measured, answers, strict=False):
                yield self._finding(check, answer)
        for name, does in (("bound", self._bound), ("recovery", self._recovery)):
            if name in wanted and self._left_s > 0:
                yield does()

    def _compared(self, checks: Sequence[_Check]) -> Generator[DeviceFinding, None, None]:
        ours, theirs = (self._answers(checks, on_devices=on_devices) for on_devices in (True, False))
        with closing(ours), closing(theirs):
            for check, one, other in zip(checks, ours, theirs, strict=False):
                if "arrays" in other:
                    self._expected[check.name] = other["arrays"]
                yield self._finding(check, one, other)

    def _finding(
        self, check: _Check, answer: Mapping[str, Any], other: Mapping[str, Any] | None = None
    ) -> DeviceFinding:
        from podembed.jobs.check_device.findings import FAILED, MEASURED, DeviceFinding, compared

        where = "on the CPU: " if other and "failed" in other else ""
        if failed := answer.get("failed") or (other or {}).get("failed"):
            return DeviceFinding(name=check.name, state=FAILED, sentence=where + self._told(failed))
        if other is None:
            self._steps = answer["figures"] if check.name == "steps" else self._steps
            return DeviceFinding(name=check.name, state=MEASURED, figures=answer["figures"], seconds=answer["seconds"])
        return compared(check.name, self._type(check.type), answer["arrays"], other["arrays"], answer["seconds"])

    def _type(self, name: str) -> str:
        from podembed.jobs.check_device.findings import OF_DEFAULT

        return OF_DEFAULT.get(self.devices.get("platform", ""), "bfloat16") if name == "default" else name

    def _told(self, text: str) -> str:
        from podembed.jobs.check_device.findings import without_names

        return without_names(text, self._names)

    def _answers(self, checks: Sequence[_Check], *, on_devices: bool) -> Generator[dict[str, Any], None, None]:
        """An answer for each check. Fewer, where the time is over."""
        import numpy as np

        waiting, has_begun = list(checks), False
        while waiting and self._left_s > 0:
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
            if waiting and self._left_s > 0:
                # The process is gone. Where none finds its devices, no other one would.
                gone = 1 if has_begun else len(waiting)
                del waiting[:gone]
                yield from [{"failed": self._last_words}] * gone

    def _lines(self, checks: Sequence[_Check], *, on_devices: bool) -> Generator[dict[str, Any], None, None]:
        """The lines of a process. It is killed when the time is over, or nobody reads on."""
        side = "devices" if on_devices else "cpu"
        request = {
            "folder": self._folder,
            "on_devices": on_devices,
            "arrays": f"{self._folder}/{side}",
            "checks": [check._asdict() for check in checks],
        }
        asked = Path(self._folder, f"{side}.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        with asked.open() as source, Path(self._folder, f"{side}.log").open("w+", errors="replace") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", CHILD],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env=self._on_devices if on_devices else self._on_cpu,
            )
            timer = threading.Timer(self._left_s, process.kill)
            timer.start()
            try:
                yield from map(json.loads, process.stdout or ())
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()
            words.seek(0)
            last = [line.strip() for line in words.read().splitlines() if line.strip()]
            self._last_words = f"the process ended with {code}: {last[-1] if last else 'without a word'}"

    def _bound(self) -> DeviceFinding:
        """The longest measured step beside what the TPU's compiler makes of it."""
        from podembed.jobs.check_device.findings import FAILED, MEASURED, NOT_RUN, DeviceFinding
        from podembed.orchestrator.api.config import ConfigurationError
        from podembed.tools.preflight.compiling import compile_for
        from podembed.tools.preflight.slices import parse_slice
        from podembed.workers.job.reference import JobReference

        kind, count = _KINDS.get(self.devices.get("kind", "")), self.devices.get("count", 0)
        if kind is None or not self._steps:
            why = (
                "no step was measured" if kind else f"`podembed compile` knows TPUs, and no {self.devices.get('kind')}"
            )
            return DeviceFinding(name="bound", state=NOT_RUN, sentence=why)
        samples = max(map(int, self._steps))
        job = JobReference(function="podembed.jobs.check_device.jobs:timed_job", arguments={"batch_size": samples})
        try:
            # Names of v4, v5p and tpu7x count two cores a chip. JAX shows those of tpu7x alone as devices.
            wanted = parse_slice(f"{kind}-{2 * count if kind in ('v4', 'v5p') else count}", num_hosts=1)
            (account,) = compile_for(job, [wanted], environ=self._on_devices)
        except ConfigurationError as error:
            return DeviceFinding(name="bound", state=NOT_RUN, sentence=self._told(str(error)))
        programs = [one for one in account.programs if one.name.startswith("train")]
        if not programs:
            why = account.refusal or next(iter(account.failures.values()), "nothing was compiled")
            return DeviceFinding(name="bound", state=FAILED, sentence=self._told(why))
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
        from podembed.jobs.check_device.findings import FAILED, DeviceFinding, compared
        from podembed.jobs.check_device.programs import NUM_STEPS, committed

        faults = [{"point": "device.step", "action": "kill", "rank": "device 0", "step": NUM_STEPS - 1}]
        plan, words = Path(self._folder, "plan.json"), Path(self._folder, "recovery.log")
        plan.write_text(json.dumps({"folder": f"{self._folder}/faults", "faults": faults}), encoding="utf-8")
        count, platform_of = self.devices.get("count", 1), self.devices.get("platform", "cpu")
        resources = {"gpu": ("--resources", "CPU=2", f"GPU={count}"), "tpu": ("--resources", "CPU=2", f"TPU={count}")}
        line = [sys.executable, "-m", "podembed", "train", "--job", "podembed.jobs.check_device.jobs:check_job"]
        line += ["--set", f"rows={self._folder}/rows.parquet", "model=dlrm", "--storage", self._folder]
        line += ["--name", "killed", "--log", "json", "--max-steps", str(NUM_STEPS), "--checkpoint-every", "1"]
        line += ["--fault-plan", str(plan), *resources.get(platform_of, ("--devices-per-host", str(count)))]
        seconds: list[float] = []
        with words.open("w+", errors="replace") as errors:
            process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._on_devices)
            timer = threading.Timer(self._left_s, process.terminate)
            timer.start()
            try:
                for text in process.stdout or ():
                    with suppress(json.JSONDecodeError):
                        event = json.loads(text)
                        seconds += [event["values"]["total_s"]] if event["event"] == "recovery" else []
                code = process.wait()
            finally:
                timer.cancel()
                process.terminate()
                process.wait()
        if code or not seconds:
            text = words.read_text(errors="replace").strip().splitlines()[-1:] or ["without a word"]
            why = f"the run ended with {code} after {len(seconds)} recoveries: {text[0]}"
            return DeviceFinding(name="recovery", state=FAILED, sentence=self._told(why))
        expected = self._expected.get(_DLRM.name)
        if expected is None:
            expected = next(self._answers([_DLRM], on_devices=False), {}).get("arrays", {})
        rows = {key: values for key, values in expected.items() if key not in ("losses", "evaluation")}
        found = compared("recovery", self._type("default"), committed(f"{self._folder}/killed"), rows, seconds[0])
        return replace(found, figures={**found.figures, "total_s": seconds[0]})
