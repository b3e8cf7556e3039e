"""The table of row optimizers: how the rows of a table and their slots change, as values.

Each is a file of `row_optimizers`; this is where the rest of the program finds them.
"""

from __future__ import annotations

from podembed.embedding.row_optimizers.adagrad import Adagrad
from podembed.embedding.row_optimizers.adagrad_momentum import AdagradMomentum
from podembed.embedding.row_optimizers.adam import Adam
from podembed.embedding.row_optimizers.base import (
    ClipValue,
    LearningRate,
    Optimizer,
    SlotSpec,
    is_number,
    learning_rate_at,
)
from podembed.embedding.row_optimizers.custom import CustomRowOptimizer
from podembed.embedding.row_optimizers.ftrl import FTRL
from podembed.embedding.row_optimizers.lion import Lion
from podembed.embedding.row_optimizers.momentum import Momentum
from podembed.embedding.row_optimizers.row_wise_adagrad import RowWiseAdagrad
from podembed.embedding.row_optimizers.sgd import SGD

__all__ = [
    "FTRL",
    "ROW_OPTIMIZERS",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "ClipValue",
    "CustomRowOptimizer",
    "LearningRate",
    "Lion",
    "Momentum",
    "Optimizer",
    "RowWiseAdagrad",
    "SlotSpec",
    "is_number",
    "learning_rate_at",
]

ROW_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    SGD,
    Momentum,
    Adagrad,
    RowWiseAdagrad,
    AdagradMomentum,
    FTRL,
    Adam,
    Lion,
    CustomRowOptimizer,
)
