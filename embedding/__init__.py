"""Values and math: tables, features, row optimizers, lookups and updates; and the Keras-style optimizer for dense
parameters.

Names that need JAX are imported when they are first used, so that a host process that only holds rows does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embedding.config import FeatureConfig, QuantizationConfig, RowIdInitializer, TableConfig
from embedding.features.feature_order import FeatureOrder
from embedding.initializers import Constant, RowId, TruncatedNormal, Uniform
from embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam, CustomRowOptimizer, RowWiseAdagrad, SlotSpec
from embedding.ragged import Ragged

if TYPE_CHECKING:
    from embedding.features.activations import Activations
    from embedding.features.inputs import Sparse
    from embedding.keras import schedules
    from embedding.keras import sgd_ftrl as keras_optimizers
    from embedding.keras.reducer import GradientReducer
    from embedding.keras.row_slices import RowSlices
    from embedding.keras.tape import GradientTape
    from embedding.keras.variable import Variable
    from embedding.replicas.distributed_input import InputContext
    from embedding.replicas.per_replica import PerReplica
    from embedding.replicas.reduction import ReduceOp
    from embedding.replicas.replica_context import get_replica_context
    from embedding.replicas.strategies import LocalStrategy
    from embedding.tpu_embedding.checkpoint import Checkpoint, latest_checkpoint
    from embedding.tpu_embedding.embedding import TPUEmbedding
    from embedding.tpu_embedding.send_gradients import send_tpu_embedding_gradients
    from embedding.tpu_embedding.serving import TPUEmbeddingForServing, serving_embedding_lookup

_LATE = {
    "Activations": "embedding.features.activations",
    "Checkpoint": "embedding.tpu_embedding.checkpoint",
    "GradientReducer": "embedding.keras.reducer",
    "GradientTape": "embedding.keras.tape",
    "InputContext": "embedding.replicas.distributed_input",
    "LocalStrategy": "embedding.replicas.strategies",
    "PerReplica": "embedding.replicas.per_replica",
    "ReduceOp": "embedding.replicas.reduction",
    "RowSlices": "embedding.keras.row_slices",
    "Sparse": "embedding.features.inputs",
    "TPUEmbedding": "embedding.tpu_embedding.embedding",
    "TPUEmbeddingForServing": "embedding.tpu_embedding.serving",
    "Variable": "embedding.keras.variable",
    "get_replica_context": "embedding.replicas.replica_context",
    "send_tpu_embedding_gradients": "embedding.tpu_embedding.send_gradients",
    "serving_embedding_lookup": "embedding.tpu_embedding.serving",
    "latest_checkpoint": "embedding.tpu_embedding.checkpoint",
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
