"""`TPUEmbedding` on one engine: construction, build, shapes, structures, states. Numbers are in `tests/conformance`."""

import logging
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding


def table(name="t", **keywords):
    return TableConfig(10, 4, name=name, **keywords)


def make(*arguments, **keywords):
    with LocalStrategy().scope():
        return TPUEmbedding(*arguments, **keywords)


def shapes_of(structure):
    return jax.tree.map(jnp.shape, structure)


class TestConstructor:
    def test_the_global_optimizer_and_names_are_written_into_the_tables(self):
        own, named, unnamed = SGD(0.5), table("own"), TableConfig(3, 2)
        named.optimizer = own
        optimizer = Adagrad(0.1)
        make({"b": FeatureConfig(named), "c": FeatureConfig(unnamed), "a": FeatureConfig(named)}, 2, optimizer)
        assert (named.optimizer, unnamed.optimizer, unnamed.name) == (own, optimizer, "table_1")

    def test_positions_of_2_3_and_of_2_21(self):
        feature = FeatureConfig(table())
        assert make(feature, 4, SGD(0.1), True)._is_pipelined
        assert make(feature, np.int64(4), SGD(0.1), True)._is_pipelined
        assert make(feature, SGD(0.1), True)._is_pipelined
        assert not make(feature, SGD(0.1))._is_pipelined
        assert make(feature, optimizer=SGD(0.1), pipeline_execution_with_tensor_core=True)._is_pipelined

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (
                (lambda: [FeatureConfig(table()), FeatureConfig(table())], 2, SGD(0.1)),
                "Multiple tables with name t found",
            ),
            ((lambda: FeatureConfig(table(optimizer="sgd")), 2), "<class 'str'> is an unsupported optimizer class"),
            ((lambda: FeatureConfig(table()), 2), "<class 'NoneType'> is an unsupported optimizer class"),
            ((lambda: {"a": [3]}, 2, SGD(0.1)), "Found 3 at a/0"),
            ((lambda: FeatureConfig(table()), 0, SGD(0.1)), "batch_size=0"),
            ((lambda: FeatureConfig(table()), 2.5, SGD(0.1)), "batch_size=2.5"),
            ((lambda: FeatureConfig(table(dtype=np.int32)), 2, SGD(0.1)), "int32"),
        ],
    )
    def test_what_cannot_be_is_refused(self, arguments, text):
        config, *others = arguments
        with pytest.raises(ValueError, match=text):
            make(config(), *others)

    def test_two_equal_tables_without_names_are_two_tables(self):
        embedding = make([FeatureConfig(TableConfig(3, 2)), FeatureConfig(TableConfig(3, 2))], 2, SGD(0.1))
        assert [config.name for config in embedding.read_tables()] == ["table_0", "table_1"]

    def test_one_engine_at_a_time_in_a_strategy(self):
        strategy = LocalStrategy()
        with strategy.scope():
            first = TPUEmbedding(FeatureConfig(table()), 2, SGD(0.1))
            with pytest.raises(RuntimeError, match="TPU is already initialized for embeddings"):
                TPUEmbedding(FeatureConfig(table()), 2, SGD(0.1))
            unbuilt = TPUEmbedding(FeatureConfig(table()), optimizer=SGD(0.1))
            with pytest.raises(RuntimeError, match="TPU is already initialized for embeddings"):
                unbuilt.enqueue(np.array([1, 2]))
            first.close()
            first.close()
            unbuilt.enqueue(np.array([1, 2]))
        with pytest.raises(RuntimeError, match="not running"):
            first.enqueue(np.array([1, 2]))

    def test_first_values_depend_on_the_seed_of_the_strategy(self):
        rows = []
        for seed in (1, 1, 2):
            config = table()
            with LocalStrategy(seed=seed).scope():
                rows.append(TPUEmbedding(FeatureConfig(config), 2, SGD(0.1)).read_tables()[config]["rows"])
        assert np.array_equal(rows[0], rows[1])
        assert not np.array_equal(rows[0], rows[2])


