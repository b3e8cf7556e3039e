"""Measures the dense half of a job: steps of its own model, compiled as in a run, on made-up activations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from podembed.embedding.lookup.activation_layout import ROWS_TRAVEL, ActivationLayout
from podembed.embedding.ragged import Ragged
from podembed.workers.calibration.record import ModelTime
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.shared_memory import ChannelEnd, ChannelLayout, ChannelServer, Record, RecordKind
from podembed.workers.host.device_tables.ids import DeviceIds, ids_layout
from podembed.workers.job.job import JobConfig
from podembed.workers.job.on_devices.rooms import MOST_IDS
from podembed.workers.job.sequence_rooms import NO_LEVELS
from podembed.workers.job.tables import table_specs

_WARM_UP_STEPS, _STEPS, _MOST_STEPS = 3, 12, 400
_LEAST_S = 0.5
_TIMEOUT_S = 60.0


def measure_model(job: JobConfig, num_samples: int, *, ids_per_bag: Mapping[str, float] | None = None) -> ModelTime:
    """Compiles the training step and runs it some times. Tables on devices are part of it, with ids that are drawn
    evenly.

    Args:
      ids_per_bag: by feature whose table lies on devices; 1 where nothing is said.

    Raises:
      DenseStateError: as `DeviceWorker.build`.
    """
    shapes = [job.activation_shapes[name] for name in job.host_features]
    layout = ActivationLayout(
        num_samples=num_samples,
        widths=tuple(shape[-1] for shape in shapes),
        owners=(ROWS_TRAVEL,) * len(shapes),
        inner=tuple(tuple(shape[:-1]) for shape in shapes),
    )
    server = ChannelServer(
        ChannelLayout(
            num_dense=job.data.num_dense,
            activations=layout,
            num_buffers=1,
            sequences=tuple(job.sequences),
            columns=job.column_shapes,
            on_devices=ids_layout(job, table_specs(job, (None,) * len(job.tables)), num_samples=num_samples),
        ),
        generation=0,
    )
    ends: list[ChannelEnd] = []
    invitation = server.invitation
    device = threading.Thread(target=lambda: ends.append(invitation.connect(timeout_s=_TIMEOUT_S)))
    device.start()
    try:
        host = server.accept(timeout_s=_TIMEOUT_S)
        device.join(_TIMEOUT_S)
        server.close_descriptor()
        random = np.random.default_rng(0)
        for name, array in host.buffers[0].items():
            values = 1.0 if name == "weights" else 0.1 * random.random(array.shape, np.float32)
            array[...] = np.asarray(values).astype(array.dtype)
        for name, lengths in host.layout.lengths_in(host.buffers[0]).items():
            lengths[...] = job.sequences[name]
        _write_ids(job, host, ids_per_bag or {}, random)
        worker = DeviceWorker(job=job, num_samples=num_samples)
        worker.build()
        if job.device_features:
            _join_tables(host, ends[0], worker)
        times = _steps(lambda number: _step(host, ends[0], worker, number))
    finally:
        for end in ends:
            end.close()
        server.close()
    parameters = worker.dense_arrays()
    return ModelTime(
        num_samples=num_samples,
        step_s=float(np.quantile([seconds for seconds, _ in times], 0.25)),
        cpu_s=float(np.quantile([cpu_s for _, cpu_s in times], 0.25)),
        gradient_bytes=float(sum(a.nbytes for key, a in parameters.items() if key.startswith("params/"))),
    )


def _steps(step: Callable[[int], tuple[float, float]]) -> list[tuple[float, float]]:
    """Seconds and processor seconds of some steps: short ones are repeated, since a machine is slow now and then."""
    for number in range(_WARM_UP_STEPS):
        step(number)
    times: list[tuple[float, float]] = []
    while len(times) < _STEPS or (sum(seconds for seconds, _ in times) < _LEAST_S and len(times) < _MOST_STEPS):
        times.append(step(_WARM_UP_STEPS + len(times)))
    return times


def _write_ids(job: JobConfig, host: ChannelEnd, ids_per_bag: Mapping[str, float], random: np.random.Generator) -> None:
    """Ids of the features whose tables lie on devices, equally many in each bag."""
    bags, ids = {}, DeviceIds(job, host)
    for name, feature in job.device_features.items():
        count = host.layout.on_devices.num_bags[name]
        each = min(MOST_IDS, max(1, math.ceil(ids_per_bag.get(name, 1.0))))
        values = random.integers(0, feature.table.vocabulary_size, count * each)
        bags[name] = Ragged(values, np.arange(0, count * each + 1, each))
    if bags:
        ids.write(0, bags, ids.levels(bags, NO_LEVELS))
        ids.say_rates(0, [1e-3] * len(job.tables))


def _join_tables(host: ChannelEnd, device: ChannelEnd, worker: DeviceWorker) -> None:
    """Tables on devices begin with zeros, as no bucket was given."""
    host.send(Record(kind=RecordKind.JOIN_BUCKETS, step=0))
    host.send(Record(kind=RecordKind.END, step=0))
    worker.serve_window(device, timeout_s=_TIMEOUT_S)
    host.receive(timeout_s=_TIMEOUT_S)


def _step(host: ChannelEnd, device: ChannelEnd, worker: DeviceWorker, number: int) -> tuple[float, float]:
    """Seconds and processor seconds of one step.

    Its record and the end of its window are sent before it begins, so no thread is needed.
    """
    host.send(Record(kind=RecordKind.TRAIN, step=number, buffer=0, weight_sum=float(worker.num_samples)))
    host.send(Record(kind=RecordKind.END, step=number))
    began = time.process_time()
    done = worker.serve_window(device, timeout_s=_TIMEOUT_S)
    cpu_s = time.process_time() - began
    host.receive(timeout_s=_TIMEOUT_S)
    return done.seconds, cpu_s
