"""The base class: arguments, the order of a step, what is remembered, errors, configuration."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding import initializers
from podembed.embedding.tf.keras.gradients import clipped
from podembed.embedding.tf.keras.keras_optimizers import SGD, Adam
from podembed.embedding.tf.keras.optimizer import KerasOptimizer
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.schedules import ExponentialDecay, LearningRateSchedule, PiecewiseConstantDecay
from podembed.embedding.tf.keras.tape import GradientTape
from podembed.embedding.tf.keras.variable import Variable
from tests.long_tests import examples


class Recording(KerasOptimizer):
    """Subtracts the gradient and writes down what it sees."""

    def __init__(self, learning_rate=1.0, name="Recording", **kwargs):
        super().__init__(name, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.seen = []

    def build(self, var_list):
        super().build(var_list)
        if self._built:
            return
        self.slots = [self.add_variable_from_reference(one, "slot") for one in var_list]
        self._built = True

    def update_step(self, gradient, variable):
        slot = self.slots[self._index_dict[self._var_key(variable)]]
        slot.assign_add(gradient)
        self.seen.append((variable.name, np.asarray(gradient), int(self.iterations), float(self.learning_rate)))
        variable.assign_sub(self.learning_rate * gradient)


# --- constructor ---


def test_name_is_required_and_comes_first():
    with pytest.raises(TypeError, match="name"):
        KerasOptimizer()  # type: ignore[call-arg]
    assert KerasOptimizer("any").name == "any"


def test_one_kind_of_norm_at_most_even_if_it_is_zero():
    with pytest.raises(ValueError, match="clipnorm=0 and global_clipnorm=0"):
        KerasOptimizer("x", clipnorm=0, global_clipnorm=0)
    KerasOptimizer("x", clipnorm=1.0, clipvalue=1.0)
    KerasOptimizer("x", global_clipnorm=1.0, clipvalue=1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ema_momentum": 1.01},
        {"ema_momentum": -0.01},
        {"ema_overwrite_frequency": 1.5},
        {"ema_overwrite_frequency": -1},
    ],
)
def test_averaging_arguments_are_checked_only_when_used(arguments):
    KerasOptimizer("x", **arguments)
    with pytest.raises(ValueError, match="ema_"):
        KerasOptimizer("x", use_ema=True, **arguments)


@pytest.mark.parametrize("arguments", [{"ema_momentum": 0}, {"ema_momentum": 1}, {"ema_overwrite_frequency": 0}])
def test_averaging_arguments_at_the_edge_are_kept(arguments):
    config = KerasOptimizer("x", use_ema=True, **arguments).get_config()
    assert arguments.items() <= config.items()


def test_arguments_of_older_versions_warn_and_others_are_errors(caplog):
    with caplog.at_level(logging.WARNING):
        KerasOptimizer("x", lr=1, decay=2, gradient_transformers=[], gradient_aggregator=None)
    assert [record.args[0] for record in caplog.records] == [
        "lr",
        "decay",
        "gradient_transformers",
        "gradient_aggregator",
    ]
    with pytest.raises(TypeError, match="weight_dacay"):
        KerasOptimizer("x", weight_dacay=0.1)


def test_compiling_is_off_without_a_gpu_and_only_then(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert KerasOptimizer("x", jit_compile=True).jit_compile is False
    assert KerasOptimizer("x").get_config()["jit_compile"] is False
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert KerasOptimizer("x").jit_compile is True
    assert KerasOptimizer("x", jit_compile=False).jit_compile is False


def test_base_class_lives_but_does_not_update():
    optimizer = KerasOptimizer("x")
    with pytest.raises(NotImplementedError, match="update_step"):
        optimizer.update_step(1.0, Variable(1.0))
    with pytest.raises(NotImplementedError, match="update_step"):
        optimizer.apply_gradients([(1.0, Variable(1.0))])


# --- the order of a step ---


def test_order_of_a_step():
    """Sum over processes, rate of the steps before, None dropped, clip, update, count, average, overwrite."""

    class Doubling:
        def sum(self, gradients):
            return [one * 2 for one in gradients]

    optimizer = Recording(
        PiecewiseConstantDecay([0], [1.0, 0.5]),
        clipvalue=3.0,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    )
    optimizer.gradient_reducer = Doubling()
    a, b = Variable(8.0, name="a"), Variable(1.0, name="b")
    optimizer.apply_gradients([(1.0, a), (None, b)])
    # 1 doubled is 2, below the limit; step 0 has rate 1; the average starts at 8 and follows to 7.
    assert (float(a), float(b), int(optimizer.iterations)) == (6.0, 1.0, 1)
    assert optimizer.seen == [("a", 2.0, 0, 1.0)]
    optimizer.apply_gradients([(2.0, a), (None, b)])
    # 2 doubled is 4, clipped to 3, times 0.5: 4.5 before the average, 0.5 * 7 + 0.5 * 4.5 after it.
    assert optimizer.seen[1:] == [("a", 3.0, 1, 0.5)]
    assert float(a) == 5.75
    assert int(optimizer.iterations) == 2
    optimizer.apply_gradients([(1.0, a), (0.0, b)])
    # The average went on from 5.75, it was not reset by the overwrite.
    assert float(a) == 4.75
    optimizer.finalize_variable_values([a, b])
    assert (float(a), float(b)) == (5.25, 1.0)


def test_aggregation_can_be_skipped_and_overridden():
    class Scaled(Recording):
        def aggregate_gradients(self, grads_and_vars):
            return [(None if gradient is None else gradient * 10, variable) for gradient, variable in grads_and_vars]

    optimizer, variable = Scaled(), Variable(0.0)
    optimizer.apply_gradients(zip([1.0], [variable], strict=True))
    optimizer.apply_gradients([(1.0, variable)], skip_gradients_aggregation=True)
    assert float(variable) == -11.0
    with pytest.raises(TypeError, match="skip_aggregate_gradients"):
        optimizer.apply_gradients([(1.0, variable)], skip_aggregate_gradients=True)


def test_aggregation_keeps_missing_gradients_in_place():
    a, b, c = (Variable(0.0) for _ in range(3))
    pairs = SGD().aggregate_gradients([(None, a), (jnp.float32(2.0), b), (None, c)])
    assert [gradient for gradient, _ in pairs] == [None, 2.0, None]
    assert [variable for _, variable in pairs][1] is b


def test_missing_gradients_warn_with_the_names(caplog):
    with caplog.at_level(logging.WARNING):
        SGD().apply_gradients([(1.0, Variable(0.0)), (None, Variable(0.0, name="idle"))])
    assert "idle" in caplog.text


def test_nothing_to_apply():
    with pytest.raises(ValueError, match=r"no \(gradient, variable\) pair"):
        SGD().apply_gradients([])
    with pytest.raises(ValueError, match="no gradient for any variable of \\['w'\\]"):
        SGD().apply_gradients([(None, Variable(1.0, name="w"))])


@pytest.mark.parametrize("bad", [None, 3.0, "ab", [jnp.float32(1.0)], [(Variable(1.0), 1.0)], [(1.0, jnp.ones(()))]])
def test_not_pairs_is_a_type_error(bad):
    with pytest.raises(TypeError, match="Found"):
        SGD().apply_gradients(bad)


@pytest.mark.parametrize("limits", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.5}])
def test_integer_gradients_act_like_the_same_numbers_with_a_point(limits):
    found = []
    for kind in (np.int32, np.float32):
        a, b = Variable([1.0, 2.0]), Variable([1.0, 2.0])
        slices = RowSlices([1, 1], np.array([3, 4], kind), (2,))
        SGD(1.0, **limits).apply_gradients([(np.array([3, 4], kind), a), (slices, b)])
        found.append([a.numpy().tolist(), b.numpy().tolist()])
    assert found[0] == found[1] != [[1.0, 2.0], [1.0, 2.0]]


def test_row_slices_take_the_shape_of_their_variable():
    table = Variable(np.zeros((3, 2)), name="table")
    SGD(1.0).apply_gradients([(RowSlices([2, 2], np.ones((2, 2))), table)])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [0, 0], [-2, -2]])
    with pytest.raises(IndexError, match=r"Expected rows 0 to 2"):
        SGD(1.0).apply_gradients([(RowSlices([3], np.ones((1, 2))), table)])


def test_too_many_values_and_wrong_shapes():
    with pytest.raises(ValueError, match="Found 3 values"):
        SGD().apply_gradients([(1.0, Variable(1.0), 2.0)])
    with pytest.raises(ValueError, match=r"shape \(3,\) for variable 'w'. Expected \(2,\)"):
        SGD().apply_gradients([(np.ones(3), Variable([1.0, 2.0], name="w"))])
    with pytest.raises(ValueError, match=r"shape \(3, 1\)"):
        SGD().apply_gradients([(RowSlices([0], np.ones((1, 1)), (3, 1)), Variable(np.ones((2, 1))))])


def test_unknown_variable_is_a_key_error_and_changes_nothing():
    optimizer, known = SGD(1.0), Variable(1.0)
    optimizer.apply_gradients([(1.0, known)])
    with pytest.raises(KeyError, match="'stranger'"):
        optimizer.apply_gradients([(1.0, known), (1.0, Variable(1.0, name="stranger"))])
    assert (float(known), int(optimizer.iterations)) == (0.0, 1)


def test_variable_without_gradient_in_the_first_step_is_known_later():
    optimizer, early, late = Adam(0.1), Variable(1.0), Variable(1.0)
    optimizer.apply_gradients([(1.0, early), (None, late)])
    optimizer.apply_gradients([(None, early), (1.0, late)])
    assert float(early) == pytest.approx(0.9, abs=1e-5)
    assert float(late) < 1.0


def test_iterations_count_steps_not_variables():
    optimizer, variables = SGD(), [Variable(0.0) for _ in range(3)]
    for _ in range(2):
        optimizer.apply_gradients([(1.0, one) for one in variables])
    assert optimizer.iterations == 2
    assert optimizer.iterations.dtype == np.int64


# --- clipping ---


def applied(**limits):
    """What SGD takes off two variables with gradients [3, 4] and [0.5]."""
    variables = [Variable([0.0, 0.0]), Variable([0.0])]
    SGD(1.0, **limits).apply_gradients([([3.0, 4.0], variables[0]), ([0.5], variables[1])])
    return [(-one.numpy()).tolist() for one in variables]


def test_only_one_limit_acts():
    assert applied(clipnorm=1.0) == [pytest.approx([0.6, 0.8]), [0.5]]
    assert applied(clipvalue=1.0) == [[1.0, 1.0], [0.5]]
    assert applied(clipnorm=1.0, clipvalue=0.1) == applied(clipnorm=1.0)
    assert applied(global_clipnorm=1.0, clipvalue=0.1) == applied(global_clipnorm=1.0)
    scale = 1.0 / np.sqrt(25.25)
    assert applied(global_clipnorm=1.0) == [pytest.approx([3 * scale, 4 * scale]), pytest.approx([0.5 * scale])]


@pytest.mark.parametrize(
    "limits", [{"clipnorm": 0}, {"clipnorm": -1.0}, {"global_clipnorm": -2.0}, {"clipvalue": -1.0}, {"clipvalue": 0}]
)
def test_zero_and_negative_limits_are_none(limits):
    assert applied(**limits) == [[3.0, 4.0], [0.5]]


def test_a_limit_of_zero_lets_the_next_one_act():
    assert applied(clipnorm=0.0, clipvalue=1.0) == [[1.0, 1.0], [0.5]]


def test_a_small_gradient_and_one_of_zero_stay():
    variables = [Variable([0.0, 0.0]), Variable([0.0])]
    for limits in ({"clipnorm": 10.0}, {"global_clipnorm": 10.0}):
        SGD(1.0, **limits).apply_gradients([([0.0, 0.0], variables[0]), ([0.0], variables[1])])
    assert [one.numpy().tolist() for one in variables] == [[0.0, 0.0], [0.0]]


def test_a_norm_that_is_not_finite_is_noticed():
    (gradient,) = clipped([jnp.array([1.0, jnp.inf])], clipnorm=None, global_clipnorm=1.0, clipvalue=None)
    assert np.isnan(gradient).all()


def test_row_slices_are_clipped_before_duplicates_are_summed():
    table = Variable(np.zeros((3, 1), np.float32))
    slices = RowSlices([0, 0], [[3.0], [4.0]], (3, 1))
    SGD(1.0, global_clipnorm=1.0).apply_gradients([(slices, table)])
    # Norm of the values 5, so 0.6 and 0.8 are summed; the norm of the sum, 7, plays no part.
    np.testing.assert_allclose(table.numpy(), [[-1.4], [0], [0]], rtol=1e-6)
    table.assign(np.zeros((3, 1)))
    SGD(1.0, clipvalue=1.0).apply_gradients([(slices, table)])
    np.testing.assert_allclose(table.numpy(), [[-2.0], [0], [0]])


@settings(deadline=None, max_examples=examples(40))
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), limit=st.floats(0.01, 100))
def test_clipping_keeps_directions_and_respects_limits(values, limit):
    gradient = jnp.array(values, jnp.float32)
    norm = float(np.linalg.norm(np.float64(gradient)))
    for name in ("clipnorm", "global_clipnorm"):
        limits = {"clipnorm": None, "global_clipnorm": None, "clipvalue": None, name: limit}
        (result,) = clipped([gradient], **limits)
        expected = np.float64(gradient) * min(1.0, limit / norm) if norm > 0 else np.zeros(3)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


# --- learning rate and iterations ---


def test_rate_is_a_float32_variable_to_read_and_assign():
    optimizer = SGD(0.5)
    assert (optimizer.learning_rate.dtype, optimizer.learning_rate.name) == (np.float32, "learning_rate")
    optimizer.learning_rate = 0.25
    assert (optimizer.lr.numpy(), optimizer.lr is optimizer.learning_rate) == (0.25, True)
    optimizer.lr = 1
    variable = Variable(0.0)
    optimizer.apply_gradients([(1.0, variable)])
    assert float(variable) == -1.0


def test_rate_of_a_schedule_is_that_of_the_last_step():
    optimizer, variable = SGD(ExponentialDecay(1.0, 1, 0.5)), Variable(0.0)
    read = [float(optimizer.learning_rate)]
    for _ in range(3):
        optimizer.apply_gradients([(1.0, variable)])
        read.append(float(optimizer.lr))
    assert read == [1.0, 1.0, 0.5, 0.25]
    with pytest.raises(TypeError, match="ExponentialDecay"):
        optimizer.learning_rate = 0.1
    with pytest.raises(TypeError, match="follows"):
        optimizer.lr = 0.1


def test_a_schedule_cannot_be_set_as_a_fixed_rate():
    optimizer = SGD(0.5)
    with pytest.raises(ValueError, match="Pass a schedule to the constructor"):
        optimizer.learning_rate = ExponentialDecay(0.1, 2, 0.5)
    assert float(optimizer.lr) == 0.5


def test_own_schedule():
    class Warmup(LearningRateSchedule):
        def __call__(self, step):
            return 0.5 * (step + 1)

    optimizer, variable = SGD(Warmup()), Variable(0.0)
    for _ in range(2):
        optimizer.apply_gradients([(1.0, variable)])
    assert float(variable) == -1.5


def test_missing_rate():
    optimizer = KerasOptimizer("x")
    with pytest.raises(ValueError, match="no learning rate"):
        _ = optimizer.learning_rate
    with pytest.raises(ValueError, match="no learning rate"):
        optimizer.learning_rate = 0.1


def test_callable_rate_is_called_once_at_construction():
    calls = []
    optimizer, variable = SGD(lambda: calls.append(1) or 0.5), Variable(0.0)
    optimizer.apply_gradients([(1.0, variable)])
    assert (len(calls), float(variable)) == (1, -0.5)


def test_iterations_can_be_set_before_the_first_build_only():
    optimizer, variable = SGD(PiecewiseConstantDecay([4], [1.0, 0.5])), Variable(0.0)
    optimizer.iterations = Variable(5, dtype=np.int64, name="mine")
    optimizer.apply_gradients([(1.0, variable)])
    assert (float(variable), int(optimizer.iterations), optimizer.iterations.name) == (-0.5, 6, "mine")
    with pytest.raises(RuntimeError, match="is built"):
        optimizer.iterations = Variable(0, dtype=np.int64)
    optimizer.iterations.assign(0)
    assert SGD().iterations == 0
    other = SGD()
    other.iterations = 7
    assert other.iterations == 7


# --- variables of the optimizer ---


def test_add_variable():
    optimizer = SGD()
    scalar, ones = optimizer.add_variable(None), optimizer.add_variable([2], initializer="ones", name="ones")
    assert (scalar.shape, scalar.dtype, float(scalar), scalar.trainable) == ((), np.float32, 0.0, False)
    assert (ones.name, ones.numpy().tolist()) == ("ones", [1.0, 1.0])
    assert optimizer.add_variable((), dtype=np.int32).dtype == np.int32
    drawn = optimizer.add_variable((2, 3), initializer=lambda shape, dtype: np.full(shape, 7, dtype))
    assert (drawn.shape, drawn[1, 2]) == ((2, 3), 7.0)
    with pytest.raises(ValueError, match="'orthogonall'"):
        optimizer.add_variable(None, initializer="orthogonall")


def test_add_variable_from_reference():
    optimizer, model = SGD(), Variable(jnp.ones((2, 2), jnp.bfloat16), name="dense/kernel")
    slot = optimizer.add_variable_from_reference(model, "m")
    assert (slot.name, slot.shape, slot.dtype, slot.trainable) == ("m/dense/kernel", (2, 2), jnp.bfloat16, False)
    assert not slot.numpy().any()
    assert optimizer.add_variable_from_reference(model, "row", shape=[2]).shape == (2,)
    copy = optimizer.add_variable_from_reference(model, "copy", initial_value=model)
    model.assign_add(1.0)
    assert copy[0, 0] == 1.0


def test_names_carry_the_optimizer_only_during_apply():
    early, late, nameless = Recording(), Recording(), Recording(name="")
    variable = Variable(1.0, name="w")
    early.build([variable])
    assert early.slots[0].name == "slot/w"
    for optimizer in (late, nameless):
        optimizer.apply_gradients([(1.0, variable)])
    assert (late.slots[0].name, nameless.slots[0].name) == ("Recording/slot/w", "optimizer/slot/w")
    assert late.add_variable(None, name="after").name == "after"


def test_build_is_called_on_every_step_and_builds_once():
    class Counting(Recording):
        builds = 0

        def build(self, var_list):
            self.builds += 1
            super().build(var_list)

    optimizer, variable = Counting(), Variable(1.0)
    for _ in range(3):
        optimizer.apply_gradients([(1.0, variable)])
    assert optimizer.builds == 3
    assert float(optimizer.slots[0]) == 3.0


# --- gradients and minimize ---


def test_compute_gradients():
    a, b = Variable(1.0), Variable(2.0)
    optimizer = SGD()
    pairs = optimizer.compute_gradients(lambda: 3 * a * a, [a, b])
    assert [(gradient, variable is one) for (gradient, variable), one in zip(pairs, (a, b), strict=True)] == [
        (6.0, True),
        (None, True),
    ]
    with pytest.raises(ValueError, match="no tape"):
        optimizer.compute_gradients(jnp.float32(1.0), [a])
    tape = GradientTape()
    loss = tape.record(lambda: a * b)
    assert [gradient for gradient, _ in optimizer.compute_gradients(loss, [a, b], tape)] == [2.0, 1.0]
    assert [gradient for gradient, _ in optimizer.compute_gradients(lambda: a * b, (a, b), GradientTape())] == [
        2.0,
        1.0,
    ]


def test_compute_gradients_watches_what_it_is_given():
    frozen = Variable(2.0, trainable=False)
    assert SGD().compute_gradients(lambda: frozen * 3, [frozen])[0][0] == 3.0
    assert SGD().compute_gradients(lambda: frozen * 3, [frozen], GradientTape())[0][0] == 3.0


def test_minimize_is_compute_then_apply():
    a, tape = Variable(2.0), GradientTape()
    loss = tape.record(lambda: a * a)
    optimizer = SGD(0.25)
    assert optimizer.minimize(loss, [a], tape) is None
    assert optimizer.minimize(lambda: a * a, [a]) is None
    assert (float(a), int(optimizer.iterations)) == (0.5, 2)


# --- configuration, compiling ---


def test_base_configuration_has_no_name():
    config = KerasOptimizer("x", clipnorm=1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3).get_config()
    assert config == {
        "clipnorm": 1.0,
        "global_clipnorm": None,
        "clipvalue": None,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 3,
        "jit_compile": jax.default_backend() == "gpu",
    }


def test_from_config():
    schedule = {
        "class_name": "ExponentialDecay",
        "config": {"initial_learning_rate": 0.5, "decay_steps": 1, "decay_rate": 0.5},
    }
    optimizer = SGD.from_config({"learning_rate": schedule, "momentum": 0.5, "name": "again"})
    assert (float(optimizer.learning_rate), optimizer.momentum, optimizer.name) == (0.5, 0.5, "again")
    with pytest.raises(TypeError, match="bogus"):
        SGD.from_config({"bogus": 1})
    with pytest.raises(ValueError, match="'Nowhere'"):
        SGD.from_config({"learning_rate": {"class_name": "Nowhere", "config": {}}})
    assigned = SGD(0.5)
    assigned.learning_rate = 0.25
    assert assigned.get_config()["learning_rate"] == 0.25


@pytest.mark.parametrize("schedule", [0.1, ExponentialDecay(0.1, 2, 0.5)])
def test_compiled_updates_give_the_same_numbers(schedule):
    values = [np.ones((3, 2), np.float32), np.ones(2, np.float32)]
    results = []
    for is_compiled in (False, True):
        optimizer = Adam(schedule, amsgrad=True, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2)
        optimizer.jit_compile = is_compiled
        variables = [Variable(value) for value in values]
        for step in range(4):
            slices = RowSlices([2, 0, 2], np.full((3, 2), 0.1 * step), (3, 2))
            optimizer.apply_gradients([(slices, variables[0]), (None if step == 1 else np.ones(2), variables[1])])
        results.append([one.numpy() for one in (*variables, *optimizer.variables)])
        assert optimizer.iterations == 4
    for eager, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-5, atol=1e-7)


def test_compiling_an_update_that_fails_leaves_values_alone():
    class Failing(Recording):
        def update_step(self, gradient, variable):
            variable.assign_sub(gradient)
            raise ArithmeticError("no")

    optimizer, variable = Failing(), Variable(1.0)
    optimizer.jit_compile = True
    with pytest.raises(ArithmeticError):
        optimizer.apply_gradients([(1.0, variable)])
    assert (float(variable), int(optimizer.iterations)) == (1.0, 0)


def test_as_optax_gives_a_transformation():
    assert isinstance(SGD().as_optax(), optax.GradientTransformation)


def test_a_learning_rate_that_is_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="learning_rate='a'"):
        SGD(learning_rate="a")
    with pytest.raises(TypeError, match="learning_rate=True. Expected a number"):
        SGD(learning_rate=True)


def test_a_learning_rate_is_finite_and_not_negative() -> None:
    optimizer = SGD(learning_rate=0.0)
    for rate in (float("nan"), float("inf"), -1, np.float32(-0.1)):
        with pytest.raises(ValueError, match="Found learning_rate="):
            SGD(learning_rate=rate)
        with pytest.raises(ValueError, match="Found learning_rate="):
            optimizer.learning_rate = rate
    assert float(optimizer.learning_rate) == 0.0


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        ("Zeros", 0.0, 0.0),
        ("ones", 1.0, 1.0),
        ("random_uniform", -0.05, 0.05),
        ("TruncatedNormal", -0.1, 0.1),
        # The limit is sqrt(6 / (fan in + fan out)).
        ("glorot_uniform", -((6 / 60) ** 0.5), (6 / 60) ** 0.5),
        ("HeUniform", -((6 / 40) ** 0.5), (6 / 40) ** 0.5),
        (jax.nn.initializers.uniform(0.25), 0.0, 0.25),
        (initializers.Uniform(-0.25, 0.5), -0.25, 0.5),
        (initializers.Constant(0.125), 0.125, 0.125),
        (lambda shape, dtype: np.full(shape, 0.5, dtype), 0.5, 0.5),
    ],
)
def test_variables_begin_as_any_initializer_says(initializer, low, high):
    optimizer, model = KerasOptimizer("O"), Variable(jnp.zeros((40, 20)), name="kernel")
    made = [
        optimizer.add_variable((40, 20), initializer=initializer, name="own"),
        optimizer.add_variable_from_reference(model, "slot", initializer=initializer),
        optimizer.add_variable_from_reference(model, "narrow", shape=(40, 3), initializer=initializer),
    ]
    assert [one.shape for one in made] == [(40, 20), (40, 20), (40, 3)]
    for one in made[:2]:
        found = one.numpy()
        assert found.dtype == np.float32
        assert low <= found.min() <= found.max() <= high
        # Spread over the whole range, where there is one.
        assert found.max() - found.min() >= 0.9 * (high - low)
    # The same in every process, which means by name.
    again = KerasOptimizer("O").add_variable((40, 20), initializer=initializer, name="own")
    np.testing.assert_array_equal(again.numpy(), made[0].numpy())


def test_what_an_initializer_makes_must_have_the_shape():
    with pytest.raises(ValueError, match=r"Expected \(2,\)"):
        KerasOptimizer("O").add_variable((2,), initializer=lambda shape, dtype: np.zeros(3, dtype))


def test_a_function_of_the_step_is_a_schedule():
    schedule = optax.exponential_decay(0.5, transition_steps=2, decay_rate=0.25)
    for optimizer in (SGD(schedule), SGD(lambda step: 0.5 * 0.25 ** (step / 2))):
        variable = Variable(0.0)
        for step in range(4):
            before = float(variable)
            optimizer.apply_gradients([(1.0, variable)])
            assert before - float(variable) == pytest.approx(0.5 * 0.25 ** (step / 2))
            assert float(optimizer.learning_rate) == pytest.approx(0.5 * 0.25 ** (step / 2))
        with pytest.raises(TypeError, match="follows"):
            optimizer.learning_rate = 0.1
        with pytest.raises(TypeError, match="cannot be written into a configuration"):
            optimizer.get_config()
    pure = SGD(schedule).as_optax()
    state = pure.init(0.0)
    for step in range(4):
        update, state = jax.jit(pure.update)(1.0, state, 0.0)
        assert float(update) == pytest.approx(-0.5 * 0.25 ** (step / 2))
    # Without arguments it is called once, at construction.
    assert float(SGD(lambda: 0.25).learning_rate) == 0.25


def test_a_variable_without_gradient_is_named_once(caplog):
    optimizer, variables = SGD(0.1), [Variable(1.0, name=name) for name in "abc"]
    for missing in ([1], [1], [1, 2], [2]):
        optimizer.apply_gradients([(None if at in missing else 1.0, variable) for at, variable in enumerate(variables)])
    assert [record.args[0] if isinstance(record.args, tuple) else record.args for record in caplog.records] == [
        ["b"],
        ["b", "c"],
    ]