class TestShapes:
    def test_a_batch_size_gives_all_shapes(self):
        config = {"x": FeatureConfig(table()), "s": FeatureConfig(table("s"), max_sequence_length=3)}
        embedding = make(config, 2, SGD(0.1))
        embedding.enqueue({"x": np.array([1, 2]), "s": Ragged.of_lists([[1], []])}, training=False)
        assert shapes_of(embedding.dequeue()) == {"x": (2, 4), "s": (2, 3, 4)}

    def test_the_first_enqueue_gives_shapes_where_nothing_else_does(self):
        config = {
            "dense": FeatureConfig(table("a")),
            "column": FeatureConfig(table("b")),
            "deep": FeatureConfig(table("c")),
            "sparse": FeatureConfig(table("d")),
            "deep sparse": FeatureConfig(table("e"), max_sequence_length=7),
            "sequence": FeatureConfig(table("f"), max_sequence_length=2),
            "narrow": FeatureConfig(table("g"), max_sequence_length=2),
            "dense sequence": FeatureConfig(table("h"), max_sequence_length=2),
        }
        embedding = make(config, optimizer=SGD(0.1))
        embedding.enqueue(
            {
                "dense": np.array([1, 2]),
                "column": np.array([[1], [2]]),
                "deep": np.zeros((2, 3, 1), np.int64),
                "sparse": Sparse([[0, 0], [0, 3]], [1, 2], (2, 4)),
                "deep sparse": Sparse([[0, 0, 0], [1, 2, 1]], [1, 2], (2, 3, 4)),
                "sequence": Ragged.of_lists([[1], [2, 3, 4]]),
                "narrow": Sparse([[1, 0]], [1], (2, 1)),
                "dense sequence": np.array([[3], [4]]),
            },
            training=False,
        )
        assert shapes_of(embedding.dequeue()) == {
            "dense": (2, 4),
            "column": (2, 4),
            "deep": (2, 3, 4),
            "sparse": (2, 4),
            "deep sparse": (2, 3, 4),
            "sequence": (2, 2, 4),
            "narrow": (2, 2, 4),
            "dense sequence": (2, 4),
        }

    def test_a_declared_output_shape_comes_first_and_switches_sequences_off(self):
        config = FeatureConfig(table(), max_sequence_length=5, output_shape=[2, 3])
        embedding = make(config, 2, SGD(0.1))
        rows = embedding.read_tables()[config.table]["rows"]
        embedding.enqueue(Ragged.of_lists([[1, 2], [], [3], [], [], [4, 4]]), training=False)
        combined = np.asarray(embedding.dequeue())
        assert combined.shape == (2, 3, 4)
        np.testing.assert_allclose(combined[0, 0], (rows[1] + rows[2]) / 2, rtol=1e-6)
        np.testing.assert_allclose(combined[1, 2], rows[4], rtol=1e-6)
        # Fewer rows become sequences that fill the shape, and the combiner is ignored.
        embedding.enqueue(Ragged.of_lists([[1, 2], [3, 4, 5, 6]]), training=False)
        apart = np.asarray(embedding.dequeue())
        np.testing.assert_array_equal(apart, np.stack([rows[[1, 2, 0]] * [[1], [1], [0]], rows[[3, 4, 5]]]))
        with pytest.raises(ValueError, match="Found 4 rows"):
            embedding.enqueue(Ragged.of_lists([[1], [2], [3], [4]]))

    @pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
    @pytest.mark.parametrize("output_shape", [None, (2, 3)])
    @pytest.mark.parametrize("rank", [3, 4])
    def test_above_rank_2_a_length_changes_nothing(self, combiner, output_shape, rank):
        """With and without a length, lookup and update are the same, for any rank, combiner and weights."""
        rng = np.random.default_rng(rank)
        shape = (2, 3, 4) if rank == 3 else (2, 3, 2, 4)
        places = np.argwhere(rng.random(shape) < 0.7)
        ids, weights = rng.integers(0, 10, len(places)), rng.random(len(places)).astype(np.float32) + 0.1
        found = []
        for length in (0, 1, 2, 5):
            config = table(combiner=combiner)
            declared = None if output_shape is None else (*output_shape, *shape[2:-1])
            feature = FeatureConfig(config, max_sequence_length=length, output_shape=declared)
            embedding = make(feature, optimizer=SGD(1.0))
            embedding.enqueue(Sparse(places, ids, shape), Sparse(places, weights, shape))
            activations = embedding.dequeue()
            assert activations.shape == (*shape[:-1], 4)
            embedding.apply_gradients(jnp.arange(activations.size, dtype=jnp.float32).reshape(activations.shape))
            found.append((np.asarray(activations), embedding.read_tables()[config]["rows"]))
        for activations, rows in found[1:]:
            np.testing.assert_array_equal(activations, found[0][0])
            np.testing.assert_array_equal(rows, found[0][1])

    def test_dense_input_above_rank_2_has_one_id_a_row_whatever_the_length(self):
        config = table()
        embedding = make(FeatureConfig(config, max_sequence_length=2), optimizer=SGD(0.1))
        embedding.enqueue(np.array([[[1], [2], [3]], [[4], [5], [6]]]), training=False)
        rows = embedding.read_tables()[config]["rows"]
        np.testing.assert_array_equal(embedding.dequeue(), rows[[[1, 2, 3], [4, 5, 6]]])

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (4, {"x": (4,), "s": (4, 3)}),
            ({"x": (4,), "s": (4, None)}, {"x": (4,), "s": (4, 3)}),
            ({"x": (4, 1), "s": (4, 1)}, {"x": (4,), "s": (4,)}),
            ({"x": [4, 2, 1], "s": (4, 6, 9)}, {"x": (4, 2), "s": (4, 6)}),
            ([(4, None), (4, 1)], {"s": (4, 3), "x": (4,)}),
        ],
    )
    def test_build_takes_input_shapes(self, given, expected):
        config = {"x": FeatureConfig(table()), "s": FeatureConfig(table("s"), max_sequence_length=3)}
        embedding = make(config, optimizer=SGD(0.1))
        embedding.build(given)
        assert dict(zip(("s", "x"), embedding._output_shapes, strict=True)) == expected
        embedding.build(99)
        assert dict(zip(("s", "x"), embedding._output_shapes, strict=True)) == expected

    @pytest.mark.parametrize(
        "given",
        [
            [(4,), (4, 1)],
            ((4,), (4, 1)),
            [(4,), [(4, 1)]],
            ((4,), ((4, 1),)),
            [np.int64(4)],
        ],
        ids=["flat list", "flat tuple", "a list for the tuple", "as declared", "no shapes"],
    )
    def test_build_compares_numbers_of_shapes_and_no_types_of_sequences(self, given):
        config = (FeatureConfig(table()), [FeatureConfig(table("s"))])
        embedding = make(config, optimizer=SGD(0.1))
        if len(given) == 1:
            with pytest.raises(ValueError, match="found 1 shape.*Expected 2"):
                embedding.build(given)
            embedding.build(given[0])
        else:
            embedding.build(given)
        assert embedding._output_shapes == [(4,), (4,)]

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ([(4,)], "found 1 shape.*Expected 2"),
            ([(4,), (4,), (4,)], "found 3 shapes.*Expected 2, one for each feature: a, b/0"),
            ({"a": (4,)}, "found 1 shape"),
            ((4,), "found 1 shape"),
            ({"a": (4,), "c": [(4,)]}, r"unknown names \['c/0'\].*missing names \['b/0'\]"),
            ({"a": (4,), "b": (4,)}, r"unknown names \['b'\]"),
            (["a", "b"], "Rank must be 1 and above"),
            ([(-2,), (2,)], r"Found input shape \(-2,\). Expected sizes of at least 0. Pass None"),
            ([(2, -1), (2, 1)], r"Found input shape \(2, -1\)"),
            (-3, "Found batch size -3. Expected at least 1"),
        ],
    )
    def test_build_refuses_other_shapes_than_the_features_have(self, given, text):
        embedding = make({"a": FeatureConfig(table()), "b": (FeatureConfig(table("s")),)}, optimizer=SGD(0.1))
        with pytest.raises(ValueError, match=text):
            embedding.build(given)

    def test_build_takes_a_batch_size_by_its_old_name(self):
        embedding = make(FeatureConfig(table()), optimizer=SGD(0.1))
        embedding.build(per_replica_batch_size=3)
        assert embedding._output_shapes == [(3,)]

    @pytest.mark.parametrize(
        ("output_shape", "given", "text"),
        [
            ((2, 4), [(1, 1, 1)], "Inconsistent shape founded for input feature"),
            (None, [(1, None, None)], "Input Feature .* not fully defined"),
            ((None,), None, "Input Feature .* not fully defined"),
            (None, None, "Input Feature .* has output shape set as None"),
            (None, [()], "Rank must be 1 and above"),
            (None, [None], "Input Feature .* not fully defined"),
            (None, ["a"], "Rank must be 1 and above"),
        ],
    )
    def test_shapes_that_contradict_or_stay_unknown(self, output_shape, given, text):
        embedding = make([FeatureConfig(table(), output_shape=output_shape)], optimizer=SGD(0.1))
        with pytest.raises(ValueError, match=text):
            embedding.build(given)

    @pytest.mark.parametrize("is_given_to_build", [False, True])
    @pytest.mark.parametrize(("open_shape", "shape"), [((None, 2), (3, 2)), ((None,), (3,)), ((None, 2, 1), (3, 2, 1))])
    def test_a_shape_that_is_open_on_the_batch_gets_the_batch_size(self, open_shape, shape, is_given_to_build):
        found = []
        for declared in (open_shape, shape):
            config = FeatureConfig(table(), output_shape=declared)
            embedding = make(config, None if is_given_to_build else 3, SGD(0.1))
            if is_given_to_build:
                embedding.build(3)
            assert embedding._output_shapes == [shape]
            embedding.enqueue(Ragged.of_lists([[1, 2], [3], []]), training=False)
            found.append(embedding.dequeue())
        assert found[0].shape == (*shape, 4)
        np.testing.assert_array_equal(*found)

    def test_a_shape_that_the_batch_size_leaves_open_says_what_is_missing(self):
        with pytest.raises(
            ValueError, match=r"\(3, None\) which .* vectors a sample has, such as output_shape=\(3, 4\)"
        ):
            make(FeatureConfig(table(), output_shape=(None, None)), 3, SGD(0.1))

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (np.array(1), "Only rank 1 and above dense tensor is supported"),
            (np.array([[1, 2]]), "last dimension as 1"),
            (Sparse([[0]], [1], (1,)), "Only rank 2 and above sparse tensor is supported"),
            (np.array([1, 2, 3]), "Inconsistent shape founded for input feature x"),
            (Ragged.of_lists([[1]]), "Inconsistent shape founded for input feature x"),
        ],
    )
    def test_inputs_of_another_shape(self, value, text):
        embedding = make({"x": FeatureConfig(table())}, 2, SGD(0.1))
        with pytest.raises(ValueError, match=text):
            embedding.enqueue({"x": value})

    def test_every_kind_of_input_in_one_call(self):
        one = table(combiner="sum")
        config = [FeatureConfig(one) for _ in range(6)]
        embedding = make(config, 2, SGD(0.1))
        rows = embedding.read_tables()[one]["rows"]
        embedding.enqueue(
            [
                np.array([1, 2]),
                jnp.array([1, 2]),
                Ragged.of_lists([[1], [2]]),
                Sparse([[0, 0], [1, 0]], [1, 2], (2, 3)),
                sp.coo_matrix(([1, 2], ([0, 1], [0, 0]))),
                pa.array([[1], [2]]),
            ]
        )
        for activation in embedding.dequeue():
            assert isinstance(activation, jax.Array)
            assert activation.dtype == jnp.float32
            np.testing.assert_array_equal(activation, rows[[1, 2]])

    def test_a_single_feature_and_namedtuples(self):
        embedding = make(FeatureConfig(table()), 2, SGD(0.1))
        embedding.enqueue(np.array([1, 2]), training=False)
        assert embedding.dequeue().shape == (2, 4)
        Both = namedtuple("Both", ["left", "right"])
        embedding = make(Both(FeatureConfig(table()), [FeatureConfig(table("u"))]), 2, SGD(0.1))
        embedding.enqueue(Both(np.array([1, 2]), [np.array([1, 2])]))
        activations = embedding.dequeue()
        assert isinstance(activations, Both)
        embedding.apply_gradients(Both(jnp.ones((2, 4)), [None]))


