"""`podembed check-device`: its flags, the page that it prints, and the report that it writes."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

EXIT_DIFFERS, EXIT_INTERRUPTED = 1, 130
_VERSIONS = ("podembed", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")


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


def run(command: CheckDevice, environ: Mapping[str, str], *, monotonic_s: Callable[[], float]) -> int:
    """Checks, prints and writes. Returns the exit code.

    Raises:
      ConfigurationError: there is no such check, or the file cannot be written.
    """
    # Imported late: `--help` should not wait for JAX.
    from podembed.jobs.check_device.checks import NAMES, Checking
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
    ends, found = began + 60 * command.minutes, list[DeviceFinding]()
    with tempfile.TemporaryDirectory(prefix="podembed-check-") as folder:
        checking = Checking(folder, environ, lambda: ends - monotonic_s())
        try:
            with closing(checking.of(wanted)) as findings:
                for one in findings:
                    print(f"{one.name}: {one.state}", file=sys.stderr, flush=True)
                    found.append(one)
        except KeyboardInterrupt:
            code, why = EXIT_INTERRUPTED, "interrupted"
    missing = [name for name in wanted if name not in {one.name for one in found}]
    found += [DeviceFinding(name=name, state=NOT_RUN, sentence=why) for name in missing]
    versions = {name: version for name in _VERSIONS if (version := _version(name))}
    report = {
        "versions": {**versions, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
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
