"""`strategy.run` with a `TPUEmbedding` beside `Trainer` on the same job: the ratio of their step times. Prints one JSON
line.

    python benchmarks/strategy_run.py --bench A10 --hosts 2
    python benchmarks/strategy_run.py --bench cut --hosts 2
    python benchmarks/strategy_run.py --bench A10 --hosts 2 --tcp
    python benchmarks/strategy_run.py --bench A10 --hosts 1
    python benchmarks/strategy_run.py --bench tiny --hosts 2 --parts

With `--parts` it also says how long parts of a user's step take. One is a function that does nothing, one takes
activations, and one gives them back as gradients.

With `--tcp` hosts of one machine share no memory, neither those of `Trainer` nor those of the strategy.

The loop over the strategy is the one of docs/from-tpuembedding.md. The driver enqueues the whole batch, and a function
on the hosts dequeues, differentiates and applies gradients. `Trainer` has its hosts from `WorkerGroup`, as its driver
starts them, with input from memory. Both have hosts of their own, which stand side by side. Windows of steps take
turns, so that a machine that gets busier in between favours neither. The ratio is the median over pairs of windows,
with its 10th and 90th percentile. The program fails if the losses of the first steps differ. Target: at most 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.dlrm import NUM_BATCHES, WARM_UP_STEPS, prepare_environment, reference_of, start_group  # noqa: E402
from benchmarks.pairs import add_options, largest_difference, spread  # noqa: E402
from benchmarks.workload import Batches, make_batches, workload  # noqa: E402
from podembed.embedding.ragged import Ragged  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

NUM_CHECKED = 8
TOLERANCE = 1e-5


class OfTrainer:
    """The job as `Trainer` runs it. Mutated: the number of the next step.

    Attributes:
      losses: of all steps.
    """

    def __init__(self, arguments: argparse.Namespace, reference: JobReference) -> None:
        self._group = start_group(arguments, reference, shares_memory=arguments.shared_memory)
        self._step = 0
        self.losses: list[float] = []

    def train(self, num_steps: int) -> None:
        _, devices = self._group.train(self._step, self._step + num_steps, is_followed=True)
        self._step += num_steps
        self.losses += devices[0].losses

    def close(self) -> None:
        self._group.stop()


class OfStrategy:
    """The same job as a user's loop over a strategy. Mutated as `OfTrainer`."""

    def __init__(self, arguments: argparse.Namespace, reference: JobReference, batches: Batches) -> None:
        from podembed import PodStrategy
        from podembed.embedding import TPUEmbedding

        job = reference.resolve()
        self._batches, self._step = batches, 0
        self.losses: list[float] = []
        self._strategy = PodStrategy(arguments.hosts, threads_per_host=1, shares_memory=arguments.shared_memory)
        with self._strategy.scope():
            embedding = TPUEmbedding(job.features, batch_size=job.batch_size, optimizer=job.optimizer)
        self._embedding = embedding
        self._run_step = training_step(embedding)
        self._strategy.run(begin, args=(reference,))

    def _enqueue(self, *, training: bool = True) -> int:
        at = self._step % len(self._batches.labels)
        features = {f"f{table:02d}": Ragged.of_dense(ids[at]) for table, ids in enumerate(self._batches.ids)}
        self._embedding.enqueue(features, training=training)
        return at

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            at = self._enqueue()
            arguments = self._strategy.split((self._batches.dense[at], self._batches.labels[at]))
            found = self._strategy.run(self._run_step, args=arguments)
            self.losses.append(self._strategy.local_results(found)[0])
            self._step += 1

    def parts(self) -> dict[str, Callable[[], Any]]:
        """What a step does at least, by name. The last one trains with gradients that mean nothing."""
        take, give_back = taking(self._embedding), giving_back(self._embedding)
        return {
            "run": lambda: self._strategy.run(nothing),
            "and_lookup": lambda: (self._enqueue(training=False), self._strategy.run(take)),
            "and_update": lambda: (self._enqueue(), self._strategy.run(give_back)),
        }

    def close(self) -> None:
        self._strategy.close()