class TestCalls:
    @pytest.fixture
    def embedding(self):
        return make({"x": FeatureConfig(table()), "y": (FeatureConfig(table("u")),)}, 2, SGD(0.1))

    def features(self):
        return {"x": Ragged.of_lists([[1], [2]]), "y": (np.array([1, 2]),)}

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"y": [np.array([1, 2])]}, TypeError),
            ({"y": {"a": np.array([1, 2])}}, TypeError),
            ({"y": (np.array([1, 2]),) * 2}, ValueError),
            ({"z": np.array([1, 2])}, ValueError),
            ({"y": np.array([1, 2])}, ValueError),
        ],
    )
    def test_structures_of_features_weights_and_gradients(self, embedding, change, error):
        with pytest.raises(error, match="structure of features"):
            embedding.enqueue({**self.features(), **change})
        with pytest.raises(error, match="structure of weights"):
            embedding.enqueue(self.features(), {"x": None, "y": (None,), **change})
        embedding.enqueue(self.features())
        embedding.dequeue()
        with pytest.raises(error, match="structure of gradients"):
            embedding.apply_gradients({"x": None, "y": (None,), **change})
        # Nothing has happened: the batch still waits.
        embedding.apply_gradients({"x": None, "y": (None,)})

    def test_errors_of_inputs_leave_no_batch_behind(self, embedding):
        for value, text in (
            (np.array([1, 10]), "Found id 10 in feature x"),
            (np.array([-1, 1]), "id -1"),
            ("a", "unknown type"),
        ):
            with pytest.raises(ValueError, match=text):
                embedding.enqueue({**self.features(), "x": value})
        with pytest.raises(ValueError, match="Weight specified for dense input y/0"):
            embedding.enqueue(self.features(), {"x": None, "y": (np.array([1.0, 1.0]),)})
        with pytest.raises(RuntimeError, match="without an enqueued"):
            embedding.dequeue()
        embedding.enqueue(self.features())

    @pytest.mark.parametrize(
        ("gradient", "error", "text"),
        [
            (np.ones((2, 4), np.float32), ValueError, "found non-tensor type: <class 'numpy.ndarray'> at path x"),
            ([1.0], ValueError, "structure of gradients"),
            (1.0, ValueError, "found non-tensor type: <class 'float'> at path x"),
            (jnp.ones((2, 3)), ValueError, r"Found gradient of shape \(2, 3\) at path x. Expected shape \(2, 4\)"),
            (jnp.ones((4,)), ValueError, "Found gradient of shape"),
            (jnp.ones((2, 4), jnp.bfloat16), TypeError, "dtype bfloat16"),
            (jnp.ones((2, 4), jnp.int32), TypeError, "dtype int32"),
        ],
    )
    def test_gradients_that_do_not_fit(self, embedding, gradient, error, text):
        embedding.enqueue(self.features())
        embedding.dequeue()
        with pytest.raises(error, match=text):
            embedding.apply_gradients({"x": gradient, "y": (None,)})

    @pytest.mark.parametrize(
        "compiled", [jax.jit, lambda step: lambda: jax.lax.scan(lambda carry, _: (step(), None), 0, None, 2)]
    )
    def test_calls_inside_a_compiled_function_are_refused(self, embedding, compiled):
        for step in (
            lambda: embedding.enqueue(self.features()),
            embedding.dequeue,
            lambda: embedding.apply_gradients(None),
        ):
            with pytest.raises(RuntimeError, match="inside a function that JAX traces, or inside its control flow"):
                compiled(step)()
        embedding.enqueue(self.features())
        # Under grad alone nothing is compiled: activations are constants there.
        jax.grad(lambda x: x * jnp.sum(embedding.dequeue()["x"]))(1.0)

    def test_a_batch_can_be_discarded(self, embedding):
        rows = embedding.read_tables()
        embedding.enqueue(self.features())
        embedding.discard()
        embedding.enqueue(self.features())
        embedding.dequeue()
        embedding.discard()
        with pytest.raises(RuntimeError, match="without an enqueued"):
            embedding.apply_gradients({"x": None, "y": (None,)})
        for config, arrays in embedding.read_tables().items():
            np.testing.assert_array_equal(arrays["rows"], rows[config]["rows"])

    def test_none_at_the_top_is_a_difference_in_structure(self):
        embedding = make((FeatureConfig(table()),), 2, SGD(0.1))
        embedding.enqueue((np.array([1, 2]),))
        embedding.dequeue()
        with pytest.raises(ValueError, match="structure of gradients differs: found None"):
            embedding.apply_gradients(None)

    def test_states_before_build(self):
        embedding = make(FeatureConfig(table()), optimizer=SGD(0.1))
        for call in (embedding.dequeue, lambda: embedding.apply_gradients(None), embedding.read_tables):
            with pytest.raises(RuntimeError, match="called on unbuilt TPUEmbedding object"):
                call()

    def test_values_of_replicas(self, embedding):
        features = {"x": PerReplica((Ragged.of_lists([[1], [2]]),)), "y": (PerReplica((np.array([1, 2]),)),)}
        embedding.enqueue(features, {"x": PerReplica((Ragged(np.ones(2), np.array([0, 1, 2])),)), "y": (None,)})
        assert embedding.dequeue()["x"].shape == (2, 4)
        embedding.apply_gradients({"x": None, "y": (None,)})
        with pytest.raises(ValueError, match="Found 2 values of replicas in input x"):
            embedding.enqueue({**features, "x": PerReplica((np.array([1]), np.array([2])))})

    def test_altered_ids_are_counted_by_table(self):
        config = [
            FeatureConfig(table("d", invalid_ids="drop")),
            FeatureConfig(table("c", invalid_ids="clip")),
            FeatureConfig(table("h", invalid_ids="hash")),
            FeatureConfig(table("s", invalid_ids="drop"), max_sequence_length=3),
        ]
        embedding = make(config, 2, SGD(0.1))
        rows = [arrays["rows"] for arrays in embedding.read_tables().values()]
        features = [
            np.array([1, 10]),
            np.array([-5, 99]),
            Ragged.of_lists([[1], [77, -1, 2]]),
            Ragged.of_lists([[1, 50, 2, 60], []]),
        ]
        for _ in range(2):
            embedding.enqueue(features, training=False)
            activations = [np.asarray(one) for one in embedding.dequeue()]
        np.testing.assert_array_equal(activations[0], [rows[0][1], np.zeros(4)])
        np.testing.assert_array_equal(activations[1], rows[1][[0, 9]])
        # A dropped id leaves a gap: what follows keeps its position.
        np.testing.assert_array_equal(activations[3][0], [rows[3][1], np.zeros(4), rows[3][2]])
        assert embedding.metrics.altered_ids == {"d": 2, "c": 4, "h": 4, "s": 2}


