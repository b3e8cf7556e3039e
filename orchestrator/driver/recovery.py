"""What a fault cost: `Fault`, when it ended a generation, and `announce`, when the next one runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podembed.orchestrator.api.config import Recovery
from podembed.orchestrator.cluster.device_notices import device_notices
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.driver.console import describe_filling
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.group.filling_alarms import filling_alarms
from podembed.orchestrator.group.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A lost generation, on the way to the next one.

    Attributes:
      reached_step: steps that some host had done.
      stopped_s: the clock's reading when the generation was gone.
    """

    cause: str
    reached_step: int
    detect_s: float
    stop_s: float
    stopped_s: float


def stop_lost(shared: Shared, group: WorkerGroup | None, cause: str, *, noticed_s: float, base_step: int) -> Fault:
    """Ends a lost generation; what lives on of it is used for the next one.

    Args:
      noticed_s: wall time at which the driver learned of the fault.
      base_step: to which the next generation goes back.
    """
    shared.reporter.close()
    shared.reporter.notice(f"fault: {cause}")
    reached, last_step_s = base_step, 0.0
    started_s = shared.clock.monotonic_s()
    if group is not None:
        progress = group.last_progress()
        # A host counts the step it works on; that many are done.
        reached = max([base_step, *(p.step for p in progress if p.step_unix_s)])
        last_step_s = max((p.step_unix_s for p in progress), default=0.0)
        shared.groups.salvage(group, cause)
    stopped_s = shared.clock.monotonic_s()
    return Fault(
        cause=cause,
        reached_step=reached,
        detect_s=max(0.0, noticed_s - last_step_s) if last_step_s else 0.0,
        stop_s=stopped_s - started_s,
        stopped_s=stopped_s,
    )


def announce(
    shared: Shared,
    group: WorkerGroup,
    base: Manifest | None,
    fault: Fault | None,
    *,
    survivors: int,
    before_s: Mapping[str, float],
) -> None:
    """Says that a generation runs, and after a fault what that took.

    Args:
      before_s: seconds of the parts of the start before the group was formed.
    """
    generation, reporter = shared.run.generation, shared.reporter
    alarms = [*group.refusals, *device_notices(group.devices, shared.resources), *filling_alarms(group.filled)]
    for told in alarms:
        reporter.notice(told)
    if fault is None:
        origin = f"from commit {base.name}" if base else "from the first step"
        lived = f"; hosts that lived on: {survivors}, {describe_filling(group.filling)}" if survivors else ""
        reporter.notice(
            f"generation {generation}: {group.num_hosts} host{'s' if group.num_hosts > 1 else ''}, {origin}; "
            f"started in {group.spent_s['start']:.1f} s, compiled in {group.spent_s['compile']:.1f} s{lived}"
        )
        return
    base_step = base.step if base else 0
    spent_s = group.spent_s
    recovery = Recovery(
        generation=generation,
        cause=fault.cause,
        base_step=base_step,
        discarded_steps=max(0, fault.reached_step - base_step),
        detect_s=fault.detect_s,
        stop_s=fault.stop_s,
        start_s=shared.clock.monotonic_s() - fault.stopped_s - spent_s["restore"] - spent_s["compile"],
        restore_s=spent_s["restore"],
        compile_s=spent_s["compile"],
        parts_s={**before_s, **group.start_s},
        survivors=survivors,
        **group.filling,
    )
    shared.journal.history.recoveries.append(recovery)
    reporter.recovery(recovery)
