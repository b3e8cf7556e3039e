"""`compile_for`: has a process compile a job's programs for slices, and gathers what it found."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.preflight.account import ProgramAccount, account_of
from podembed.tools.preflight.answering import answers_of
from podembed.tools.preflight.slices import SliceShape
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.reference import JobReference

# Without a TPU, libtpu looks for one at addresses that do not answer, complains, and locks itself against a second
# process.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}
_LAST_WORDS = 2000  # characters


@dataclass(slots=True, kw_only=True)
class SliceAccount:
    """What was found for one slice. Mutated while it is compiled for.

    Attributes:
      wanted: the slice.
      num_slices: slices that train together.
      kind: what JAX calls its devices.
      num_devices, num_hosts: those of all slices.
      samples_per_device: samples of a device, with padding.
      table_bytes: bytes of the tables on each device.
      dense_bytes: bytes of parameters, their optimizer and state on each device.
      programs: programs that compiled.
      failures: why others did not, by their names.
      places: tables with place='auto', and where they are to lie and why.
      refusal: why the job cannot be trained on so many hosts or devices; empty if it can.
    """

    wanted: SliceShape
    num_slices: int
    kind: str = ""
    num_devices: int = 0
    num_hosts: int = 0
    samples_per_device: int = 0
    table_bytes: int = 0
    dense_bytes: int = 0
    programs: list[ProgramAccount] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    refusal: str = ""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        rates = self.wanted.rates
        return {
            "topology": self.wanted.name,
            "compiler_name": self.wanted.compiler_name,
            "num_slices": self.num_slices,
            "kind": self.kind,
            "num_devices": self.num_devices,
            "num_hosts": self.num_hosts,
            "samples_per_device": self.samples_per_device,
            "device_memory_bytes": rates.memory_bytes // rates.devices,
            "table_bytes": self.table_bytes,
            "dense_bytes": self.dense_bytes,
            "programs": [program.as_json(rates) for program in self.programs],
            "failures": self.failures,
            "places": {name: {"place": place, "why": why} for name, (place, why) in self.places.items()},
            "refusal": self.refusal,
        }


def require_libtpu() -> None:
    """Raises `ConfigurationError` where the TPU's compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigurationError(
            "Found no libtpu, which is the TPU's compiler. Expected it beside JAX; it needs no TPU. Install it: "
            "pip install 'podembed[tpu]', which is jax[tpu]."
        )


def compile_for(
    job: JobReference,
    slices: Sequence[SliceShape],
    *,
    num_slices: int = 1,
    options: DeviceOptions = DeviceOptions(),  # noqa: B008  # frozen
    is_all: bool = False,
    dump: str | None = None,
    environ: Mapping[str, str],
    notice: Callable[[str], None] = lambda text: None,
) -> list[SliceAccount]:
    """Compiles both steps of a job for each slice, in one process of its own.

    Args:
      num_slices: slices that train together.
      options: devices of a host, as for training.
      is_all: whether to compile for each room that sequences may have, and not only for the largest and the smallest.
      dump: folder for the texts of the programs; None for none.
      environ: environment of the process.
      notice: told the name of each program before it is compiled.

    Raises:
      ConfigurationError: libtpu is missing, or the job is refused.
    """
    if num_slices < 1:
        raise ConfigurationError(f"Found --slices {num_slices}. Expected at least 1. Leave it out for one slice.")
    require_libtpu()
    request = {
        "job": {"function": job.function, "arguments": dict(job.arguments), "folder": job.folder},
        "slices": [
            {
                "name": one.compiler_name,
                "host_bounds": one.host_bounds,
                "num_slices": num_slices,
                "memory_bytes": one.rates.memory_bytes // one.rates.devices,
            }
            for one in slices
        ],
        "devices_per_host": options.per_host,
        "mesh": options.mesh,
        "sparse_cores": options.has_sparse_cores,
        "all": is_all,
        "dump": dump,
    }
    found = [SliceAccount(wanted=one, num_slices=num_slices) for one in slices]
    current = 0, ""
    is_done = False
    for line in _lines_of(request, environ):
        if isinstance(line, str):
            # The process is gone. What it says is mostly a check of the compiler that failed.
            if not current[1] or is_done:
                raise ConfigurationError(f"Found that the compiling process ended before its time.\n{line}")
            found[current[0]].failures[current[1]] = f"the compiler ended its process: {line}"
            break
        is_done = is_done or "done" in line
        if "slice" not in line:
            if "refused" in line:
                raise ConfigurationError(line["refused"])
            continue
        account = found[line["slice"]]
        if "refused" in line:
            account.refusal = line["refused"]
        elif "begins" in line:
            current = line["slice"], line["begins"]
            notice(f"{account.wanted.name}: {line['begins']}")
        elif "places" in line:
            account.places = {name: (place, why) for name, (place, why) in line["places"].items()}
        elif "fails" in line:
            account.failures[line["fails"]] = line["why"]
        elif "program" in line:
            account.programs.append(account_of(line["program"]))
        else:
            for name in ("kind", "num_devices", "num_hosts", "samples_per_device", "table_bytes", "dense_bytes"):
                setattr(account, name, line[name])
    return found


def _lines_of(request: dict[str, Any], environ: Mapping[str, str]) -> Iterator[dict[str, Any] | str]:
    """The answers of the compiling process. At last a text, if it failed."""
    environ = {**environ, **ENVIRONMENT}
    code, words = yield from answers_of("podembed.tools.preflight.child", request, environ=environ)
    if code:
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        yield f"{ended}\n{words[-_LAST_WORDS:].strip()}"