class TestOutsideAnyScope:
    def test_only_tables_work(self):
        embedding = TPUEmbedding({"x": FeatureConfig(table())}, 2, SGD(0.1))
        for name, call in {
            "enqueue": lambda: embedding.enqueue({"x": np.array([1, 2])}),
            "dequeue": embedding.dequeue,
            "apply_gradients": lambda: embedding.apply_gradients({"x": None}),
            "drain": embedding.drain,
            "metrics": lambda: embedding.metrics,
            "serialized_config": lambda: embedding.serialized_config,
        }.items():
            with pytest.raises(
                RuntimeError, match=f"{name} is not valid when TPUEmbedding object is not created under"
            ):
                call()
        (variable,) = embedding.embedding_tables.values()
        assert isinstance(variable, Variable)
        assert (variable.shape, variable.trainable) == ((10, 4), True)

    def test_first_values_are_those_of_a_strategy(self):
        config = table()
        outside = TPUEmbedding(FeatureConfig(config), optimizer=SGD(0.1)).embedding_tables[config]
        inside = make(FeatureConfig(config), 2, SGD(0.1)).read_tables()[config]["rows"]
        np.testing.assert_array_equal(outside.value, inside)

    def test_no_optimizer_makes_no_slots(self):
        config = table()
        embedding = TPUEmbedding(FeatureConfig(config))
        embedding.build()
        assert list(embedding.read_tables()[config]) == ["rows"]
        with pytest.raises(ValueError, match="unsupported optimizer class"):
            TPUEmbedding(FeatureConfig(table(optimizer="adam")))

    def test_assigned_tables_are_saved(self, tmp_path):
        config = TableConfig(5000, 64, name="t", optimizer=Adam(0.1))
        embedding = TPUEmbedding(FeatureConfig(config))
        new = np.random.default_rng(0).normal(size=(5000, 64)).astype(np.float32)
        embedding.embedding_tables[config].assign(new)
        embedding.save(str(tmp_path / "saved"))
        other = TPUEmbedding(FeatureConfig(config))
        other.restore(str(tmp_path / "saved"))
        np.testing.assert_array_equal(other.embedding_tables[config].value, new)
        embedding.embedding_tables[config].assign(np.zeros((5000, 64), np.float32))
        embedding.restore(str(tmp_path / "saved"))
        np.testing.assert_array_equal(embedding.embedding_tables[config].value, new)

    def test_tables_of_a_strategy_are_not_handed_out(self):
        with pytest.raises(RuntimeError, match="Unable to retrieve embedding tables when using a TPU strategy"):
            make(FeatureConfig(table()), 2, SGD(0.1)).embedding_tables  # noqa: B018


