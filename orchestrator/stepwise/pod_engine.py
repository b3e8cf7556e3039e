"""`PodEngine`: the engine of an embedding over all hosts of a `Pod`, as the driver sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np

from podembed.embedding.lookup.placement import place_tables
from podembed.embedding.tf.engine.engine import EngineMetrics, EngineSpec, LearningRates, Share, rates_at
from podembed.embedding.tf.engine.order import ANY_NAME
from podembed.embedding.tf.engine.table_storage import WrittenTables
from podembed.orchestrator.group.backend import Call
from podembed.orchestrator.stepwise.pod import Answer, HostCalls, Pod
from podembed.workers.stepwise import saved_embedding as embedding_files
from podembed.workers.stepwise import saved_index
from podembed.workers.stepwise.host import StepwiseHost
from podembed.workers.stepwise.shared_values import EnginePlace
from podembed.workers.storage.store import Store

Arguments = ParamSpec("Arguments")


def _in_turn(
    method: Callable[Concatenate[PodEngine, Arguments], Answer],
) -> Callable[Concatenate[PodEngine, Arguments], Answer]:
    """A method that runs as one request of the pod: what it asks of the hosts and what it remembers of their answers
    stay together, whoever calls, and whatever happens to the caller meanwhile.
    """

    @wraps(method)
    def called(self: PodEngine, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        return self.pod.in_turn(method.__name__, lambda: method(self, *arguments, **named))

    return called


class PodEngine:
    """The engine over all hosts of a pod, as the driver sees it.

    Attributes:
      pod: pod whose processes it asks.
      replica_spec: as much of `spec` as functions on the replicas need.
      num_enqueued: batches that were enqueued here, which is the number of the last one.
      has_room: whether all hosts have said that they would accept another batch.
    """

    def __init__(self, pod: Pod, spec: EngineSpec, *, restore_from: str | None) -> None:
        self.spec = spec
        self.pod = pod
        self.num_shares = len(pod.handles)
        self._placement = tuple(place_tables(spec.tables, num_features=spec.num_features, num_hosts=self.num_shares))
        self._places = self._start(restore_from)
        self.replica_spec = spec.for_replicas()
        self.num_enqueued = 0
        self.has_room = False
        # Of the batch whose gradients come next, as the hosts said with the last dequeue, and the name of that.
        self._to_update: tuple[list[list[int]], str | None] | None = None

    @_in_turn
    def _start(self, restore_from: str | None) -> list[EnginePlace]:
        places = self._all(lambda host: host.call(StepwiseHost.start_engine, self.spec, self._placement, restore_from))
        # A call of its own, in which no host waits for one that could not make its tables.
        self._all(lambda host: host.call(StepwiseHost.share_memory))
        return places

    def place(self, replica: int) -> EnginePlace:
        """How a host's device process reaches its engine."""
        return self._places[replica]

    def forget_sizes(self) -> None:
        """Functions on the replicas may have given gradients or taken batches since."""
        self._to_update = None

    @_in_turn
    def enqueue(self, shares: Sequence[Share]) -> None:
        if self._to_update is not None and self._to_update[1] is not None:
            # With a name, an enqueue can turn the batch into one of inference.
            self.forget_sizes()
        self.num_enqueued += 1
        number, has_room, self.has_room = self.num_enqueued, self.has_room, False
        if has_room:
            # They refuse nothing, so the driver needs no answer before the next call.
            self.pod.tell_hosts("enqueue", lambda at, host: host.directly(StepwiseHost.enqueue, shares[at], number))
        else:
            self.pod.ask_hosts(lambda at, host: host.directly(StepwiseHost.enqueue, shares[at], number))

    @_in_turn
    def dequeue(self, name: str | None) -> list[list[np.ndarray]]:
        self.forget_sizes()
        found = self._all(lambda host: host.directly(StepwiseHost.dequeue_sized, name))
        self._to_update = [sizes for _, sizes in found], name
        return [activations for activations, _ in found]

    @_in_turn
    def sizes_to_update(self, name: str | None) -> list[list[int]]:
        if self._to_update is not None and all(self._to_update[0]):
            sizes, of = self._to_update
            if of == name or (of is None and name == ANY_NAME):
                return sizes
        return self._all(lambda host: host.directly(StepwiseHost.sizes_to_update, name))

    def apply_gradients(
        self, gradients: Sequence[Sequence[np.ndarray]], learning_rates: LearningRates, name: str | None
    ) -> None:
        # The user's functions of the step are called in the user's thread.
        rates = list(
            rates_at(learning_rates, lambda: self._all(lambda host: host.directly(StepwiseHost.next_step, name))[0])
        )
        self._apply(gradients, rates, name)

    @_in_turn
    def _apply(self, gradients: Sequence[Sequence[np.ndarray]], rates: list[float], name: str | None) -> None:
        self.forget_sizes()
        self.pod.ask_hosts(
            lambda at, host: host.directly(StepwiseHost.apply_gradients, list(gradients[at]), rates, name)
        )

    @_in_turn
    def discard(self) -> None:
        self.forget_sizes()
        self._all(lambda host: host.call(StepwiseHost.discard))

    def drain(self) -> None:
        self._all(lambda host: host.call(StepwiseHost.drain))

    def metrics(self) -> EngineMetrics:
        of_hosts: list[EngineMetrics] = self._all(lambda host: host.call(StepwiseHost.metrics))
        return EngineMetrics(
            num_steps=of_hosts[0].num_steps,
            learning_rates=of_hosts[0].learning_rates,
            altered_ids=tuple(sum(counts) for counts in zip(*(one.altered_ids for one in of_hosts), strict=True)),
        )

    @_in_turn
    def read_tables(self) -> list[dict[str, np.ndarray]]:
        self.drain()
        found = []
        for at, table in enumerate(self.spec.tables):
            arrays = {name: np.empty((table.num_rows, width), np.float32) for name, width in table.widths.items()}
            num_buckets = table.layout.num_buckets
            for held in self._all(lambda host, at=at: host.call(StepwiseHost.read_buckets, at)):
                for bucket, values in held.items():
                    for name, whole in arrays.items():
                        own = whole[bucket::num_buckets]
                        own[...] = values[name][: len(own)]
            found.append(arrays)
        return found

    @_in_turn
    def save(self, path: str) -> None:
        saved_index.require_free(path)
        saved_index.publish(path, self.write(path))

    @_in_turn
    def write(self, path: str) -> WrittenTables:
        self.drain()
        attempt = embedding_files.new_attempt()
        answers = self._all(lambda host: host.call(StepwiseHost.save, Store(path).location, attempt))
        receipts = [receipt for receipt, _ in answers]
        return embedding_files.assemble(self.spec.tables, attempt, receipts, num_steps=answers[0][1])

    @_in_turn
    def restore(self, path: str) -> None:
        # Read here first: what is wrong with the whole shows before any host has changed.
        saved_index.read_index(path)
        self.forget_sizes()
        self.drain()
        self._all(lambda host: host.call(StepwiseHost.restore, Store(path).location))

    @_in_turn
    def close(self) -> None:
        self._all(lambda host: host.call(StepwiseHost.stop_engine))

    def _all(self, ask: Callable[[HostCalls], Call[Answer]]) -> list[Answer]:
        """The same call on every host."""
        return self.pod.ask_hosts(lambda at, host: ask(host))
