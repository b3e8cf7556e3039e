"""What a check found, when two results agree, and the page that a person reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podembed.orchestrator.api.text import columns, format_bytes, format_duration, printable

AGREES, DIFFERS, FAILED, NOT_RUN, MEASURED = "agrees", "DIFFERS", "FAILED", "not run", "measured"

TOLERANCES: Mapping[str, float] = {
    "bits": 0.0,
    "float32": 1e-4,
    "tensorfloat32": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest difference after a few steps, relative to the largest value of an array. float32 rounds by 6e-8, and sums
have another order on devices; products are those of `jax_default_matmul_precision=highest`. TensorFloat-32 rounds by
5e-4, bfloat16 by 4e-3.
"""
OF_DEFAULT = {"cpu": "float32", "gpu": "tensorfloat32", "tpu": "bfloat16"}
"""How a platform multiplies float32 if nobody says otherwise."""

NOTE = (
    "TPUs multiply float32 as bfloat16 by default, and newer GPUs as TensorFloat-32, so results differ from a CPU's by "
    f"up to {TOLERANCES['bfloat16']:.0e} and {TOLERANCES['tensorfloat32']:.0e}. All checks but those that name another "
    f"type ask for full products (JAX_DEFAULT_MATMUL_PRECISION=highest), so {TOLERANCES['float32']:.0e} must hold."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFinding:
    """What one check found.

    Attributes:
      name: what was checked.
      state: one of the words above.
      sentence: why it failed or was not run, or where it differs most.
      figures: numbers, as JSON has them.
      seconds: duration on the devices.
    """

    name: str
    state: str
    sentence: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        values = {"check": self.name, "state": self.state, "seconds": self.seconds, "figures": dict(self.figures)}
        return {**values, "sentence": self.sentence} if self.sentence else values


def compared(
    name: str, kind: str, ours: Mapping[str, Any], expected: Mapping[str, Any], seconds: float
) -> DeviceFinding:
    """The largest differences between two sets of arrays, and whether all are within the tolerance of a kind."""
    tolerance, most, largest, where = TOLERANCES[kind], 0.0, 0.0, ""
    for key in sorted({*ours, *expected}):
        if key not in ours or key not in expected or ours[key].shape != expected[key].shape:
            return DeviceFinding(
                name=name, state=FAILED, sentence=f"{key} has another shape, or is missing", seconds=seconds
            )
        one, other = ours[key].astype(np.float64), expected[key].astype(np.float64)
        # Both may lack a number; what one of them lacks is as wrong as can be.
        apart = np.where(np.isnan(one) & np.isnan(other), 0.0, np.abs(one - other))
        absolute = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
        scale = float(np.nan_to_num(np.abs(other)).max(initial=0.0))
        relative = absolute / scale if scale else absolute
        largest = max(largest, absolute)
        if relative >= most:
            most, where = relative, key
    is_within = most <= tolerance
    return DeviceFinding(
        name=name,
        state=AGREES if is_within else DIFFERS,
        sentence="" if is_within else f"{where} differs most",
        figures={
            "relative": _finite(most),
            "absolute": _finite(largest),
            "tolerance": tolerance,
            "type": kind,
            "where": where,
        },
        seconds=seconds,
    )


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if np.isfinite(value) else "not finite"


def without_names(text: str, names: Sequence[str]) -> str:
    """One line of a message without paths, addresses and these names."""
    line = next((line.strip() for line in text.strip().splitlines() if line.strip()), "")
    line = re.sub(r"(?<![\w.])(?:~|[a-z][a-z0-9+]*://|/)[^\s'\",;:)]+(?:/[^\s'\",;:)]*)*", "<path>", line)
    line = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]+\]:\d+", "<address>", line)
    for name in filter(None, names):
        line = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", line)
    return line[:400]


def page(report: Mapping[str, Any]) -> str:
    """The report as a stranger reads it."""
    device, found = report["devices"], report["checks"]
    kind = f"{device['count']} x {device['kind']}" if device else "devices that could not be asked"
    lines = [f"podembed {report['versions']['podembed']} on {kind}, {format_duration(report['seconds'])}", ""]
    rows = [("check", "", "largest relative difference", "tolerance", "")]
    for one in found:
        figures, numbers = one["figures"], ("", "")
        if "relative" in figures:
            numbers = _text(figures["relative"]), f"{figures['tolerance']:.0e}"
        rows.append((one["check"], one["state"], numbers[0], numbers[1], one.get("sentence", "")))
    lines += [columns(rows), "", *textwrap.wrap(NOTE, 100)]
    by_name = {one["check"]: one["figures"] for one in found}
    if copies := by_name.get("copies"):
        table = [("copies", "to devices", "from a device")]
        table += [
            (format_bytes(int(size)), f"{one['to_devices_gb_s']} GB/s", f"{one['from_a_device_gb_s']} GB/s")
            for size, one in copies.items()
        ]
        lines += ["", columns(table)]
    if steps := by_name.get("steps"):
        table = [("samples a step", "one step", "samples a second")]
        table += [(f"{int(num):,}", f"{one['ms']} ms", f"{one['samples_s']:,}") for num, one in steps.items()]
        lines += ["", columns(table)]
    if bound := by_name.get("bound"):
        lines += [
            "",
            f"A step of {bound['samples']:,} samples took {bound['measured_ms']} ms. `podembed compile` bounds it at "
            f"{bound['bound_ms']} ms ({bound['bound_by']}), so it took {bound['times']} times as long.",
        ]
    if "total_s" in (recovery := by_name.get("recovery", {})):
        lines += ["", f"A run went on {recovery['total_s']:.1f} s after its device process was killed."]
    states = [one["state"] for one in found]
    lines += ["", ", ".join(f"{state}: {states.count(state)}" for state in dict.fromkeys(states))]
    return printable("\n".join(lines))


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"
