"""The conformance suite on two real hosts over Ray."""

import pytest

from tests.conformance.tpu_embedding_suite import TPUEmbeddingConformance

pytestmark = pytest.mark.ray


class TestPod(TPUEmbeddingConformance):
    @pytest.fixture
    def strategy(self, pod_strategy):
        return pod_strategy

    @pytest.fixture(params=[False, True], ids=["sequential", "pipelined"])
    def is_pipelined(self, request):
        return request.param

    @pytest.fixture(params=["sgd, every option", "adagrad, one by one", "adam, not lazy", "ftrl"])
    def optimizer_name(self, request):
        return request.param
