"""A Keras-style optimizer as the dense optimizer of a job: jitted in the step, committed with the run, restored to the
same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optax
import pytest

from podembed.embedding.tf.keras import keras_optimizers, schedules
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from tests.long_tests import long_case
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job
from tests.training import fit_job


class Signs(keras_optimizers.Optimizer):
    """A user's own rule: steps of the learning rate against the sign of a running mean of the gradient."""

    def __init__(self, learning_rate: Any = 0.01, name: str = "Signs", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self.means = [self.add_variable_from_reference(v, "mean") for v in var_list]
        self._built = True

    def update_step(self, gradient: Any, variable: Any) -> None:
        mean = self.means[self._index_dict[self._var_key(variable)]]
        mean.assign(0.9 * mean + 0.1 * gradient)
        variable.assign_sub(self.learning_rate * mean / (abs(mean) + 1e-12))


def _optimizers() -> dict[str, optax.GradientTransformation]:
    decay = schedules.ExponentialDecay(0.02, decay_steps=7, decay_rate=0.8)
    return {
        "adam": keras_optimizers.Adam(decay, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=4).as_optax(),
        "own": Signs(0.003, clipvalue=0.1).as_optax(),
    }


def _train(folder: str, storage: Path, name: str, optimizer: optax.GradientTransformation, *, steps: int) -> Result:
    job = replace(small_job(folder=folder, audit=False), dense_optimizer=optimizer)
    return fit_job(job, storage, name=name, max_steps=steps, checkpoint_config=CheckpointConfig(every_steps=5))


@pytest.mark.parametrize("kind", [long_case("adam"), "own"])
def test_a_keras_optimizer_trains_and_survives_a_cut(kind: str, small_data: str, tmp_path: Path) -> None:
    whole = _train(small_data, tmp_path, "whole", _optimizers()[kind], steps=15)
    _train(small_data, tmp_path, "cut", _optimizers()[kind], steps=7)
    resumed = _train(small_data, tmp_path, "cut", _optimizers()[kind], steps=15)
    assert {step: whole.losses[step] for step in range(7, 15)} == resumed.losses
    assert min(whole.losses.values()) < whole.losses[0]
    state = committed_state(whole.path)
    assert any(name.startswith("dense/optimizer/") for name in state)
    assert_same_bytes(state, committed_state(resumed.path))
