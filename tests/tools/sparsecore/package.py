"""`jax-tpu-embedding`, for the tests that are judged by it. Where it is not installed they are skipped, and say so."""

from __future__ import annotations

import pytest

try:
    from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec, table_stacking
    from jax_tpu_embedding.sparsecore.lib.proto import embedding_spec_pb2
except ImportError as error:
    pytest.skip(
        f"no jax-tpu-embedding ({error}): pip install -e '.[sparsecore]' (Linux on x86-64)", allow_module_level=True
    )

__all__ = ["embedding", "embedding_spec", "embedding_spec_pb2", "table_stacking"]
