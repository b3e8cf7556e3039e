"""`HaikuModel`: a function of haiku as a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from podembed.workers.model.batch import ModelBatch, WithState
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from podembed.workers.model.extras import framework


@dataclass(frozen=True, slots=True)
class HaikuModel:
    """A function that uses modules of haiku as a model.

    ```python
    model = HaikuModel(lambda batch, context: hk.Linear(1)(batch.dense)[:, 0])
    ```

    Args:
      function: function of a batch and the context of the step; returns scores, `[n]`, or other outputs.
        `hk.next_rng_key` gives keys of the step, and `hk.get_state` what the model keeps.
      loss: `loss(outputs, batch, context)`, as `podembed.Model` says; left out, that of the job.
    """

    function: Callable[[ModelBatch, StepContext], Any]
    loss: Callable[..., Any] | None = None

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """First values, found by a call with a batch of zeros."""
        params, state = self._transformed.init(key, spec.example(), StepContext.alone(1))
        return WithState(dict(params), dict(state))

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """Calls the function."""
        outputs, after = self._transformed.apply(params, context.state, context.key, batch, context)
        return WithState(outputs, dict(after))

    @property
    def _transformed(self) -> Any:
        hk = framework("haiku", extra="haiku")

        return hk.transform_with_state(self.function)
