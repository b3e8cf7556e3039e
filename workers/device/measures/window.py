"""`WindowMeasures`: counts what the training steps of a window measured, for the `DeviceWindow` that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.measures.step_measures import NOT_MEASURED, NUM_NORMS, NUM_SUMS, Measured, measured_labels
from podembed.workers.device.transfers.ways import own_parts
from podembed.workers.job.job import JobConfig
from podembed.workers.job.window_figures import NOT_BINARY, NOT_COUNTED, NUM_CODES, DenseNorms, LabelCounts
from podembed.workers.liveness.process_statistics import ProcessUsage, own_usage

_MOST_KEPT = 64
"""Steps whose codes wait. Counting many at once costs less than each by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindow:
    """A device worker's report of one window of steps.

    Attributes:
      seconds: inside the jitted step and its transfers.
      num_compiled: programs that were compiled since the worker's start, for sequences of other lengths.
      compiled_s: seconds that this took.
      usage: resource usage of the process, at the window's end.
      quality: of each label whose scores are log odds, this host's samples.
      norms: norms of the dense half; None without steps.
      rounds: number of rounds of all training steps in which devices asked for rows of sharded tables; 0 without such
        tables.
    """

    losses: tuple[float, ...]
    num_steps: int
    seconds: float
    num_compiled: int = 0
    compiled_s: float = 0.0
    usage: ProcessUsage | None = None
    quality: tuple[LabelCounts, ...] = ()
    norms: DenseNorms | None = None
    rounds: int = 0


class WindowMeasures:
    """Measures of one host's steps. Mutated: the counts, and the steps that wait.

    Args:
      job: the declared job.
      mesh: mesh of the devices.
    """

    def __init__(self, job: JobConfig, mesh: GangMesh) -> None:
        self._labels, self._mesh = measured_labels(job), mesh
        self._has_weights = job.data.sample_weight is not None
        self._waiting: list[tuple[Measured, np.ndarray | None]] = []
        self._norms: list[np.ndarray] = []
        self._clear()

    def _clear(self) -> None:
        self._counts = np.zeros((len(self._labels), NUM_CODES))
        self._sums = np.zeros((len(self._labels), NUM_SUMS))
        self._norms, self._rounds = [], 0

    def add(self, measured: Measured, weights: np.ndarray) -> None:
        """Takes a step that is done.

        Args:
          weights: float32 `[n]`, of this host's samples; copied where they are not all 0 or 1.
        """
        self._waiting.append((measured, weights.copy() if self._has_weights else None))
        if len(self._waiting) >= _MOST_KEPT:
            self._count()

    def window(
        self, *, losses: tuple[float, ...], num_steps: int, seconds: float, num_compiled: int, compiled_s: float
    ) -> DeviceWindow:
        """The report of a window: the given values, and the counts since the last call."""
        self._count()
        counts = tuple(self._counts_of(at) for at in range(len(self._labels)))
        norms, rounds = _means(self._norms), self._rounds
        self._clear()
        return DeviceWindow(
            losses=losses,
            num_steps=num_steps,
            seconds=seconds,
            num_compiled=num_compiled,
            compiled_s=compiled_s,
            usage=own_usage(),
            quality=counts,
            norms=norms,
            rounds=rounds,
        )

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._norms += [np.asarray(measured.norms.addressable_data(0)) for measured, _ in waiting]
        asked = [measured.rounds.addressable_data(0) for measured, _ in waiting if measured.rounds is not None]
        self._rounds += sum(int(rounds) for rounds in asked)
        weights = np.concatenate([given for _, given in waiting if given is not None]) if self._has_weights else None
        for at in range(len(self._labels)):
            codes = np.concatenate([self._own(measured.scored.codes[at]) for measured, _ in waiting])
            self._counts[at] += np.bincount(codes, weights, NUM_CODES)
            sums = np.concatenate([self._own(measured.scored.sums[at]) for measured, _ in waiting])
            self._sums[at] += sums.sum(axis=0, dtype=np.float64)

    def _own(self, array: jax.Array) -> np.ndarray:
        """This host's part, one device after another."""
        if self._mesh.num_local == 1:
            # A third of the time, and there are some of these arrays in each step.
            return np.asarray(array.addressable_data(0))
        return np.concatenate([np.asarray(part) for part in own_parts(self._mesh, array)])

    def _counts_of(self, at: int) -> LabelCounts:
        counts, (predicted, loss) = self._counts[at], self._sums[at]
        codes = np.flatnonzero(counts[:NOT_COUNTED])
        return LabelCounts(
            label=self._labels[at],
            codes=codes.astype(np.int32),
            weights=counts[codes],
            predicted=float(predicted),
            loss=float(loss),
            is_binary=not counts[NOT_BINARY],
        )


def _means(norms: Sequence[np.ndarray]) -> DenseNorms | None:
    if not norms:
        return None
    by_step = np.asarray(norms, np.float64).reshape(-1, NUM_NORMS)
    gradients, measured = by_step[:, 0], by_step[by_step[:, 2] != NOT_MEASURED, 1:]
    return DenseNorms(
        gradient=float(gradients.mean()),
        update=float(measured[:, 0].mean()) if len(measured) else None,
        params=float(measured[-1, 1]) if len(measured) else None,
        largest_gradient=float(gradients.max()),
    )
