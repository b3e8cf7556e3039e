"""The conformance suite on one engine in this process."""

import pytest

from podembed.embedding.replicas.strategies import LocalStrategy
from tests.conformance.tpu_embedding_suite import OPTIMIZERS, TPUEmbeddingConformance


class TestLocal(TPUEmbeddingConformance):
    @pytest.fixture
    def strategy(self):
        return LocalStrategy(seed=5)

    @pytest.fixture(params=[False, True], ids=["sequential", "pipelined"])
    def is_pipelined(self, request):
        return request.param

    @pytest.fixture(params=tuple(OPTIMIZERS))
    def optimizer_name(self, request):
        return request.param
