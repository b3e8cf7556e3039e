"""The conformance suite on two real hosts over Ray."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD
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

    def test_tables_on_devices_are_refused_where_they_are_declared(self, make):
        table = TableConfig(12, 2, name="t", place="sharded")
        with pytest.raises(ValueError, match="'t' with place='sharded' in the scope of a strategy over hosts"):
            make(FeatureConfig(table), 4, SGD(1.0))

    def test_one_thread_may_enqueue_what_another_one_takes(self, make):
        table = TableConfig(12, 2, name="t", initializer=Constant(0.0))
        embedding = make(FeatureConfig(table), 4, SGD(1.0), True)
        may_come, raised, num_steps = threading.Semaphore(2), [], 40

        def feed() -> None:
            try:
                for step in range(num_steps):
                    may_come.acquire()
                    embedding.enqueue((np.arange(4) + step) % 12)
                    has_come.release()
            except Exception as error:
                raised.append(error)
                has_come.release()

        has_come = threading.Semaphore(0)
        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        for _ in range(num_steps):
            has_come.acquire()
            assert not raised, raised
            embedding.apply_gradients(jnp.ones_like(embedding.dequeue()))
            may_come.release()
        feeder.join()
        expected = np.zeros(12)
        for step in range(num_steps):
            expected[(np.arange(4) + step) % 12] -= 1.0
        np.testing.assert_array_equal(embedding.read_tables()[table]["rows"][:, 0], expected)
