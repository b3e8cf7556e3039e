"""Serving lookups: the rules of TensorFlow's CPU lookups, which differ from those of training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.features.inputs import Sparse
from podembed.embedding.tf.keras.keras_optimizers import SGD as DenseSGD
from podembed.embedding.tf.keras.tape import GradientTape
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing, serving_embedding_lookup

ROWS = np.arange(20, dtype=np.float32).reshape(5, 4) + 1


def table(**keywords):
    return TableConfig(5, 4, name="t", **keywords)


def lookup(feature, ids, weights=None):
    return np.asarray(serving_embedding_lookup(ids, weights, {feature.table: ROWS}, feature))


def ragged_weights(values, splits):
    return Ragged(np.array(values, np.float32), np.array(splits))


class TestDense:
    @pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3), (3, 2, 1), ()])
    def test_keeps_the_shape_of_the_ids(self, shape):
        ids = np.random.default_rng(0).integers(0, 5, shape)
        np.testing.assert_array_equal(lookup(FeatureConfig(table()), ids), ROWS[ids])

    @pytest.mark.parametrize("bad", [-1, 5])
    def test_ids_outside_are_errors(self, bad):
        with pytest.raises(ValueError, match=f"id {bad}"):
            lookup(FeatureConfig(table()), np.array([0, bad]))

    def test_policies_hold_here_too(self):
        ids = np.array([[0], [-1]])
        dropped = lookup(FeatureConfig(table(invalid_ids="drop")), ids)
        np.testing.assert_array_equal(dropped, [[ROWS[0]], [np.zeros(4)]])
        np.testing.assert_array_equal(lookup(FeatureConfig(table(invalid_ids="clip")), np.array([9])), ROWS[[4]])

    def test_refusals(self):
        with pytest.raises(ValueError, match="but input is dense"):
            lookup(FeatureConfig(table()), np.array([0]), np.array([1.0]))
        with pytest.raises(ValueError, match="sequence feature but a dense tensor"):
            lookup(FeatureConfig(table(), max_sequence_length=2), np.array([0]))


class TestSparse:
    IDS = Sparse([[0, 0], [0, 1], [2, 0], [2, 3]], [1, -1, 3, 4], (5, 4))
    WEIGHTS = Sparse([[0, 0], [0, 1], [2, 0], [2, 3]], np.array([2.0, 1.0, -1.0, 0.5], np.float32), (5, 4))

    def test_safe_lookup_drops_negative_ids_and_returns_the_whole_batch(self):
        found = lookup(FeatureConfig(table()), self.IDS)
        expected = [ROWS[1], np.zeros(4), (ROWS[3] + ROWS[4]) / 2, np.zeros(4), np.zeros(4)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    @pytest.mark.parametrize(
        ("combiner", "third"),
        [("mean", ROWS[4]), ("sqrtn", ROWS[4]), ("sum", -ROWS[3] + 0.5 * ROWS[4])],
    )
    def test_safe_lookup_drops_weights_that_are_not_positive_unless_it_sums(self, combiner, third):
        found = lookup(FeatureConfig(table(combiner=combiner)), self.IDS, self.WEIGHTS)
        np.testing.assert_allclose(found[2], third, rtol=1e-6)
        np.testing.assert_allclose(found[0], ROWS[1] * (2 if combiner == "sum" else 1), rtol=1e-6)

    def test_without_validation_nothing_is_dropped_and_trailing_empty_rows_are_missing(self):
        feature = FeatureConfig(table(), validate_weights_and_indices=False)
        with pytest.raises(ValueError, match="id -1"):
            lookup(feature, self.IDS)
        ids = Sparse([[0, 0], [2, 0], [2, 3]], [1, 3, 4], (5, 4))
        weights = Sparse([[0, 0], [2, 0], [2, 3]], np.array([2.0, -1.0, 0.5], np.float32), (5, 4))
        found = lookup(feature, ids, weights)
        np.testing.assert_allclose(found, [ROWS[1], np.zeros(4), (-ROWS[3] + 0.5 * ROWS[4]) / -0.5], rtol=1e-6)
        assert lookup(feature, Sparse(np.zeros((0, 2), np.int64), [], (3, 2))).shape == (0, 4)

    def test_higher_ranks_combine_the_last_axis_safely(self):
        ids = Sparse([[0, 1, 0], [1, 0, 2], [1, 0, 3]], [1, 2, -1], (2, 2, 4))
        found = lookup(FeatureConfig(table(), validate_weights_and_indices=False), ids)
        np.testing.assert_array_equal(found, [[np.zeros(4), ROWS[1]], [ROWS[2], np.zeros(4)]])

    def test_sequences_lie_at_their_columns(self, caplog):
        ids = Sparse([[0, 1], [0, 3], [2, 0]], [1, 2, 3], (3, 4))
        found = lookup(FeatureConfig(table(), max_sequence_length=3), ids)
        zero = np.zeros(4)
        np.testing.assert_array_equal(found, [[zero, ROWS[1], zero], [zero] * 3, [ROWS[3], zero, zero]])
        lookup(FeatureConfig(table(), max_sequence_length=3), Sparse([[0, 0, 0]], [1], (1, 1, 1)))
        assert "max_sequence_length" in caplog.text

    @pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
    def test_weights_of_another_dtype_are_refused_by_the_safe_lookup_and_cast_by_the_other(self, dtype):
        weights = Sparse(self.IDS.indices, np.array([1, 2, 1, 3], dtype), (5, 4))
        with pytest.raises(ValueError, match=f"{np.dtype(dtype)} weights"):
            lookup(FeatureConfig(table()), self.IDS, weights)
        same = Sparse(self.IDS.indices, np.array([1, 2, 1, 3], np.float32), (5, 4))
        unsafe = FeatureConfig(table(), validate_weights_and_indices=False)
        positive = replace(self.IDS, values=np.array([1, 2, 1, 3]))
        np.testing.assert_array_equal(lookup(unsafe, positive, weights), lookup(unsafe, positive, same))

    def test_python_numbers_have_no_dtype(self):
        weights = Sparse(self.IDS.indices, [1.0, 2.0, 1.0, 3.0], (5, 4))
        same = Sparse(self.IDS.indices, np.array([1, 2, 1, 3], np.float32), (5, 4))
        np.testing.assert_array_equal(
            lookup(FeatureConfig(table()), self.IDS, weights), lookup(FeatureConfig(table()), self.IDS, same)
        )

    def test_refusals(self):
        with pytest.raises(ValueError, match="but this is a sequence feature"):
            lookup(FeatureConfig(table(), max_sequence_length=2), self.IDS, self.WEIGHTS)
        with pytest.raises(ValueError, match="does not match type of the input"):
            lookup(FeatureConfig(table()), self.IDS, ragged_weights([1], [0, 1]))
        with pytest.raises(ValueError, match="id 5"):
            lookup(FeatureConfig(table()), Sparse([[0, 0]], [5], (1, 1)))


class TestRagged:
    @pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
    def test_combines_by_definition_with_zero_for_zero_by_zero(self, combiner):
        ids, weights = Ragged.of_lists([[1, 1, 2], [], [3]]), [0.5, 2.0, -1.0, 0.0]
        found = lookup(FeatureConfig(table(combiner=combiner)), ids, ragged_weights(weights, ids.row_splits))
        total = 0.5 * ROWS[1] + 2 * ROWS[1] - ROWS[2]
        divisor = {"sum": 1, "mean": 1.5, "sqrtn": np.sqrt(0.25 + 4 + 1)}[combiner]
        np.testing.assert_allclose(found, [total / divisor, np.zeros(4), np.zeros(4)], rtol=1e-6)

    def test_negative_ids_are_errors(self):
        with pytest.raises(ValueError, match="id -1"):
            lookup(FeatureConfig(table()), Ragged.of_lists([[-1]]))

    def test_weights_of_another_dtype_are_refused_where_they_count(self):
        ids = Ragged.of_lists([[1, 2], [3]])
        weights = Ragged(np.ones(3), ids.row_splits)
        with pytest.raises(ValueError, match="float64 weights"):
            lookup(FeatureConfig(table()), ids, weights)
        positions = FeatureConfig(table(), output_shape=[2, 2])
        np.testing.assert_array_equal(lookup(positions, ids, weights), lookup(positions, ids))

    def test_output_shapes(self):
        feature = FeatureConfig(table(combiner="sum"), output_shape=[2, 2])
        found = lookup(feature, Ragged.of_lists([[1, 2], [], [3], [4]]))
        np.testing.assert_array_equal(found, [[ROWS[1] + ROWS[2], np.zeros(4)], [ROWS[3], ROWS[4]]])
        apart = lookup(feature, Ragged.of_lists([[1, 2, 3], [4]]), ragged_weights([5, 5, 5, 5], [0, 3, 4]))
        np.testing.assert_array_equal(apart, [[ROWS[1], ROWS[2]], [ROWS[4], np.zeros(4)]])
        with pytest.raises(ValueError, match="should be the factor of"):
            lookup(feature, Ragged.of_lists([[1], [2], [3]]))
        with pytest.raises(ValueError, match="should be the factor of"):
            lookup(feature, Ragged.of_lists([[1]] * 8))

    def test_sequences(self):
        found = lookup(FeatureConfig(table(), max_sequence_length=2), Ragged.of_lists([[1, 2, 3], [4]]))
        np.testing.assert_array_equal(found, [[ROWS[1], ROWS[2]], [ROWS[4], np.zeros(4)]])


class TestStructures:
    def test_inputs_may_leave_features_out(self):
        one = table()
        config = {"a": FeatureConfig(one), "b": [FeatureConfig(one), FeatureConfig(one)]}
        found = serving_embedding_lookup({"b": [np.array([1])]}, None, {one: ROWS}, config)
        np.testing.assert_array_equal(found["b"][0], ROWS[[1]])
        with pytest.raises(ValueError, match="Found input z"):
            serving_embedding_lookup({"z": np.array([1])}, None, {one: ROWS}, config)
        with pytest.raises(ValueError, match="structure of weights"):
            serving_embedding_lookup({"a": np.array([1])}, {"b": None}, {one: ROWS}, config)
        with pytest.raises(ValueError, match="unknown type"):
            serving_embedding_lookup({"a": "text"}, None, {one: ROWS}, config)

    def test_a_feature_may_override_the_combiner(self):
        ids = Ragged.of_lists([[1, 2]])
        np.testing.assert_array_equal(lookup(FeatureConfig(table(), combiner="sum"), ids)[0], ROWS[1] + ROWS[2])


class TestForServing:
    def test_not_inside_a_scope(self):
        with LocalStrategy().scope(), pytest.raises(RuntimeError, match="not supported inside the scope"):
            TPUEmbeddingForServing(FeatureConfig(table()))

    def test_looks_up_what_was_trained(self, tmp_path):
        config = {"x": FeatureConfig(table(optimizer=Adagrad(0.5)))}
        with LocalStrategy().scope():
            trained = TPUEmbedding(config, 2)
        trained.enqueue({"x": np.array([1, 2])})
        trained.dequeue()
        trained.apply_gradients({"x": jnp.ones((2, 4))})
        path = str(tmp_path / "saved")
        trained.save(path)
        rows = trained.read_tables()[config["x"].table]["rows"]
        early, late = TPUEmbeddingForServing(config), TPUEmbeddingForServing(config)
        early.restore(path)
        late.build()
        late.restore(path)
        for serving in (early, late):
            np.testing.assert_array_equal(serving({"x": np.array([[1], [2]])})["x"][:, 0], rows[1:3])
        early.save(str(tmp_path / "again"))

    def test_the_lookup_can_be_trained_by_gradients(self):
        one = table(combiner="sum", optimizer=SGD(0.1))
        serving = TPUEmbeddingForServing({"x": FeatureConfig(one)})
        (variable,) = serving.embedding_tables.values()
        before = np.asarray(variable.value)
        features = {"x": Ragged.of_lists([[1, 1], [2]])}
        with GradientTape() as tape:
            loss = tape.record(lambda: jnp.sum(serving(features)["x"]))
        DenseSGD(1.0).apply_gradients([(tape.gradient(loss, variable), variable)])
        np.testing.assert_allclose((before - variable.value)[:, 0], [0, 2, 1, 0, 0], atol=1e-6)

    def test_the_lookup_follows_jit(self):
        feature = FeatureConfig(table())
        served = jax.jit(
            lambda rows: serving_embedding_lookup(Ragged.of_lists([[1, 2]]), None, {feature.table: rows}, feature)
        )
        np.testing.assert_allclose(served(ROWS), [(ROWS[1] + ROWS[2]) / 2])
