"""Mixed precision: what a model computes with, where a job has another `compute_dtype` than float32.

Parameters, optimizer state and the model's own state stay float32. The step casts what the model is given, and casts
what it returns back. Gradients pass the same casts, so that they are float32 where they arrive. Source: Micikevicius et
al., Mixed precision training, 2018. bfloat16 has the exponents of float32, so no loss needs to be scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from podembed.workers.model.batch import ModelBatch


def cast(tree: Any, dtype: str) -> Any:
    """Float32 arrays as another type; all other leaves as they are."""

    def one(leaf: Any) -> Any:
        is_wide = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
        return leaf.astype(dtype) if is_wide else leaf

    return jax.tree.map(one, tree)


def cast_batch(batch: ModelBatch, dtype: str) -> ModelBatch:
    """Dense numbers, activations and extra columns as another type. Labels and weights are for the loss."""
    return replace(
        batch,
        dense=cast(batch.dense, dtype),
        activations=cast(batch.activations, dtype),
        sequences=cast(batch.sequences, dtype),
        columns=cast(batch.columns, dtype),
    )


def widened(tree: Any) -> Any:
    """Floating-point arrays of 16 bits as float32; all other leaves as they are."""

    def one(leaf: Any) -> Any:
        is_narrow = isinstance(leaf, jax.Array) and leaf.dtype in (jnp.bfloat16, jnp.float16)
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(one, tree)


def with_types_of(tree: Any, before: Any) -> Any:
    """Floating-point arrays in the types that they had before; as they are if there are more or fewer of them."""

    def one(leaf: Any, dtype: Any) -> Any:
        are_floating = all(jnp.issubdtype(kind, jnp.floating) for kind in (jnp.result_type(leaf), dtype))
        return leaf.astype(dtype) if are_floating and isinstance(leaf, jax.Array) else leaf

    leaves, structure = jax.tree.flatten(tree)
    types = [jnp.result_type(leaf) for leaf in jax.tree.leaves(before)]
    if len(leaves) != len(types):
        return tree
    return jax.tree.unflatten(structure, [one(leaf, dtype) for leaf, dtype in zip(leaves, types, strict=True)])
