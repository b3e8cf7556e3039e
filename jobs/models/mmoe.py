"""MMoE: experts that all tasks share, and for each task a gate that mixes them and a tower.

The source is Ma et al. 2018, "Modeling task relationships in multi-task learning with multi-gate mixture-of-experts".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import ModelBatch, ModelSpec, StepContext
from podembed.jobs.models.layers import Layers, init_layers, linear, linear_each, rectified


@dataclass(frozen=True, slots=True, kw_only=True)
class MMoE:
    """Returns one score a sample for each task.

    Attributes:
      tasks: tasks as in `JobConfig.tasks`.
      num_experts: shared by all tasks.
      expert: widths of the layers of each expert.
      tower: hidden widths of each task's tower; its last layer, of width 1, is added.
    """

    tasks: tuple[str, ...]
    num_experts: int = 4
    expert: tuple[int, ...] = (32,)
    tower: tuple[int, ...] = (16,)

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Glorot-normal weights and small random biases."""
        width = input_width(spec)
        keys = jax.random.split(key, self.num_experts + 2 * len(self.tasks))
        gate_keys, tower_keys = keys[self.num_experts :: 2], keys[self.num_experts + 1 :: 2]
        return {
            "experts": [init_layers(one, width, self.expert) for one in keys[: self.num_experts]],
            "gates": {
                name: init_layers(one, width, (self.num_experts,))[0]
                for name, one in zip(self.tasks, gate_keys, strict=True)
            },
            "towers": {
                name: init_layers(one, self.expert[-1], (*self.tower, 1))
                for name, one in zip(self.tasks, tower_keys, strict=True)
            },
        }

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        """`[n]` for each task."""
        inputs = inputs_of(batch)
        gates = [params["gates"][name] for name in self.tasks]
        found = linear_each([*(layers[0] for layers in params["experts"]), *gates], inputs)
        experts = stacked(params["experts"], found[: len(params["experts"])])
        return {
            name: score(params["towers"][name], mixed(gate, experts))
            for name, gate in zip(self.tasks, found[len(params["experts"]) :], strict=True)
        }


def input_width(spec: ModelSpec) -> int:
    """Width of the answer of `inputs_of`."""
    return spec.num_dense + sum(math.prod(shape) for shape in spec.activation_shapes.values())


def inputs_of(batch: ModelBatch) -> jax.Array:
    """`[n, width]`: dense numbers and the vectors of all features side by side."""
    vectors = [block.reshape(block.shape[0], -1) for block in batch.activations.values()]
    return jnp.concatenate([batch.dense, *vectors], axis=1)


def stacked(experts: Sequence[Layers], firsts: Sequence[jax.Array]) -> jax.Array:
    """`[n, experts, width]`, from what the first layer of each gave."""
    outputs = [rectified(layers[1:], jax.nn.relu(first)) for layers, first in zip(experts, firsts, strict=True)]
    return jnp.stack(outputs, axis=1)


def mixed(gate: jax.Array, experts: jax.Array) -> jax.Array:
    """`[n, width]`: experts `[n, experts, width]`, weighted by the softmax of a gate's outputs `[n, experts]`."""
    return jnp.einsum("ne,new->nw", jax.nn.softmax(gate), experts)


def score(tower: Layers, inputs: jax.Array) -> jax.Array:
    """`[n]`; the last layer has no rectifier."""
    *hidden, last = tower
    return linear(last, rectified(hidden, inputs))[:, 0]