def begin(reference: JobReference) -> None:
    """First values of the dense half, and its two compiled functions, into the state of a replica."""
    import jax
    import jax.numpy as jnp
    import optax

    from podembed.embedding import Activations, get_replica_context

    job = reference.resolve()
    model, optimizer = job.model, job.dense_optimizer
    if optimizer is None:
        raise ValueError("Found a job without an optimizer of its dense half. Expected one.")
    params = model.init(jax.random.key(job.seed), job.data.num_dense, job.widths)

    def summed_loss(params: Any, activations: Any, dense: Any, labels: Any) -> Any:
        scores = model.apply(params, dense, Activations(activations))
        return jnp.sum(optax.sigmoid_binary_cross_entropy(scores, labels)) / job.batch_size

    @jax.jit
    def update(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    context = get_replica_context()
    if context is None:
        raise RuntimeError("begin was called outside of a replica. Expected strategy.run(begin).")
    context.state.update(
        params=params,
        optimizer=optimizer.init(params),
        gradients=jax.jit(jax.value_and_grad(summed_loss, argnums=(0, 1))),
        update=update,
    )


def training_step(embedding: Any) -> Callable[..., float]:
    """The function that runs on every replica, as a user writes it."""

    def step(dense: Any, labels: Any) -> float:
        import jax

        from podembed.embedding import default_gradient_reducer, get_replica_context

        state = get_replica_context().state
        activations = embedding.dequeue()
        loss, (gradients, of_activations) = state["gradients"](state["params"], activations, dense, labels)
        embedding.apply_gradients(of_activations)
        leaves, structure = jax.tree.flatten(gradients)
        *totals, total_loss = default_gradient_reducer().sum([*leaves, loss])
        gradients = jax.tree.unflatten(structure, totals)
        state["params"], state["optimizer"] = state["update"](state["params"], state["optimizer"], gradients)
        return float(total_loss)

    return step


def nothing() -> None:
    pass


def taking(embedding: Any) -> Callable[[], None]:
    def take() -> None:
        embedding.dequeue()

    return take


def giving_back(embedding: Any) -> Callable[[], None]:
    def give_back() -> None:
        embedding.apply_gradients(embedding.dequeue())

    return give_back


def measured_parts(strategy: OfStrategy, *, num_steps: int) -> dict[str, dict[str, float]]:
    """By part, ms and CPU ms of one, the smallest of three windows."""
    found: dict[str, dict[str, float]] = {}
    for name, do in strategy.parts().items():
        windows = []
        for _ in range(1 + 3):
            before, started = sum(_cpu_s().values()), time.perf_counter()
            for _ in range(num_steps):
                do()
            seconds = time.perf_counter() - started, sum(_cpu_s().values()) - before
            windows.append([round(1e3 * one / num_steps, 2) for one in seconds])
        # The first one compiles.
        found[name] = dict(zip(("step_ms", "cpu_ms"), map(min, *windows[1:]), strict=True))
    return found


def measure(arguments: argparse.Namespace, trainer: OfTrainer, strategy: OfStrategy) -> dict[str, Any]:
    """Pairs of windows; who begins changes from pair to pair."""
    step_ms: dict[str, list[float]] = {"trainer": [], "strategy": []}
    cpu_ms: dict[str, list[float]] = {"trainer": [], "strategy": []}
    roles: dict[str, dict[str, list[float]]] = {"trainer": {}, "strategy": {}}
    contenders: list[tuple[str, OfTrainer | OfStrategy]] = [("trainer", trainer), ("strategy", strategy)]
    for _, contender in contenders:
        contender.train(max(WARM_UP_STEPS, NUM_CHECKED))
    for number in range(arguments.pairs):
        for name, contender in contenders if number % 2 == 0 else contenders[::-1]:
            before, started = _cpu_s(), time.perf_counter()
            contender.train(arguments.window)
            step_ms[name].append(1e3 * (time.perf_counter() - started) / arguments.window)
            used = {role: 1e3 * (cpu_s - before.get(role, 0.0)) / arguments.window for role, cpu_s in _cpu_s().items()}
            cpu_ms[name].append(sum(used.values()))
            for role, of_role in used.items():
                roles[name].setdefault(role, []).append(of_role)
    return {
        **{f"{name}_step_ms": round(statistics.median(found), 2) for name, found in step_ms.items()},
        **{f"{name}_cpu_ms": round(statistics.median(found), 2) for name, found in cpu_ms.items()},
        "cpu_ms_by_process": {
            name: {role: round(statistics.fmean(used), 1) for role, used in found.items()}
            for name, found in roles.items()
        },
        "ratio": spread(_ratios(step_ms)),
        "cpu_ratio": spread(_ratios(cpu_ms)),
        "losses": [round(loss, 6) for loss in trainer.losses[:NUM_CHECKED]],
        "has_the_losses_of_trainer": trainer.losses == strategy.losses,
        "largest_difference": largest_difference(
            trainer.losses, strategy.losses, NUM_CHECKED, TOLERANCE, ("of Trainer", "of strategy.run")
        ),
    }


def _cpu_s() -> dict[str, float]:
    return measuring.cpu_s(measuring.process_tree(os.getpid()))


def _ratios(found: dict[str, list[float]]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(found["strategy"], found["trainer"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--parts", action="store_true", help="also the parts of a user's step")
    arguments = parser.parse_args()
    prepare_environment()
    from podembed.orchestrator.cluster.connection import connected

    shape = workload(arguments.bench)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder, ExitStack() as stack:
        batches = make_batches(shape, NUM_BATCHES)
        batches.write(Path(folder))
        reference = reference_of(folder, arguments)
        stack.enter_context(connected(2 * arguments.hosts))
        trainer = OfTrainer(arguments, reference)
        stack.callback(trainer.close)
        strategy = OfStrategy(arguments, reference, batches)
        stack.callback(strategy.close)
        result = measure(arguments, trainer, strategy)
        if arguments.parts:
            result["parts"] = measured_parts(strategy, num_steps=10 * arguments.window)
    shown = {name: getattr(arguments, name) for name in ("bench", "hosts", "emb_opt", "shared_memory", "pairs")}
    line = {"benchmark": "strategy_run", **shown, "window_steps": arguments.window, **result}
    print(json.dumps({**line, "load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}), flush=True)


if __name__ == "__main__":
    main()
