"""The constants of a machine as text."""

from __future__ import annotations

from podembed.embedding.costs.constants import KINDS, Kernels
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.workers.calibration.record import Calibration, PodCorrections
from podembed.workers.liveness.progress import Phase


def rendered(found: Calibration) -> str:
    """The table of `podembed calibrate`."""
    parts = [f"{found.machine.describe()}, hosts with {found.threads} thread(s)"]
    for kernels in found.kernels:
        together = "alone" if kernels.num_processes == 1 else f"{kernels.num_processes} processes side by side"
        parts += [f"memory, {together}: ns for a random row of 64 bytes", _memory(kernels)]
        parts += [f"lookups, {together}: ns for one of each", _factors(kernels)]
    rows = [("dense step", "overhead µs", "GFLOP/s", "GB/s")]
    for count, dense in found.dense.items():
        name = "alone" if count == "1" else f"{count} side by side"
        rows.append((name, f"{1e6 * dense.step_s:.0f}", _rate(dense.flop_s), _rate(dense.byte_s)))
    parts.append(columns(rows))
    wire = found.wire
    parts.append(
        columns(
            [
                ("exchange between hosts", "µs", "µs a peer", "MB/s each way"),
                (
                    "loopback",
                    f"{1e6 * wire.exchange_s:.0f}",
                    f"{1e6 * wire.peer_s:.0f}",
                    f"{1e-6 / wire.byte_s:,.0f}" if wire.byte_s else "-",
                ),
            ]
        )
    )
    parts.append(f"reading Parquet: {1e6 * found.sample_s:.2f} µs a sample, {1e9 * found.id_s:.1f} ns an id")
    parts += [f"{plural(pod.hosts, 'host')} in runs of made-up jobs\n{_corrections(pod)}" for pod in found.pods]
    return printable("\n\n".join(parts))


def _corrections(pod: PodCorrections) -> str:
    rows = [("phase", "times what it takes alone", "and µs more", "and of the work before", "fit off by")]
    for name, fit in [*pod.phases.items(), ("device", pod.device), (str(Phase.BETWEEN), pod.between)]:
        rows.append((name, f"{fit.factor:.2f}", f"{1e6 * fit.constant_s:.0f}", f"{fit.before:.1%}", f"{fit.error:.0%}"))
    return columns(rows) + f"\na second of reading makes steps {pod.reading:.2f} s longer"


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.1f}" if seconds else "-"


def _memory(kernels: Kernels) -> str:
    memory = kernels.memory
    sizes = tuple(format_bytes(size) for size in memory.size_bytes)
    return columns([("in", *sizes), ("ns", *(f"{value:.1f}" for value in memory.row_ns))])


def _factors(kernels: Kernels) -> str:
    rows = [("phase", *(kind.replace("_", " ") for kind in KINDS), "fit off by")]
    for key, factors in sorted(kernels.factors_ns.items()):
        cells = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value else "-" for value in factors)
        rows.append((key, *cells, f"{kernels.errors[key]:.0%}"))
    return columns(rows)
