"""The conformance suite on one engine in this process."""

import threading
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.order import OrderError
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from tests.conformance.tpu_embedding_suite import OPTIMIZERS, TPUEmbeddingConformance
from tests.embedding.table.stores.mapped_store import MappedStores
from tests.long_tests import long_case

# Of each kind of rule one: which formulas they are is tested in test_update_rules.py.
SHORT = {
    "sgd, every option",
    "sgd, one by one",
    "adagrad",
    "adagrad, one by one",
    "row-wise adagrad",
    "lion",
    "ftrl",
    "adam, not lazy",
}


class TestLocal(TPUEmbeddingConformance):
    @pytest.fixture
    def strategy(self):
        return LocalStrategy(seed=5)

    @pytest.fixture(params=[False, True], ids=["sequential", "pipelined"])
    def is_pipelined(self, request):
        return request.param

    @pytest.fixture(params=[name if name in SHORT else long_case(name, id=name) for name in OPTIMIZERS])
    def optimizer_name(self, request):
        return request.param

    def test_a_call_while_another_one_runs_is_refused_and_an_interrupt_leaves_no_call_behind(self, make):
        begun, may_end = threading.Event(), threading.Event()

        def rate() -> float:
            begun.set()
            may_end.wait(60.0)
            if is_interrupted:
                raise KeyboardInterrupt
            return 1.0

        table = TableConfig(4, 2, name="t", initializer=Constant(0.0))
        embedding = make(FeatureConfig(table), 2, SGD(rate))
        is_interrupted = False
        embedding.enqueue(np.arange(2))
        gradients = jnp.ones_like(embedding.dequeue())
        other = threading.Thread(target=embedding.apply_gradients, args=(gradients,))
        other.start()
        assert begun.wait(60.0)
        with pytest.raises(OrderError, match="discard was called while another call to the same tables runs"):
            embedding.discard()
        may_end.set()
        other.join()
        is_interrupted = True
        embedding.enqueue(np.arange(2))
        embedding.dequeue()
        with pytest.raises(KeyboardInterrupt):
            embedding.apply_gradients(gradients)
        embedding.discard()
        is_interrupted = False
        embedding.enqueue(np.arange(2))
        embedding.apply_gradients(jnp.ones_like(embedding.dequeue()))
        np.testing.assert_array_equal(embedding.read_tables()[table]["rows"][:2], -2.0)


class TestRowsInFiles(TestLocal):
    """With stores of another kind than the usual one."""

    @pytest.fixture(autouse=True)
    def stores(self, monkeypatch):
        real = TableSpec.of
        mapped = staticmethod(lambda *told, **named: replace(real(*told, **named), stores=MappedStores()))
        monkeypatch.setattr(TableSpec, "of", mapped)

    @pytest.fixture(params=[False], ids=["sequential"])
    def is_pipelined(self, request):
        return request.param

    @pytest.fixture(params=["sgd, one by one", "adagrad", "adam, not lazy"])
    def optimizer_name(self, request):
        return request.param
