"""Optimizers for dense parameters with the names, defaults and formulas of `tf.keras.optimizers.experimental`, over JAX
arrays.

Optimizers for table rows are in `embedding.optimizers`.

Read `optimizer.py` first (the base class), then `adam.py` as an example; `functional.py` runs any of them inside
`jax.jit`.
"""
