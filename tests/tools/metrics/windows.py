"""Events of a driver with chosen numbers."""

from __future__ import annotations

from typing import Any

from podembed.orchestrator.api.result import Recovery
from podembed.orchestrator.events.progress import HostMeasures, WindowReport, WindowTrained
from podembed.orchestrator.events.run import Recovered
from podembed.workers.liveness.process_statistics import ProcessUsage
from podembed.workers.liveness.progress import Phase


def window(
    first: int,
    last: int,
    *,
    generation: int = 1,
    seconds: float = 1.0,
    cpu_s: float = 1.0,
    loss: float = 0.5,
    num_hosts: int = 2,
    process: int = 7,
    **learning: Any,
) -> WindowTrained:
    """Each host reads for a tenth of the window, waits for its device for two, and for others for three.

    Args:
      learning: fields of the event, as they are.
    """
    phases = {Phase.READ: 0.1, Phase.DEVICE: 0.2, Phase.ID_EXCHANGE: 0.3, Phase.POOL: 0.4}
    return WindowTrained(
        report=WindowReport(
            step=last,
            total_steps=100,
            samples_per_s=64 * (last - first) / seconds,
            loss=loss,
            phase_s={},
            num_hosts=num_hosts,
            generation=generation,
            committed_step=0,
            committed_unix_s=0.0,
            staleness=0,
        ),
        first_step=first,
        num_samples=64 * (last - first),
        seconds=seconds,
        hosts=tuple(
            HostMeasures(
                host=host,
                num_samples=32 * (last - first),
                phase_s={phase: share * seconds for phase, share in phases.items()},
                bytes_sent=1000,
                rows_asked={"clicks": 5 * (last - first)},
                usage=(
                    ProcessUsage(
                        process=process,
                        cpu_s=cpu_s,
                        memory_bytes=100,
                        peak_memory_bytes=200,
                        num_files=9,
                        num_sockets=4,
                    ),
                ),
            )
            for host in range(num_hosts)
        ),
        **learning,
    )


def recovery(*, base_step: int, generation: int, discarded_steps: int) -> Recovered:
    return Recovered(
        recovery=Recovery(
            generation=generation,
            cause="host 1 ended",
            base_step=base_step,
            discarded_steps=discarded_steps,
            detect_s=0.5,
            stop_s=1.0,
            start_s=2.0,
            restore_s=0.5,
            compile_s=0.25,
        )
    )
