"""The constants of a machine as text."""

from __future__ import annotations

from podembed.embedding.costs.constants import KINDS, Kernels
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.workers.calibration.record import Calibration, PodCorrections

_LEAST_NS = 0.005


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
    heads = ("times what it takes alone", "µs more", "µs if cold", "µs a call", "ns a float", "fit off by")
    rows: list[tuple[str, ...]] = [("processor seconds of", *heads)]
    for name, fit in [*pod.phases.items(), ("device", pod.device)]:
        once = (f"{1e6 * fit.constant_s:.0f}", f"{1e6 * fit.cold_s:.0f}")
        more = (*once, f"{1e6 * fit.call_s:.1f}", f"{1e9 * fit.float_s:.2f}")
        rows.append((name, f"{fit.factor:.2f}", *more, f"{fit.error:.0%}"))
    waiting = pod.waiting
    return columns(rows) + (
        f"\nan exchange takes {1e6 * waiting.meeting_s:.0f} µs and {waiting.spread:.0%} of the work before it, "
        f"a batch {1e6 * waiting.input_s:.0f} µs, a device {1e6 * waiting.device_s:.0f} µs, without a processor"
        f"\nwhere processors are short, a device does {waiting.turn:.0%} of its step before its host goes on, then "
        f"gets {waiting.device_weight:.2f} times a host's share; "
        f"steps are off by {waiting.error:.0%}"
        f"\na second of decoding takes {pod.reading:.2f} s in a run"
    )


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.1f}" if seconds else "-"


def _memory(kernels: Kernels) -> str:
    memory, caches = kernels.memory, kernels.caches
    sizes = tuple(format_bytes(size) for size in memory.size_bytes)
    found = columns([("in", *sizes), ("ns", *(f"{value:.1f}" for value in memory.row_ns))])
    held = f"caches: L2 {format_bytes(caches.l2_bytes)}, L3 {format_bytes(caches.l3_bytes)}"
    return f"{found}\n{held}"


def _factors(kernels: Kernels) -> str:
    """Most kinds cost nothing in most phases, so a phase has those that do."""
    rows = [("phase", "fit off by", "")]
    for key, factors in sorted(kernels.factors_ns.items()):
        named = [
            f"{kind.replace('_', ' ')} {value:,.0f}" if value >= 100 else f"{kind.replace('_', ' ')} {value:.2f}"
            for kind, value in zip(KINDS, factors, strict=True)
            if value >= _LEAST_NS
        ]
        rows.append((key, f"{kernels.errors[key]:.0%}", ", ".join(named)))
    return columns(rows)
