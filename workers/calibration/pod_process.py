"""A child process that is one host, or one device, of a pod that is measured:
`python -m podembed.workers.calibration.pod_process host`.

It reads calls from its input and writes answers to its output, one line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

from podembed.workers.calibration.pod_specs import TIMEOUT_S, document_of, invitation_of, spec_of
from podembed.workers.host.host import HostWorker
from podembed.workers.job.reference import JobReference
from podembed.workers.processors import keep_process_to, keep_thread_to, processors_of


class PodHost:
    """A host as a run has it, in one generation after another. Mutated: its tables, and `_cpu_s`, the processor seconds
    that it had used at the end of the last window.
    """

    def __init__(self) -> None:
        self._worker = HostWorker()
        self._cpu_s = 0.0

    def begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """As `HostWorker.start`, after the end of what was there before."""
        self._worker.close()
        spec = spec_of(request)
        keep_thread_to(processors_of(spec.host, spec.num_hosts, threads=int(request["threads"])))
        ready = self._worker.start(spec)
        return {
            "address": ready.mesh_address,
            "samples": ready.num_samples,
            "invitation": document_of(ready.invitation),
        }

    def connect(self, addresses: Sequence[Sequence[Any]]) -> None:
        """As `HostWorker.connect`; tables get first values."""
        self._worker.connect([(str(host), int(port)) for host, port in addresses], TIMEOUT_S)
        self._worker.restore(None)

    def train(self, first_step: int, last_step: int) -> dict[str, Any]:
        """The seconds of a window and of each phase in it, and processor seconds of each and between them. `cpu_s` are
        those of all threads since the window before.
        """
        began, cpu_before = time.perf_counter(), self._cpu_s
        window = self._worker.train(first_step, last_step, True)
        seconds, self._cpu_s = time.perf_counter() - began, time.process_time()
        return {
            "seconds": seconds,
            "cpu_s": self._cpu_s - cpu_before,
            "phase_s": {str(phase): spent for phase, spent in window.phase_s.items()},
            "phase_cpu_s": {str(phase): spent for phase, spent in window.phase_cpu_s.items()},
        }


class PodDevice:
    """The device process of a host. It joins its gang once. Mutated: which job it works for."""

    def __init__(self) -> None:
        self._end: Any = None
        self._processors: Collection[int] = ()

    def reserve(self) -> str:
        """An address for the gang's coordinator."""
        from podembed.workers.device.process import DeviceProcess

        return DeviceProcess().reserve_coordinator("127.0.0.1")

    def join(self, coordinator: str, num_processes: int, process: int, threads: int) -> None:
        from podembed.workers.device.gang import join_gang

        join_gang(coordinator=coordinator, num_processes=num_processes, process=process, timeout_s=int(TIMEOUT_S))
        self._processors = processors_of(process, num_processes, threads=threads)

    def begin(self, job: Mapping[str, Any], num_samples: int, invitation: Mapping[str, Any]) -> float:
        """Compiles a job's steps. Returns the bytes of the parameters' gradients."""
        from podembed.workers.device.model_step import DeviceWorker

        if self._end is not None:
            self._end.close()
        self._end = invitation_of(invitation).connect(timeout_s=TIMEOUT_S)
        self._worker = DeviceWorker(job=JobReference(**job).resolve(), num_samples=num_samples)
        self._worker.build()
        keep_process_to(self._processors)
        arrays = self._worker.dense_arrays()
        return float(sum(array.nbytes for key, array in arrays.items() if key.startswith("params/")))

    def serve(self) -> tuple[float, float]:
        """The device's seconds in one window, and its processor seconds."""
        began = time.process_time()
        seconds = self._worker.serve_window(self._end, timeout_s=TIMEOUT_S).seconds
        return seconds, time.process_time() - began


def serve(target: Any, calls: TextIO, answers: TextIO) -> None:
    """Answers calls until there are no more. An exception is an answer."""
    for line in calls:
        method, *arguments = json.loads(line)
        try:
            found: Any = {"answer": getattr(target, method)(*arguments)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def main() -> None:
    # JAX's collectives print to the standard output, which is for answers alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(PodHost() if sys.argv[1] == "host" else PodDevice(), sys.stdin, answers)


if __name__ == "__main__":
    main()
