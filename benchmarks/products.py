"""Which forms of a model's parts XLA is fast at on this machine's CPU. Prints one JSON line.

    python benchmarks/products.py [--samples 512] [--positions 50] [--width 64] [--threads 1]

Parts are those of a block of attention: the gradient of a weight, layers of one input, the attention itself; then the
losses of SASRec and HSTU with one block. Figures are milliseconds of CPU time, the median of rounds in
which all forms of a part take turns. Each but the gradients of weights is a forward and a backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measuring import tune_allocator

ROUNDS = 15


def medians(forms: dict[str, Callable[..., Any]], *arrays: Any) -> dict[str, float]:
    import jax

    compiled = {name: jax.jit(form).lower(*arrays).compile() for name, form in forms.items()}
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, program in compiled.items():
            began = time.process_time()
            jax.block_until_ready(program(*arrays))
            taken[name].append(time.process_time() - began)
    # The first round fills the allocator.
    return {name: round(1e3 * statistics.median(times[1:]), 2) for name, times in taken.items()}


def both_ways(form: Callable[..., Any]) -> Callable[..., Any]:
    """The form and its gradients by all its arguments, given that of its result last."""
    import jax

    def run(*arrays: Any) -> Any:
        found, gradients = jax.vjp(form, *arrays[:-1])
        return found, gradients(arrays[-1])

    return run


def attention(heads: int, *, form: str) -> Callable[..., Any]:
    """`[n, positions, width]` each. Forms: heads behind positions, as it is often written, heads first, or no axis of
    heads.
    """
    import jax
    import jax.numpy as jnp

    scores, sums = {
        "heads last": ("nqhd,nkhd->nhqk", "nhqk,nkhd->nqhd"),
        "heads first": ("nhqd,nhkd->nhqk", "nhqk,nhkd->nhqd"),
        "no heads": ("nqd,nkd->nqk", "nqk,nkd->nqd"),
    }[form]

    def attend(q: Any, k: Any, v: Any) -> Any:
        shape, places = q.shape, jnp.arange(q.shape[1])
        if form != "no heads":
            q, k, v = (one.reshape(*shape[:2], heads, -1) for one in (q, k, v))
        if form == "heads first":
            q, k, v = (one.swapaxes(1, 2) for one in (q, k, v))
        logits = jnp.where(places[:, None] >= places, jnp.einsum(scores, q, k) / q.shape[-1] ** 0.5, -1e9)
        found = jnp.einsum(sums, jax.nn.softmax(logits), v)
        return (found.swapaxes(1, 2) if form == "heads first" else found).reshape(shape)

    return attend


def parts(num_samples: int, positions: int, width: int) -> dict[str, dict[str, float]]:
    import jax.numpy as jnp
    import numpy as np

    from podembed.jobs.models.layers import _at_once, _by_sample, linear_each, product

    random = np.random.default_rng(0)

    def drawn(*sizes: int) -> Any:
        return jnp.asarray(random.standard_normal(sizes, np.float32))

    def one_by_one(x: Any, *weights: Any) -> Any:
        return [product(x, weight) for weight in weights]

    def joined(x: Any, *weights: Any) -> Any:
        return linear_each([{"weight": one, "bias": jnp.zeros(width)} for one in weights], x)

    x, weights = drawn(num_samples, positions, width), [drawn(width, width) for _ in range(3)]
    found = {
        f"gradient of a weight {width} x {wide}": medians(
            {"x.T @ g": _at_once, "by sample": _by_sample}, x, drawn(num_samples, positions, wide)
        )
        for wide in (width, 2 * width)
    }
    for count in (2, 3):
        found[f"{count} layers of one input"] = medians(
            {"product each": both_ways(one_by_one), "one product": both_ways(joined)}, x, *weights[:count], [x] * count
        )
    for heads in (1, 2):
        forms = ("heads last", "heads first", "no heads")[: 4 - heads]
        found[f"attention of {heads} head{'s' * (heads > 1)}"] = medians(
            {form: both_ways(attention(heads, form=form)) for form in forms},
            *(drawn(num_samples, positions, width) for _ in range(4)),
        )
    for kind in ("SASRec", "HSTU"):
        found[kind] = model_steps(kind, num_samples, positions, width)
    return found


def model_steps(kind: str, num_samples: int, positions: int, width: int) -> dict[str, float]:
    """A loss and its gradients: of all positions with and without dropout, and of 20 candidates by the last state. The
    history is padded, or comes as rows in the room that a step has for it.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from podembed import Jagged, ModelBatch, ModelSpec, StepContext
    from podembed.embedding.features.activations import Activations
    from podembed.jobs import models
    from podembed.workers.job.padding import SequencePadding

    random, names = np.random.default_rng(0), ("history", "next", "other")
    shapes = {"item": (20, width), **dict.fromkeys(names, (positions, width))}
    spec = ModelSpec(
        num_dense=0, activation_shapes=shapes, batch_size=num_samples, sequences=dict.fromkeys(names, positions)
    )
    drawn = random.integers(1, positions + 1, num_samples)
    padding, lengths = SequencePadding({"history": positions}, num_samples), jnp.asarray(drawn, jnp.int32)
    num_rows = padding.vectors("history", padding.levels_for({"history": drawn}))
    arrays = {name: random.standard_normal((num_samples, *shape), np.float32) for name, shape in shapes.items()}

    arrays["rows"] = random.standard_normal((num_rows, width), np.float32)

    def step(dropout: float, *, by_row: bool = False, **trained: str) -> Callable[..., Any]:
        model = getattr(models, kind)(history="history", item="item", blocks=1, dropout=dropout, **trained)

        def loss(params: Any, arrays: Any) -> Any:
            batch = ModelBatch(
                dense=jnp.zeros((num_samples, 0)),
                activations=Activations(arrays),
                labels={"label": jnp.ones(num_samples)},
                weights=jnp.ones(num_samples),
                lengths=dict.fromkeys(names, lengths),
                sequences={
                    "history": Jagged.of(arrays["rows"], lengths, longest=positions)
                    if by_row
                    else Jagged.of_padded(arrays["history"], lengths)
                },
            )
            context = StepContext.alone(num_samples)
            return model.loss(model.apply(params, batch, context), batch, context).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))

    trained = {"positives": "next", "negatives": "other"}
    made = getattr(models, kind)(history="history", item="item", blocks=1, **trained)
    return medians(
        {
            "all positions": step(0.0, **trained),
            "all positions, dropout": step(0.2, **trained),
            "last state": step(0.0),
            "all positions, as rows": step(0.0, by_row=True, **trained),
            "all positions, as rows, dropout": step(0.2, by_row=True, **trained),
            "last state, as rows": step(0.0, by_row=True),
        },
        made.init(jax.random.key(0), spec),
        arrays,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--positions", type=int, default=50)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    tune_allocator()
    # Before JAX is imported.
    os.environ["PJRT_NPROC"] = str(given.threads)
    import jax

    shape = {"samples": given.samples, "positions": given.positions, "width": given.width, "threads": given.threads}
    found = parts(given.samples, given.positions, given.width)
    print(json.dumps({"benchmark": "products", "jax": jax.__version__, **shape, "cpu_ms": found}))


if __name__ == "__main__":
    main()
