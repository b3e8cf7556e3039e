"""A step as parts that a prediction can be compared with: what a host computes in each phase, and what it waits for.

The seconds of a phase alone say little where processors are short. Then a host also waits in phases in which it would
compute. Which of them that is depends on the kernel's scheduler. So does whether a host waits for its device, or for
the processor on which that device works.
"""

from __future__ import annotations

from collections.abc import Mapping

from podembed.workers.liveness.progress import Phase

FOR_HOSTS = "waiting for other hosts"
FOR_INPUT = "waiting for input"
FOR_SAVE = "waiting for a save"
FOR_DEVICE = "waiting for the device or a processor"
"""A host that shares its processors with devices waits for them in one way or the other."""
WAITS = (FOR_HOSTS, FOR_INPUT, FOR_SAVE, FOR_DEVICE)

_OTHERS = {Phase.READ: FOR_INPUT, Phase.WAIT_FOR_SAVE: FOR_SAVE}


def parts_of_step(phase_s: Mapping[str, float], cpu_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Seconds of each part; together they are the step, or all phases where these are longer.

    Args:
      phase_s: of each phase of a step; what is between them is the rest of the step.
      cpu_s: processor seconds of the host's working thread in each phase, and between them.
      step_s: the whole step.
    """
    spent_s = {Phase(name): seconds for name, seconds in phase_s.items() if name != Phase.BETWEEN}
    spent_s[Phase.BETWEEN] = max(0.0, step_s - sum(spent_s.values()))
    found: dict[str, float] = {}
    waits: dict[str, float] = dict.fromkeys(WAITS, 0.0)
    for phase, seconds in spent_s.items():
        work_s = min(seconds, cpu_s.get(phase, 0.0))
        found[str(phase)] = work_s
        waits[_awaited(phase)] += seconds - work_s
    return found | waits


def _awaited(phase: Phase) -> str:
    """For what a host waits that does not compute in a phase."""
    if phase.waits_for_hosts:
        return FOR_HOSTS
    return _OTHERS.get(phase, FOR_DEVICE)
