"""Schedules: numbers recorded from TensorFlow 2.9.3, the same under jit, configuration, refusals."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.tf.keras import schedules
from podembed.embedding.tf.keras.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from podembed.embedding.tf.keras.variable import Variable
from tests.long_tests import examples

STEPS = (0, 1, 3, 7, 9, 21)
# Values of tf.keras.optimizers.schedules of TensorFlow 2.9.3 (CPU) at STEPS.
RECORDED = [
    (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5},
        [
            0.10000000149011612,
            0.09057236462831497,
            0.07429971545934677,
            0.05000000074505806,
            0.04101676866412163,
            0.012500000186264515,
        ],
    ),
    (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5, "staircase": True},
        [
            0.10000000149011612,
            0.10000000149011612,
            0.10000000149011612,
            0.05000000074505806,
            0.05000000074505806,
            0.012500000186264515,
        ],
    ),
    ("PiecewiseConstantDecay", {"boundaries": [3, 10.7], "values": [1.0, 0.5, 0.25]}, [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]),
    (
        "PolynomialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7},
        [
            0.10000000149011612,
            0.08572857081890106,
            0.057185713201761246,
            9.999999747378752e-05,
            9.999999747378752e-05,
            9.999999747378752e-05,
        ],
    ),
    (
        "PolynomialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7, "end_learning_rate": 0.02, "power": 0.5, "cycle": True},
        [
            0.09999999403953552,
            0.0940656065940857,
            0.08047431707382202,
            0.019999999552965164,
            0.06780914217233658,
            0.019999999552965164,
        ],
    ),
    (
        "InverseTimeDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5},
        [
            0.10000000149011612,
            0.09333334118127823,
            0.08235294371843338,
            0.06666667014360428,
            0.06086956709623337,
            0.03999999910593033,
        ],
    ),
    (
        "InverseTimeDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 7, "decay_rate": 0.5, "staircase": True},
        [
            0.10000000149011612,
            0.10000000149011612,
            0.10000000149011612,
            0.06666667014360428,
            0.06666667014360428,
            0.03999999910593033,
        ],
    ),
    (
        "CosineDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 14},
        [0.10000000149011612, 0.0987463966012001, 0.08909157663583755, 0.04999999701976776, 0.02830580808222294, 0.0],
    ),
    (
        "CosineDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 14, "alpha": 0.1},
        [
            0.10000000149011612,
            0.09887176007032394,
            0.09018241614103317,
            0.05499999597668648,
            0.0354752242565155,
            0.010000000707805157,
        ],
    ),
    (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 3},
        [
            0.10000000149011612,
            0.07500000298023224,
            0.10000000149011612,
            0.025000005960464478,
            0.10000000149011612,
            0.10000000149011612,
        ],
    ),
    (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 3, "t_mul": 1.0, "m_mul": 0.5, "alpha": 0.1},
        [
            0.10000000149011612,
            0.07750000059604645,
            0.055000003427267075,
            0.026875002309679985,
            0.021250000223517418,
            0.010703125037252903,
        ],
    ),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), RECORDED)
def test_numbers_recorded_from_tensorflow(name, arguments, expected):
    schedule = getattr(schedules, name)(**arguments)
    rates = [schedule(step) for step in STEPS]
    assert all(rate.dtype == np.float32 and rate.shape == () for rate in rates)
    np.testing.assert_array_equal(np.array(rates), np.array(expected, np.float32))


@pytest.mark.parametrize(("name", "arguments", "expected"), RECORDED)
def test_compiled_results_are_the_same(name, arguments, expected):
    # XLA turns a division by a constant into a multiplication, which moves the ends of periods; see _divisor.
    compiled = jax.jit(getattr(schedules, name)(**arguments))
    np.testing.assert_allclose([compiled(step) for step in STEPS], expected, rtol=1e-5, atol=1e-8)


@settings(deadline=None, max_examples=examples(10))
@given(duration=st.integers(1, 60), periods=st.integers(1, 12))
def test_a_period_ends_at_its_last_step_also_when_compiled(duration, periods):
    step = np.int32(duration * periods)
    staircase = jax.jit(lambda at: ExponentialDecay(1.0, duration, 0.5, staircase=True)(at))
    assert float(staircase(step)) == 0.5**periods
    cycle = jax.jit(lambda at: PolynomialDecay(1.0, duration, 0.25, power=2.0, cycle=True)(at))
    assert float(cycle(step)) == 0.25
    assert float(jax.jit(lambda at: PolynomialDecay(1.0, duration, 0.25, power=0.5)(at))(step)) == 0.25


@pytest.mark.parametrize(
    "step", [6, np.int64(6), np.int32(6), 6.0, jnp.int32(6), Variable(6), Variable(6, dtype=np.int64)]
)
def test_any_kind_of_step(step):
    assert float(CosineDecay(1.0, 12)(step)) == pytest.approx(0.5)
    assert float(PiecewiseConstantDecay([5, 6], [1.0, 0.5, 0.1])(step)) == 0.5


def test_steps_beyond_32_bits():
    assert float(ExponentialDecay(1.0, 2**40, 0.5)(np.int64(2**40))) == 0.5


def test_boundaries_take_the_dtype_of_the_step():
    schedule = PiecewiseConstantDecay([10.7], [1.0, 0.5])
    assert [float(schedule(step)) for step in (10, 11, 10.5, 10.8)] == [1.0, 0.5, 1.0, 0.5]


def test_no_boundaries_make_a_constant():
    assert float(PiecewiseConstantDecay([], [0.25])(3)) == 0.25


def test_schedules_are_optax_schedules():
    schedule = ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)
    transformation = optax.sgd(schedule)
    params, state = jnp.zeros(2), transformation.init(jnp.zeros(2))
    for expected in (-0.5, -0.75, -0.875):
        updates, state = jax.jit(transformation.update)(jnp.ones(2), state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, expected)


@pytest.mark.parametrize(("name", "arguments", "expected"), RECORDED)
def test_configuration_round_trip(name, arguments, expected):
    schedule = getattr(schedules, name)(**arguments)
    described = schedules.serialize(schedule)
    assert described["class_name"] == name
    assert described["config"] == {**described["config"], **arguments, "name": None}
    assert schedules.deserialize(described) == schedule
    assert type(schedule).from_config(schedule.get_config()) == schedule
    assert hash(schedule) == hash(schedules.deserialize(described))


def test_configuration_keys_are_those_of_keras():
    assert set(CosineDecayRestarts(0.1, 3).get_config()) == {
        "initial_learning_rate",
        "first_decay_steps",
        "t_mul",
        "m_mul",
        "alpha",
        "name",
    }
    assert PolynomialDecay(0.1, 3).get_config() == {
        "initial_learning_rate": 0.1,
        "decay_steps": 3,
        "end_learning_rate": 0.0001,
        "power": 1.0,
        "cycle": False,
        "name": None,
    }


class Warmup(LearningRateSchedule):
    def __init__(self, peak):
        self.peak = peak

    def __call__(self, step):
        return self.peak / (step + 1)

    def get_config(self):
        return {"peak": self.peak}


def test_own_classes_are_found_through_custom_objects():
    described = schedules.serialize(Warmup(0.5))
    with pytest.raises(ValueError, match="'Warmup'"):
        schedules.deserialize(described)
    assert schedules.deserialize(described, {"Warmup": Warmup})(1) == 0.25
    with pytest.raises(ValueError, match="class_name"):
        schedules.deserialize({"config": {}})


def test_the_base_class_only_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="__call__"):
        LearningRateSchedule()(0)
    with pytest.raises(NotImplementedError, match="get_config"):
        LearningRateSchedule().get_config()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExponentialDecay(0.1, 0, 0.5),
        lambda: InverseTimeDecay(0.1, -1, 0.5),
        lambda: PolynomialDecay(0.1, 0),
        lambda: CosineDecay(0.1, 0),
        lambda: CosineDecayRestarts(0.1, 0),
        lambda: CosineDecayRestarts(0.1, 3, t_mul=0.0),
        lambda: PiecewiseConstantDecay([1, 2], [0.1, 0.2]),
        lambda: PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3]),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match=r"Found .* Expected"):
        make()


# With Keras 3.15.1 over JAX.
WARMED_UP = [
    (
        {"initial_learning_rate": 0.1, "decay_steps": 10, "alpha": 0.1, "warmup_target": 1.0, "warmup_steps": 4},
        {
            0: 0.1,
            1: 0.325,
            3: 0.775,
            4: 1.0,
            5: 0.9779753684997559,
            6: 0.9140576124191284,
            10: 0.4109422564506531,
            16: 0.1,
        },
    ),
    (
        {"initial_learning_rate": 0.5, "decay_steps": 8, "warmup_target": 0.25, "warmup_steps": 0},
        {0: 0.25, 1: 0.24048493802547455, 4: 0.1249999925494194, 8: 0.0, 12: 0.0},
    ),
    (
        {"initial_learning_rate": 0.0, "decay_steps": 5, "alpha": 0.5, "warmup_target": 0.3, "warmup_steps": 3},
        {0: 0.0, 2: 0.2, 3: 0.3, 5: 0.24817627668380737, 7: 0.16432371735572815, 14: 0.15},
    ),
]


@pytest.mark.parametrize(("arguments", "rates"), WARMED_UP)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_cosine_may_warm_up_as_in_keras_3(arguments, rates, is_compiled):
    schedule = CosineDecay(**arguments)
    rate = jax.jit(schedule) if is_compiled else schedule
    assert [float(rate(step)) for step in rates] == pytest.approx(list(rates.values()), abs=1e-6)
    assert schedules.deserialize(schedules.serialize(schedule)) == schedule


@pytest.mark.parametrize("arguments", [{"warmup_target": 1.0, "warmup_steps": -1}, {"warmup_steps": 2}])
def test_half_a_warmup_is_refused(arguments):
    with pytest.raises(ValueError, match="warmup_steps"):
        CosineDecay(0.1, 4, **arguments)


@pytest.mark.parametrize(
    ("schedule", "same"),
    [
        (
            PiecewiseConstantDecay(np.array([10, 20]), [np.float32(0.5), jnp.float32(0.25), 0.125]),  # type: ignore[arg-type]
            PiecewiseConstantDecay([10, 20], [0.5, 0.25, 0.125]),
        ),
        (
            ExponentialDecay(np.float32(0.5), np.int64(10), jnp.float32(0.5), staircase=np.bool_(True)),  # type: ignore[arg-type]
            ExponentialDecay(0.5, 10, 0.5, staircase=True),
        ),
        (PolynomialDecay(jnp.bfloat16(0.5), 10), PolynomialDecay(0.5, 10)),  # type: ignore[arg-type]
    ],
)
def test_numbers_of_numpy_and_jax_go_through_json(schedule, same):
    config = json.loads(json.dumps(schedules.serialize(schedule)))
    assert config == schedules.serialize(same)
    again = schedules.deserialize(config)
    assert [float(again(step)) for step in STEPS] == [float(schedule(step)) for step in STEPS]
