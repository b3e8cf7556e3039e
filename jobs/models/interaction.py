"""The dot interaction of DLRM: products of all pairs of a sample's vectors (Naumov et al. 2019, arXiv:1906.00091).

On a CPU, XLA makes this a batch of small matrix products, copies to bring the vectors together, and a gather of the
lower triangle. There a numba kernel inside the compiled step does it in one pass over the vectors where they lie.
Everywhere else, and in exported models, it is plain JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podembed.jobs.models import interaction_cpu
from podembed.workers.model.portable import is_portable


def with_products(vectors: Sequence[jax.Array]) -> jax.Array:
    """The first vector of each sample, followed by the products of all pairs of its vectors.

    Args:
      vectors: `[n, width]` each, of one type.

    Returns:
      `[n, width + F * (F - 1) / 2]` for F vectors; pairs (1, 0), (2, 0), (2, 1), (3, 0) and so on.
    """
    is_known = {vector.dtype for vector in vectors} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    if len(vectors) < 2 or not is_known or is_portable() or not interaction_cpu.is_available():
        return _in_jax(*vectors)
    return jax.lax.platform_dependent(*vectors, cpu=_in_kernel, default=_in_jax)


def _in_kernel(*vectors: jax.Array) -> jax.Array:
    """The kernel reads float32 alone. Copies of narrower vectors cost less than small products in bfloat16."""
    found = interaction_cpu.with_products(*(vector.astype(jnp.float32) for vector in vectors))
    return found.astype(jnp.result_type(*vectors))


def _in_jax(*vectors: jax.Array) -> jax.Array:
    stacked = jnp.stack(vectors, axis=1)
    products = jnp.einsum("nfd,ngd->nfg", stacked, stacked)
    rows, columns = np.tril_indices(len(vectors), -1)
    return jnp.concatenate([vectors[0], products[:, rows, columns]], axis=1)
