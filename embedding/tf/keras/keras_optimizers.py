"""Optimizers for dense parameters with the names, defaults and formulas of `tf.keras.optimizers.experimental` in
TensorFlow 2.9.

Each rule is a pure function over arrays, each class only keeps slots and hyperparameters. Row optimizers of
`embedding.optimizers` have the same names, since they are the same algorithms. So use these through this module.
"""

from __future__ import annotations

from podembed.embedding.tf.keras.adagrad import Adadelta, RMSprop
from podembed.embedding.tf.keras.adagrad import KerasAdagrad as Adagrad
from podembed.embedding.tf.keras.adam import AdamW
from podembed.embedding.tf.keras.adam import KerasAdam as Adam
from podembed.embedding.tf.keras.adamax_nadam import Adamax, Nadam
from podembed.embedding.tf.keras.optimizer import KerasOptimizer as Optimizer
from podembed.embedding.tf.keras.sgd_ftrl import Ftrl
from podembed.embedding.tf.keras.sgd_ftrl import KerasSGD as SGD

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Nadam", "Optimizer", "RMSprop"]
