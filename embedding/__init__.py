"""Values and math: tables, features, row optimizers, lookups and updates; and the Keras-style optimizer for dense parameters.

Names that need JAX are imported when they are first used, so that a host process that only holds rows does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embedding.config import FeatureConfig, QuantizationConfig, RowIdInitializer, TableConfig
from embedding.feature_order import FeatureOrder
from embedding.initializers import Constant, RowId, TruncatedNormal, Uniform
from embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam, CustomRowOptimizer, RowWiseAdagrad, SlotSpec
from embedding.ragged import Ragged

if TYPE_CHECKING:
    from embedding import keras_optimizers, schedules
    from embedding.activations import Activations
    from embedding.checkpoint import Checkpoint, latest_checkpoint
    from embedding.distributed_input import InputContext
    from embedding.gradient_reducer import GradientReducer
    from embedding.gradient_tape import GradientTape
    from embedding.inputs import Sparse
    from embedding.per_replica import PerReplica
    from embedding.reduction import ReduceOp
    from embedding.replica_context import get_replica_context
    from embedding.row_slices import RowSlices
    from embedding.send_gradients import send_tpu_embedding_gradients
    from embedding.serving import TPUEmbeddingForServing, serving_embedding_lookup
    from embedding.strategies import LocalStrategy
    from embedding.tpu_embedding import TPUEmbedding
    from embedding.variable import Variable

_LATE = {
    "Activations": "embedding.activations",
    "Checkpoint": "embedding.checkpoint",
    "GradientReducer": "embedding.gradient_reducer",
    "GradientTape": "embedding.gradient_tape",
    "InputContext": "embedding.distributed_input",
    "LocalStrategy": "embedding.strategies",
    "PerReplica": "embedding.per_replica",
    "ReduceOp": "embedding.reduction",
    "RowSlices": "embedding.row_slices",
    "Sparse": "embedding.inputs",
    "TPUEmbedding": "embedding.tpu_embedding",
    "TPUEmbeddingForServing": "embedding.serving",
    "Variable": "embedding.variable",
    "get_replica_context": "embedding.replica_context",
    "send_tpu_embedding_gradients": "embedding.send_gradients",
    "serving_embedding_lookup": "embedding.serving",
    "latest_checkpoint": "embedding.checkpoint",
    "keras_optimizers": "",
    "schedules": "",
}

__all__ = [
    "FTRL",
    "SGD",
    "Activations",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Checkpoint",
    "Constant",
    "CustomRowOptimizer",
    "FeatureConfig",
    "FeatureOrder",
    "GradientReducer",
    "GradientTape",
    "InputContext",
    "LocalStrategy",
    "PerReplica",
    "QuantizationConfig",
    "Ragged",
    "ReduceOp",
    "RowId",
    "RowIdInitializer",
    "RowSlices",
    "RowWiseAdagrad",
    "SlotSpec",
    "Sparse",
    "TPUEmbedding",
    "TPUEmbeddingForServing",
    "TableConfig",
    "TruncatedNormal",
    "Uniform",
    "Variable",
    "get_replica_context",
    "keras_optimizers",
    "latest_checkpoint",
    "schedules",
    "send_tpu_embedding_gradients",
    "serving_embedding_lookup",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'embedding' has no attribute '{name}'")
    module = importlib.import_module(_LATE[name] or f"embedding.{name}")
    return getattr(module, name) if _LATE[name] else module