def test_options_without_a_place_in_the_serialized_configuration_still_train(caplog):
    embedding = make(FeatureConfig(table()), 2, RowWiseAdagrad(0.1))
    with pytest.raises(ValueError, match="RowWiseAdagrad"):
        embedding.serialized_config  # noqa: B018
    embedding.enqueue(np.array([1, 2]))
    with caplog.at_level(logging.WARNING):
        embedding.dequeue()
        embedding.apply_gradients(None)
    assert "(the only feature)" in caplog.text


def test_activations_stay_what_they_were():
    """Arrays handed out are not written to by later steps."""
    embedding = make(FeatureConfig(table()), 2, SGD(1.0))
    kept = []
    for step in range(4):
        embedding.enqueue(np.array([1, 2]))
        activation = embedding.dequeue()
        kept.append((activation, np.array(activation)))
        embedding.apply_gradients(jnp.full((2, 4), float(step)))
    for activation, copy in kept:
        np.testing.assert_array_equal(activation, copy)


class TestCall:
    """`embedding(features)`, as of `TPUEmbeddingV2`."""

    def batch(self, seed):
        random = np.random.default_rng(seed)
        return {"a": random.integers(0, 10, 4), "b": Ragged.of_lists([[1, 1], [], [int(random.integers(10))], [3]])}

    def features(self):
        shared = table(optimizer=Adam(0.1))
        return {"a": FeatureConfig(shared), "b": FeatureConfig(shared)}

    @pytest.mark.parametrize("is_pipelined", [False, True])
    def test_trains_as_enqueue_dequeue_and_gradients(self, is_pipelined):
        one, other = (make(self.features(), None, None, is_pipelined) for _ in range(2))
        for seed in range(4):
            found, preserved = one(self.batch(seed))
            other.enqueue(self.batch(seed))
            expected = other.dequeue()
            gradients = jax.tree.map(jnp.sin, expected)
            one.apply_gradients(gradients, preserved)
            other.apply_gradients(gradients)
            for name in expected:
                assert found[name].tobytes() == expected[name].tobytes()
        (ours,), (theirs,) = one.read_tables().values(), other.read_tables().values()
        assert {name: rows.tobytes() for name, rows in ours.items()} == {
            name: rows.tobytes() for name, rows in theirs.items()
        }
        assert one.metrics.num_steps == 4

    def test_weights_and_compressed_rows(self):
        embedding = make({"b": FeatureConfig(table(combiner="sum", optimizer=SGD(1.0)))})
        rows = sp.csr_matrix(([2, 5, 7], [0, 1, 0], [0, 2, 2, 3]), shape=(3, 2))
        found, _ = embedding.embedding_lookup({"b": rows}, {"b": rows.astype(np.float32)})
        (held,) = embedding.read_tables().values()
        expected = np.stack([2 * held["rows"][2] + 5 * held["rows"][5], np.zeros(4), 7 * held["rows"][7]])
        np.testing.assert_allclose(found["b"], expected, rtol=1e-6)

    def test_a_lookup_without_gradients_is_one_of_inference(self):
        embedding = make(self.features())
        first, _ = embedding(self.batch(0))
        again, preserved = embedding(self.batch(0))
        assert first["a"].tobytes() == again["a"].tobytes()
        embedding.apply_gradients(again, preserved)
        assert embedding.metrics.num_steps == 1

    def test_gradients_of_an_older_lookup_are_refused(self):
        embedding = make(self.features())
        activations, older = embedding(self.batch(0))
        _, newer = embedding(self.batch(1))
        with pytest.raises(RuntimeError, match="apply_gradients was called"):
            embedding.apply_gradients(activations, older)
        embedding.apply_gradients(activations, newer)
