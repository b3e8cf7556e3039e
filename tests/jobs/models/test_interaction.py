"""The interaction kernel inside a compiled program, against einsum and its gradient."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.jobs.models import interaction, interaction_cpu
from tests.long_tests import is_long, long_case


@pytest.mark.parametrize(
    ("num_samples", "num_vectors", "dim"),
    # Models of other tests have this width, so that one kernel serves all.
    [(16, 9, 8), *(long_case(*one) for one in [(16, 9, 12), (5, 2, 1), (33, 27, 64), (7, 4, 200)])],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 4e-2)])
def test_kernel_equals_einsum(num_samples: int, num_vectors: int, dim: int, dtype: str, tolerance: float) -> None:
    if not interaction_cpu.is_available():
        pytest.skip("this jaxlib has another version of the foreign function interface")
    random = np.random.default_rng(0)
    columns = dim + num_vectors * (num_vectors - 1) // 2
    vectors = [jnp.asarray(random.standard_normal((num_samples, dim)), dtype) for _ in range(num_vectors)]
    upstream = jnp.asarray(random.standard_normal((num_samples, columns)), dtype)

    def both(function):
        value, pull = jax.vjp(function, *vectors)
        return value, pull(upstream)

    found = jax.jit(lambda: both(lambda *v: interaction.with_products(v)))()
    expected = jax.jit(lambda: both(interaction._in_jax))()
    for ours, theirs in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert ours.dtype == theirs.dtype == dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=tolerance, atol=tolerance)


def test_one_vector_has_no_products() -> None:
    alone = jnp.ones((3, 4))
    np.testing.assert_array_equal(interaction.with_products([alone]), alone)


def test_without_the_interface_it_is_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interaction_cpu, "is_available", lambda: False)
    vectors = [jnp.ones((2, 3)), 2 * jnp.ones((2, 3))]
    np.testing.assert_allclose(interaction.with_products(vectors)[:, 3], [6.0, 6.0])


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_for_accelerators_know_nothing_of_the_kernel(platform: str) -> None:
    """The kernel is code for the processor; its gradient must not be in there either."""
    vectors = [jnp.ones((4, 8)), 2 * jnp.ones((4, 8)), jnp.zeros((4, 8))]

    def text(platform: str) -> str:
        traced = jax.jit(jax.grad(lambda *v: interaction.with_products(v).sum(), argnums=(0, 1, 2))).trace(*vectors)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "podembed_interaction" not in text(platform)
    if interaction_cpu.is_available():
        assert "podembed_interaction" in text("cpu")


DIGEST = """
import hashlib, sys
import jax, numpy as np
from podembed.jobs.models import interaction_cpu
random = np.random.default_rng(0)
found = hashlib.sha256()
for num_samples in (1, 31, 33, 1000):
    vectors = [random.standard_normal((num_samples, 16), np.float32) for _ in range(5)]
    upstream = random.standard_normal((num_samples, 16 + 10), np.float32)
    for _ in range(20):
        value, pull = jax.vjp(jax.jit(interaction_cpu.with_products), *vectors)
        for array in (value, *pull(upstream)):
            found.update(np.asarray(array).tobytes())
print(found.hexdigest())
"""


@is_long
def test_any_number_of_threads_gives_the_same_bytes() -> None:
    if not interaction_cpu.is_available():
        pytest.skip("this jaxlib has another version of the foreign function interface")
    found = set()
    for threads in (1, 3):
        environment = os.environ | {"PJRT_NPROC": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
