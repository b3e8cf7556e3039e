"""Values and math: tables, features, row optimizers, lookups and updates; and the Keras-style optimizer for dense
parameters.

Names that need JAX are imported when they are first used, so that a host process that only holds rows does not load it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from podembed.embedding.config import FeatureConfig, QuantizationConfig, RowIdInitializer, TableConfig
from podembed.embedding.features.feature_order import FeatureOrder
from podembed.embedding.initializers import Constant, RandomNormal, RowId, TruncatedNormal, Uniform
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    RowWiseAdagrad,
    SlotSpec,
)
from podembed.embedding.ragged import Ragged
from podembed.embedding.vocabulary.policies import (
    Always,
    LeastFrequent,
    LeastRecent,
    MinCount,
    Never,
    Probability,
    SmallNorm,
)

if TYPE_CHECKING:
    from podembed.embedding.features.activations import Activations
    from podembed.embedding.tf.features.inputs import Sparse
    from podembed.embedding.tf.keras import keras_optimizers, schedules
    from podembed.embedding.tf.keras.reducer import GradientReducer, default_gradient_reducer
    from podembed.embedding.tf.keras.row_slices import RowSlices
    from podembed.embedding.tf.keras.tape import GradientTape
    from podembed.embedding.tf.keras.variable import Variable
    from podembed.embedding.tf.replicas.distributed_input import InputContext
    from podembed.embedding.tf.replicas.per_replica import PerReplica
    from podembed.embedding.tf.replicas.reduction import ReduceOp
    from podembed.embedding.tf.replicas.replica_context import get_replica_context
    from podembed.embedding.tf.replicas.strategies import LocalStrategy
    from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint, latest_checkpoint
    from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
    from podembed.embedding.tf.tpu_embedding.send_gradients import send_tpu_embedding_gradients
    from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing, serving_embedding_lookup

_LATE = {
    "Activations": "podembed.embedding.features.activations",
    "Checkpoint": "podembed.embedding.tf.tpu_embedding.checkpoint",
    "GradientReducer": "podembed.embedding.tf.keras.reducer",
    "GradientTape": "podembed.embedding.tf.keras.tape",
    "InputContext": "podembed.embedding.tf.replicas.distributed_input",
    "LocalStrategy": "podembed.embedding.tf.replicas.strategies",
    "PerReplica": "podembed.embedding.tf.replicas.per_replica",
    "ReduceOp": "podembed.embedding.tf.replicas.reduction",
    "RowSlices": "podembed.embedding.tf.keras.row_slices",
    "Sparse": "podembed.embedding.tf.features.inputs",
    "TPUEmbedding": "podembed.embedding.tf.tpu_embedding.embedding",
    "TPUEmbeddingForServing": "podembed.embedding.tf.tpu_embedding.serving",
    "Variable": "podembed.embedding.tf.keras.variable",
    "default_gradient_reducer": "podembed.embedding.tf.keras.reducer",
    "get_replica_context": "podembed.embedding.tf.replicas.replica_context",
    "send_tpu_embedding_gradients": "podembed.embedding.tf.tpu_embedding.send_gradients",
    "serving_embedding_lookup": "podembed.embedding.tf.tpu_embedding.serving",
    "latest_checkpoint": "podembed.embedding.tf.tpu_embedding.checkpoint",
    "keras_optimizers": "podembed.embedding.tf.keras.keras_optimizers",
    "schedules": "podembed.embedding.tf.keras.schedules",
}

# Modules that are public themselves.
_MODULES = ("keras_optimizers", "schedules")

__all__ = [
    "FTRL",
    "SGD",
    "Activations",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Always",
    "Checkpoint",
    "Constant",
    "CustomRowOptimizer",
    "FeatureConfig",
    "FeatureOrder",
    "GradientReducer",
    "GradientTape",
    "InputContext",
    "LeastFrequent",
    "LeastRecent",
    "Lion",
    "LocalStrategy",
    "MinCount",
    "Momentum",
    "Never",
    "PerReplica",
    "Probability",
    "QuantizationConfig",
    "Ragged",
    "RandomNormal",
    "ReduceOp",
    "RowId",
    "RowIdInitializer",
    "RowSlices",
    "RowWiseAdagrad",
    "SlotSpec",
    "SmallNorm",
    "Sparse",
    "TPUEmbedding",
    "TPUEmbeddingForServing",
    "TableConfig",
    "TruncatedNormal",
    "Uniform",
    "Variable",
    "default_gradient_reducer",
    "get_replica_context",
    "keras_optimizers",
    "latest_checkpoint",
    "schedules",
    "send_tpu_embedding_gradients",
    "serving_embedding_lookup",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'podembed.embedding' has no attribute '{name}'")
    module = importlib.import_module(_LATE[name])
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
