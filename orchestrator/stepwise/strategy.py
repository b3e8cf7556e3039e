"""`PodStrategy`: the strategy over real hosts. `TPUEmbedding`s made in its scope have their tables sharded over the
hosts' memory.

On the driver, batches are global: each host gets its share of the samples. `run` calls a function on the device process
of every host, where the same embedding works on that host's share. The processes start when they are first needed and
end with `close`, with the program, or when the strategy is forgotten. Ids and activations travel between driver and
hosts over lines of their own, or as Ray objects where a line cannot be made. Between hosts they travel over the mesh.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from podembed.embedding.tf.engine.engine import Engine, EngineSpec
from podembed.embedding.tf.replicas.cross_replica import CrossReplica, check_call
from podembed.embedding.tf.replicas.dynamic_rates import RatesQuestion, rates_of
from podembed.embedding.tf.replicas.kept import Kept, collecting
from podembed.embedding.tf.replicas.per_replica import PerReplica, local_value
from podembed.embedding.tf.replicas.strategies import entered, register
from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.cluster.connection import is_connected, shared_connection
from podembed.orchestrator.group.backend import Call
from podembed.orchestrator.stepwise.line_calls import LineBackend
from podembed.orchestrator.stepwise.pod import DeviceCalls, Pod, in_sentences
from podembed.orchestrator.stepwise.pod_engine import PodEngine
from podembed.workers.stepwise.asking import UserQuestion
from podembed.workers.stepwise.device import Ran, StepwiseDevice
from podembed.workers.storage.store import Store


class PodStrategy(CrossReplica):
    """Hosts that hold the tables and run functions together.

    ```python
    with PodStrategy(num_hosts=2) as strategy:
        with strategy.scope():
            embedding = TPUEmbedding(features, batch_size=1024, optimizer=Adagrad(0.05))
    ```

    Args:
      num_hosts: hosts, and replicas.
      seed: seed of the first values of the rows.
      resources_per_host: Ray resources reserved for each host; None takes an even part of the cluster's CPUs, at most
        one.
      threads_per_host: threads of a host's kernels and of its CPU device. None is one for the kernels and the
        library's own choice for the device.
      start_timeout_s: for processes to start and join.
      step_timeout_s: longest wait of a host for its peers within a call.
      run_timeout_s: longest time that a function may run, and between two updates of one whose rates change.
      shares_memory: whether hosts of one machine use each other's memory; without, they exchange everything as between
        machines.
      notice: callback that is told about facts such as hosts that share a machine.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        seed: int = 0,
        resources_per_host: Mapping[str, float] | None = None,
        threads_per_host: int | None = None,
        start_timeout_s: float = 300.0,
        step_timeout_s: float = 120.0,
        run_timeout_s: float = 3600.0,
        shares_memory: bool = True,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.num_hosts = num_hosts
        self.seed = seed
        self.running: PodEngine | None = None
        # The one that the device processes know.
        self._attached: PodEngine | None = None
        # Keys of the values that they hold.
        self._known: set[str] = set()
        self._scaling = ScalingConfig(
            num_hosts=num_hosts, resources_per_host=resources_per_host, threads_per_host=threads_per_host
        )
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._run_timeout_s = run_timeout_s
        self._shares_memory = shares_memory
        self._emit = in_sentences(notice)
        self._started: Pod | None = None
        # Two threads that call at first start one pod.
        self._starting = threading.Lock()

    @property
    def num_replicas_in_sync(self) -> int:
        return self.num_hosts

    @contextmanager
    def scope(self) -> Iterator[PodStrategy]:
        """Objects made inside the block belong to this strategy."""
        with entered(self):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` on the device process of every host at the same time.

        `fn` travels with what it refers to, so values that it changes stay behind; `get_replica_context().state` stays
        on the host. `TPUEmbedding`s that it refers to work on the host's share.

        Args:
          args, kwargs: given to every replica; of `PerReplica` values each gets its own.

        Returns:
          A `PerReplica` of what the calls returned; with one host the value itself.

        Raises:
          TypeError: as `check_call`.
          Exception: what `fn` raised on the first replica where it did.
          PodLost: a process is gone or did not end in time.
        """
        check_call(fn, args, kwargs)
        # Packing a function can take milliseconds, so it is packed once for all replicas.
        with collecting() as kept:
            packed = _packed(fn)

        def arguments(replica: int) -> tuple[list[Any], dict[str, Any]]:
            own = [local_value(arg, replica) for arg in args]
            return own, {name: local_value(value, replica) for name, value in (kwargs or {}).items()}

        pod = self._pod
        results = pod.in_turn("run", lambda: self._run(pod, packed, kept, arguments))
        return results[0] if len(results) == 1 else PerReplica(tuple(results))

    def _run(
        self,
        pod: Pod,
        packed: Any,
        kept: Mapping[str, Kept[Any]],
        arguments: Callable[[int], tuple[list[Any], dict[str, Any]]],
    ) -> list[Any]:
        """What the replicas return. In the pod's turn, so that what is known of the hosts goes with what they do."""
        pod.join_gang()
        self._attach(pod)
        self._send_ahead(pod, kept)
        engine = self.running
        after = 0 if engine is None else engine.num_enqueued
        had_room = engine is not None and engine.has_room
        if engine is not None:
            # Until they have said so: the function may raise when it has enqueued a batch.
            engine.has_room = False
            engine.forget_sizes()

        def ask(replica: int, device: DeviceCalls) -> Call[Ran | UserQuestion]:
            own, named = arguments(replica)
            return device.directly(StepwiseDevice.run_function, packed, own, named, after)

        # Rates that change are called in the pod's thread: no other call may come between the parts of a function.
        ran = until_ended(pod, pod.ask_devices(ask, timeout_s=self._run_timeout_s), timeout_s=self._run_timeout_s)
        if engine is not None:
            has_called = any(one.has_room is not None for one in ran)
            engine.has_room = all(one.has_room for one in ran) if has_called else had_room
        return [one.value for one in ran]

    def _attach(self, pod: Pod) -> None:
        """Tells the device processes of the engine. Once, since packing its description takes longer than a call."""
        engine = self.running
        if engine is self._attached:
            return

        def ask(replica: int, device: DeviceCalls) -> Call[None]:
            if engine is None:
                return device.call(StepwiseDevice.detach)
            return device.call(StepwiseDevice.attach, engine.replica_spec, engine.place(replica), pod.call_timeout_s)

        pod.ask_devices(ask, timeout_s=pod.call_timeout_s)
        self._attached = engine
        self._known.clear()

    def _send_ahead(self, pod: Pod, kept: Mapping[str, Kept[Any]]) -> None:
        """Values that no function has referred to before."""
        values = [one for key, one in kept.items() if key not in self._known]
        if values:
            pod.ask_devices(
                lambda replica, device: device.call(StepwiseDevice.keep, values), timeout_s=pod.call_timeout_s
            )
            self._known.update(kept)

    def start_engine(self, spec: EngineSpec, *, restore_from: str | None) -> Engine:
        location = None if restore_from is None else Store(restore_from).location
        self.running = PodEngine(self._pod, spec, restore_from=location)
        register(self)
        return self.running

    def stop_engine(self) -> None:
        if self.running is not None:
            self.running.close()
            self.running = None

    def close(self) -> None:
        """Ends all processes; their tables are gone. Safe to call twice.

        Raises:
          Exception: what a last `enqueue` raised on the hosts, if no call after it has waited for that.
        """
        self.running = None
        if self._started is not None:
            self._started.close()

    def __enter__(self) -> PodStrategy:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            # What the block raised comes first.
            if error is None:
                raise

    @property
    def _pod(self) -> Pod:
        with self._starting:
            if self._started is None:
                self._started = self._start()
                # At the program's end a pod closes itself.
                weakref.finalize(self, self._started.close).atexit = False
            return self._started

    def _start(self) -> Pod:
        cluster = ExitStack()
        try:
            connection = cluster.enter_context(shared_connection(self.num_hosts, emit=self._emit))

            def lost() -> str | None:
                return connection.lost() if is_connected() else "the program has left its Ray cluster"

            backend = LineBackend(
                self._scaling,
                self._emit,
                lost=lost,
                answers=lambda: is_connected() and connection.answers(),
            )
            return Pod(
                backend,
                cluster,
                num_hosts=self.num_hosts,
                start_timeout_s=self._start_timeout_s,
                step_timeout_s=self._step_timeout_s,
                lost=lost,
                shares_memory=self._shares_memory,
                threads=self._scaling.threads_per_host or 1,
            )
        except BaseException:
            cluster.close()
            raise


def _packed(function: Callable[..., Any]) -> Any:
    from podembed.workers.stepwise.actors import PackedFunction

    return PackedFunction.of(function)


def until_ended(pod: Pod, answers: Sequence[Ran | UserQuestion], *, timeout_s: float) -> list[Ran]:
    """Answers what the functions ask about learning rates, until they have ended.

    A rate is called here, once for an update of all replicas, and then travels to each of them.

    Args:
      answers: answers of the replicas so far, in order.
      timeout_s: for each part of the functions between two questions.

    Raises:
      ValueError: the replicas gave different rates for one update.
      RuntimeError: only some of them apply gradients now, or not those of one embedding and step.
      Exception: what a learning rate raised, and as `Pod.ask_devices`.
    """
    while not all(isinstance(one, Ran) for one in answers):
        try:
            rates = rates_of(_same_question(answers))
        except BaseException:
            # No replica may go on alone: its host would wait for the others.
            pod.ask_devices(
                lambda replica, device: device.directly(StepwiseDevice.give_up), timeout_s=pod.call_timeout_s
            )
            raise
        answers = pod.ask_devices(
            lambda replica, device, rates=rates: device.directly(StepwiseDevice.go_on, rates), timeout_s=timeout_s
        )
    return [one for one in answers if isinstance(one, Ran)]


def _same_question(answers: Sequence[Ran | UserQuestion]) -> RatesQuestion:
    questions: list[RatesQuestion | None] = [one.question if isinstance(one, UserQuestion) else None for one in answers]
    first = questions[0]
    if first is not None and all(question == first for question in questions):
        return first
    if None in questions:
        ended = [replica for replica, question in enumerate(questions) if question is None]
        raise RuntimeError(
            f"Found gradients on some replicas while the function has ended on replicas {ended}. Expected "
            "apply_gradients on all of them, since an update is one of all hosts. Call it on each replica, with zeros "
            "where there are none; discard() forgets the batch."
        )
    given = {replica: list(question.given) for replica, question in enumerate(questions) if question is not None}
    if any(given.values()):
        raise ValueError(
            f"Found different learning rates for one update, by replica: {given}. Expected the same on all, since "
            "tables are one over all hosts. Find the rates on the driver and pass them as an argument of the function."
        )
    steps = [(question.key, question.step) for question in questions if question is not None]
    raise RuntimeError(
        f"Found updates of different embeddings or steps at once, by replica: {steps}. Expected the same "
        "apply_gradients on all. Let no call depend on the number of the replica."
    )
