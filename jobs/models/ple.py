"""PLE: experts of each task beside shared ones, in levels. One level is CGC, customized gate control.

The source is Tang et al. 2020, "Progressive layered extraction (PLE): a novel multi-task learning model for
personalized recommendations".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import ModelBatch, ModelSpec, StepContext
from podembed.jobs.models.layers import init_layers, linear_each
from podembed.jobs.models.mmoe import input_width, inputs_of, mixed, score, stacked

SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PLE:
    """Returns one score a sample for each task.

    Attributes:
      tasks: tasks as in `JobConfig.tasks`; none is called `shared`.
      levels: levels of experts, one on the other.
      own_experts, shared_experts: of each task, and of all, in each level.
      expert: widths of the layers of each expert.
      tower: hidden widths of each task's tower; its last layer, of width 1, is added.
    """

    tasks: tuple[str, ...]
    levels: int = 2
    own_experts: int = 2
    shared_experts: int = 2
    expert: tuple[int, ...] = (32,)
    tower: tuple[int, ...] = (16,)

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Glorot-normal weights and small random biases."""
        width, levels = input_width(spec), []
        *level_keys, tower_key = jax.random.split(key, self.levels + 1)
        for number, level_key in enumerate(level_keys):
            levels.append(self._level(level_key, width, is_last=number == self.levels - 1))
            width = self.expert[-1]
        tower_keys = jax.random.split(tower_key, len(self.tasks))
        towers = {
            name: init_layers(one, width, (*self.tower, 1)) for name, one in zip(self.tasks, tower_keys, strict=True)
        }
        return {"levels": levels, "towers": towers}

    def _level(self, key: jax.Array, width: int, *, is_last: bool) -> dict[str, Any]:
        """Experts and gates of one level. The last one needs no shared gate, since no level follows."""
        names = (*self.tasks, SHARED)
        experts, gates = {}, {}
        for name, of_name in zip(names, jax.random.split(key, len(names)), strict=True):
            count = self.shared_experts if name == SHARED else self.own_experts
            gate_key, *expert_keys = jax.random.split(of_name, 1 + count)
            experts[name] = [init_layers(one, width, self.expert) for one in expert_keys]
            seen = self.own_experts * (len(self.tasks) if name == SHARED else 1) + self.shared_experts
            if name != SHARED or not is_last:
                gates[name] = init_layers(gate_key, width, (seen,))[0]
        return {"experts": experts, "gates": gates}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        """`[n]` for each task."""
        names = (*self.tasks, SHARED)
        # All names in one group, and later each in its own, so that layers of the same inputs are one product.
        groups: dict[tuple[str, ...], jax.Array] = {names: inputs_of(batch)}
        for level in params["levels"]:
            experts, gates = {}, {}
            for own, inputs in groups.items():
                layers = [one[0] for name in own for one in level["experts"][name]]
                gated = [name for name in own if name in level["gates"]]
                found = iter(linear_each([*layers, *(level["gates"][name] for name in gated)], inputs))
                for name in own:
                    of_name = level["experts"][name]
                    experts[name] = stacked(of_name, [next(found) for _ in of_name])
                gates |= dict(zip(gated, found, strict=True))
            # A task sees its own experts and the shared ones, and the shared state sees all.
            seen = {name: (experts[name], experts[SHARED]) for name in self.tasks}
            seen[SHARED] = tuple(experts[name] for name in names)
            groups = {(name,): mixed(gate, jnp.concatenate(seen[name], axis=1)) for name, gate in gates.items()}
        return {name: score(params["towers"][name], groups[(name,)]) for name in self.tasks}
