"""What a fault cost: `LostGeneration`, when it ended a generation, and `announce`, when the next one runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.result import Recovery
from podembed.orchestrator.api.run_errors import Failure, roots
from podembed.orchestrator.cluster.worker_environment import ACCELERATORS
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.decisions.failure import Recover
from podembed.orchestrator.driver.shared import Shared
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.machines import (
    AcceleratorsMissing,
    BucketsRefused,
    ConnectionRefused,
    DevicesFound,
    MemoryWrong,
)
from podembed.orchestrator.events.run import GenerationLost, GenerationStarted, Recovered
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.workers.device.process import DeviceReady
from podembed.workers.host.survivors.surviving_shard import Restored


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGeneration:
    """A lost generation, on the way to the next one.

    Attributes:
      reached_step: steps that some host had done.
      stopped_s: the clock's reading when the generation was gone.
      doubts_rows: rows that hosts keep may be wrong, so they are compared with the commit before training goes on.
    """

    cause: str
    reached_step: int
    detect_s: float
    stop_s: float
    stopped_s: float
    doubts_rows: bool = False


def stop_lost(
    shared: Shared,
    group: WorkerGroup | None,
    decision: Recover,
    failures: Sequence[Failure],
    *,
    noticed_s: float,
    base_step: int,
    doubts_rows: bool,
) -> LostGeneration:
    """Ends a lost generation; what lives on of it is used for the next one.

    Args:
      decision: to recover.
      failures: failures that ended it.
      noticed_s: wall time at which the driver learned of the fault.
      base_step: to which the next generation goes back.
      doubts_rows: flag of `LostGeneration`.
    """
    shared.reporter.close()
    failed = {failure.worker for failure in roots(failures) or failures if failure.worker is not None}
    shared.emit(
        GenerationLost(
            generation=shared.claims.generation,
            cause=decision.cause,
            workers=tuple(map(str, sorted(failed))),
            fault=decision.kind.name.lower(),
            base_step=base_step,
        )
    )
    reached, last_step_s = base_step, 0.0
    started_s = shared.clock.monotonic_s()
    if group is not None:
        progress = group.last_progress()
        # A host counts the step it works on; that many are done.
        reached = max([base_step, *(p.step for p in progress if p.step_unix_s)])
        last_step_s = max((p.step_unix_s for p in progress), default=0.0)
        shared.groups.salvage(group, decision.cause)
    stopped_s = shared.clock.monotonic_s()
    return LostGeneration(
        cause=decision.cause,
        reached_step=reached,
        detect_s=max(0.0, noticed_s - last_step_s) if last_step_s else 0.0,
        stop_s=stopped_s - started_s,
        stopped_s=stopped_s,
        doubts_rows=doubts_rows,
    )


def announce(
    shared: Shared,
    group: WorkerGroup,
    base: Manifest | None,
    fault: LostGeneration | None,
    *,
    survivors: int,
    before_s: Mapping[str, float],
) -> None:
    """Reports that a generation runs, and after a fault what the recovery took.

    Args:
      before_s: seconds of the parts of the start before the group was formed.
    """
    generation = shared.claims.generation
    refused = [ConnectionRefused(description=line) for line in group.refusals]
    alarms = [*refused, *device_events(group.devices, shared.resources), *restore_alarms(group.restored)]
    for alarm in alarms:
        shared.emit(alarm)
    if fault is None:
        shared.emit(
            GenerationStarted(
                generation=generation,
                num_hosts=group.num_hosts,
                commit=base.name if base else None,
                base_step=base.step if base else 0,
                start_s=group.spent_s["start"],
                compile_s=group.spent_s["compile"],
                survivors=survivors,
                restore=group.restore_totals,
                slices=shared.scaling.slice_fields,
            )
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
        **group.restore_totals,
    )
    shared.journal.history.recoveries.append(recovery)
    shared.emit(Recovered(recovery=recovery))


def device_events(devices: Sequence[DeviceReady], resources: Mapping[str, float] | None) -> list[Event]:
    """Which devices there are, where some are accelerators or a host has several; and where accelerators are reserved
    and JAX did not find them.

    Args:
      devices: what each device process said, in the order of the hosts.
      resources: Ray resources of a host.
    """
    by_kind: dict[str, tuple[int, ...]] = {}
    for host, device in enumerate(devices):
        kind = f"{device.num_devices} x {device.kind or device.platform}"
        kind += f" as {device.mesh}" if device.mesh else ""
        by_kind[kind] = (*by_kind.get(kind, ()), host)
    events: list[Event] = []
    if any(device.platform != "cpu" or device.num_devices > 1 for device in devices):
        events.append(DevicesFound(hosts=by_kind))
    reserved = tuple(
        f"{amount:g} {name}" for name, amount in (resources or {}).items() if name in ACCELERATORS and amount > 0
    )
    without = tuple(host for host, device in enumerate(devices) if device.platform == "cpu")
    if reserved and without:
        events.append(AcceleratorsMissing(hosts=without, reserved=reserved))
    return events


def restore_alarms(restored: Sequence[Restored]) -> list[Event]:
    """An event for each thing that should not be.

    Args:
      restored: one a host.
    """
    alarms: list[Event] = []
    if wrong := sum(one.buckets_wrong for one in restored):
        alarms.append(MemoryWrong(buckets=wrong))
    if refused := sum(one.buckets_refused for one in restored):
        receivers = tuple(host for host, one in enumerate(restored) if one.buckets_refused)
        alarms.append(BucketsRefused(buckets=refused, hosts=receivers))
    return alarms
