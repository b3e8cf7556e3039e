"""`fit`: drives an opened run to its end. Opens its measurements, its cluster and its driver, and closes them in every
case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from podembed.embedding.device_places import DeviceRoom
from podembed.embedding.row_optimizers.base import needs_step
from podembed.jobs.event_log import injecting
from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts, check_policies, check_storage, with_metric
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.signals import StoppedAtStart
from podembed.orchestrator.cluster.connection import joins_others
from podembed.orchestrator.cluster.joining import joined
from podembed.orchestrator.decisions.device_room import room_of
from podembed.orchestrator.decisions.host_watch import Cluster
from podembed.orchestrator.driver.driver import Driver
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.reporter import Reporter, tell
from podembed.orchestrator.events.run import (
    BatchNotFilled,
    FilesInOrder,
    NothingLeft,
    PlacesChosen,
    RatesWithoutStep,
    RowGroupsShared,
    RunOpened,
    TablePlaced,
)
from podembed.orchestrator.run.finished import finished, untrained
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.health.watch import HealthWatch
from podembed.tools.metrics.sinks import measuring
from podembed.tools.tracing.tracing import Tracing
from podembed.workers.device.room import room_here
from podembed.workers.input.index import InputIndex
from podembed.workers.input.sources import ReaderSource
from podembed.workers.job.auto_places import chosen_places, with_places
from podembed.workers.job.job import JobConfig

MANY_VALUES = 100_000_000
"""Values that lanes decode at the same time, from which on that takes a processor several seconds."""


def shares_row_groups(job: JobConfig, index: InputIndex) -> bool:
    """Whether lanes share row groups, and decode so much of the data again and again that reading takes long."""
    groups = [rows for rows in index.row_group_rows if rows]
    # In the order of files all lanes read the same window.
    if isinstance(job.data, ReaderSource) or job.data.order != "shuffled" or len(groups) >= job.num_lanes:
        return False
    return job.num_lanes * max(groups, default=0) * len(job.data.columns) >= MANY_VALUES


def tables_with_counting_rates(job: JobConfig) -> tuple[str, ...]:
    """The tables whose learning rate is a function without the step, which may count its calls and is new after each
    start.
    """
    optimizers = [job.optimizer if table.optimizer is None else table.optimizer for table in job.tables]
    # That of `Adam.corrected` is made of the one that was given.
    rates = [one and getattr(one.learning_rate, "learning_rate", one.learning_rate) for one in optimizers]
    named = zip(job.table_names, rates, strict=True)
    return tuple(name for name, rate in named if callable(rate) and not needs_step(rate))


def placed(run: OpenRun, room: Callable[[], DeviceRoom | str], *, emit: Emit) -> OpenRun:
    """The run with its tables with place='auto' on hosts or devices; tells where they lie.

    Args:
      room: asks for the devices of this start, as for `auto_places`. Not called where no table waits.
    """
    if all(table.place != "auto" for table in run.job.tables):
        return run
    places = chosen_places(run.job, room())
    tables = [TablePlaced(table=name, place=one.place, why=one.why) for name, one in places.items()]
    emit(PlacesChosen(tables=tuple(tables)))
    reference = run.reference and replace(run.reference, places=places)
    return replace(run, job=with_places(run.job, places), reference=reference)


def _room(scaling: ScalingConfig, cluster: Cluster | None) -> DeviceRoom | str:
    """The devices that hosts will have; or why there are none for tables."""
    if scaling.in_process and scaling.platform != "cpu":
        return room_here(scaling.devices)
    return room_of(scaling, (cluster.look() if cluster is not None else None) or ())


def fit(run: OpenRun, *, scaling: ScalingConfig, config: RunConfig, reporter: Reporter) -> Result:
    """Drives an opened run to its end, on a cluster that is joined or started for it.

    Raises:
      As `Trainer.fit`.
    """
    check_hosts(run.job, scaling)
    check_policies(run.job, config)
    config = config.in_steps(run.input_plan.steps_per_epoch)
    config = replace(config, checkpoint_config=with_metric(run.job, config.checkpoint_config))
    check_storage(run.url, scaling)
    emit = partial(tell, reporter)
    head = run.newest_commit()
    if (result := finished(run, config, head)) is not None:
        emit(NothingLeft(url=run.url, step=result.step, commit=result.commit))
        return result
    emit(RunOpened(url=run.url))
    if run.job.data.order == "files":
        emit(FilesInOrder(description=run.train_index.order_of_files))

    if run.job.batch_size > run.train_index.num_rows:
        emit(BatchNotFilled(batch_size=run.job.batch_size, num_samples=run.train_index.num_rows))

    if shares_row_groups(run.job, run.train_index):
        emit(
            RowGroupsShared(
                num_row_groups=sum(rows > 0 for rows in run.train_index.row_group_rows),
                num_lanes=run.job.num_lanes,
                num_rows=run.train_index.num_rows,
                num_columns=len(run.job.data.columns),
            )
        )

    if counting := tables_with_counting_rates(run.job):
        emit(RatesWithoutStep(tables=counting))

    def patience_s() -> float:
        # A run that has begun has lost its cluster; for a new one, the address is wrong.
        return config.failure_config.wait_for_hosts_s if run.has_begun else 0.0

    is_in_cluster = not scaling.in_process and joins_others()
    with contextlib.ExitStack() as stack:
        # Faults of a plan that count calls of the storage do not count those of a sink.
        emit = stack.enter_context(
            measuring(config.metrics_config, run.store, emit, watch=HealthWatch(), is_in_cluster=is_in_cluster)
        )
        if config.fault_plan is not None:
            run, emit = stack.enter_context(injecting(config.fault_plan, run, emit))
        try:
            place = stack.enter_context(
                joined(
                    scaling,
                    patience_s=patience_s,
                    activity=reporter.activity,
                    emit=emit,
                    run=run.store.location.rstrip("/").rsplit("/", 1)[-1],
                    job=run.job_for_workers,
                )
            )
            stack.callback(reporter.close)
            traced = config.metrics_config.traced
            trace = None if traced is None else Tracing(traced, run.store, emit=emit, clock=SYSTEM_CLOCK)
            run = placed(run, partial(_room, scaling, place.cluster), emit=emit)
            driver = Driver(
                run,
                scaling=scaling,
                config=config,
                backend=place.backend,
                cluster=place.cluster,
                reporter=reporter,
                emit=emit,
                stop=place.stop,
                trace=trace,
            )
            return driver.run()
        except StoppedAtStart as stopped:
            # Before there was a cluster, or a lease: no other process has to hear of it.
            reporter.close()
            return untrained(run, config, head, stopped_by=stopped.reason)
