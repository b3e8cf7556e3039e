"""The concrete optimizers: formulas against a float64 oracle, numbers recorded from TensorFlow 2.9.3, defaults and
configurations.
"""

from __future__ import annotations

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.tf.keras import keras_optimizers
from podembed.embedding.tf.keras.keras_optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Nadam,
    Optimizer,
    RMSprop,
)
from podembed.embedding.tf.keras.row_slices import RowSlices
from podembed.embedding.tf.keras.schedules import CosineDecay, ExponentialDecay
from podembed.embedding.tf.keras.variable import Variable
from tests.embedding.tf.keras import keras_oracle

CASES = [
    (SGD, {}),
    (SGD, {"learning_rate": 0.1, "momentum": 0.9}),
    (SGD, {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    (Adagrad, {"learning_rate": 0.1}),
    (Adagrad, {"learning_rate": 0.5, "initial_accumulator_value": 0.0, "epsilon": 0.01}),
    (Adadelta, {"learning_rate": 1.0, "rho": 0.8, "epsilon": 1e-3}),
    (Adam, {"learning_rate": 0.1}),
    (Adam, {"learning_rate": 0.1, "beta_1": 0.5, "beta_2": 0.6, "epsilon": 0.01, "amsgrad": True}),
    (AdamW, {"learning_rate": 0.1, "weight_decay": 0.3}),
    (Adamax, {"learning_rate": 0.1, "beta_1": 0.8, "beta_2": 0.7}),
    (Nadam, {"learning_rate": 0.1, "beta_1": 0.8, "beta_2": 0.7}),
    (RMSprop, {"learning_rate": 0.1}),
    (RMSprop, {"learning_rate": 0.1, "rho": 0.7, "momentum": 0.5, "epsilon": 0.01}),
    (RMSprop, {"learning_rate": 0.01, "centered": True}),
    (Ftrl, {"learning_rate": 0.1}),
    (
        Ftrl,
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.3,
            "l1_regularization_strength": 0.3,
            "l2_regularization_strength": 0.1,
            "l2_shrinkage_regularization_strength": 0.05,
            "beta": 0.5,
        },
    ),
]
CASE_NAMES = [f"{cls.__name__}-{index}" for index, (cls, _) in enumerate(CASES)]
TABLE_SHAPE, BIAS_SHAPE = (5, 2), (3,)


def start(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in (TABLE_SHAPE, BIAS_SHAPE)]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=CASE_NAMES)
def test_dense_steps_follow_the_oracle(cls, options):
    values, random = start(0), np.random.default_rng(1)
    variables = [Variable(value) for value in values]
    optimizer, oracle = cls(**options), getattr(keras_oracle, cls.__name__.removeprefix("Keras"))(values, **options)
    for _ in range(6):
        gradients = [random.normal(size=value.shape).astype(np.float32) for value in values]
        assert optimizer.apply_gradients(zip(gradients, variables, strict=True)) is None
        oracle.step(gradients)
        for variable, expected in zip(variables, oracle.values, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=2e-5, atol=2e-6)
    assert optimizer.iterations == 6


@pytest.mark.parametrize(
    ("cls", "options"),
    [one for one in CASES if "centered" not in one[1]],
    ids=[name for name in CASE_NAMES if name != "RMSprop-13"],
)
def test_row_slices_with_duplicates_act_like_their_dense_sum(cls, options):
    values, random = start(2), np.random.default_rng(3)
    variables = [Variable(value) for value in values]
    optimizer, oracle = cls(**options), getattr(keras_oracle, cls.__name__.removeprefix("Keras"))(values, **options)
    for rows in ([0, 3, 0], [4, 3, 1], [2, 2, 2], [1, 0, 4]):
        slices = RowSlices(rows, random.normal(size=(3, 2)).astype(np.float32), TABLE_SHAPE)
        bias = random.normal(size=BIAS_SHAPE).astype(np.float32)
        dense = np.zeros(TABLE_SHAPE, np.float64)
        np.add.at(dense, rows, np.asarray(slices.values, np.float64))
        optimizer.apply_gradients([(slices, variables[0]), (bias, variables[1])])
        oracle.step([dense, bias])
        for variable, expected in zip(variables, oracle.values, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("cls", [SGD, Adagrad])
def test_rows_without_gradient_do_not_move(cls):
    table = Variable(start(4)[0])
    before = table.numpy()
    cls(0.1).apply_gradients([(RowSlices([1, 3], np.ones((2, 2)), TABLE_SHAPE), table)])
    np.testing.assert_array_equal(table.numpy()[[0, 2, 4]], before[[0, 2, 4]])
    assert (table.numpy()[[1, 3]] != before[[1, 3]]).all()


def test_ftrl_moves_rows_without_gradient_to_zero_in_the_first_step():
    table = Variable(start(4)[0])
    Ftrl(0.1).apply_gradients([(RowSlices([1], np.ones((1, 2)), TABLE_SHAPE), table)])
    np.testing.assert_array_equal(table.numpy()[[0, 2, 3, 4]], 0.0)


def test_centered_rmsprop_leaves_rows_alone_whose_velocity_turned_negative():
    # Squares of averaged squares are taken off the velocity for good: with large gradients it is below zero at once.
    table = Variable(np.ones(TABLE_SHAPE, np.float32))
    optimizer = RMSprop(0.1, centered=True)
    optimizer.apply_gradients([(RowSlices([0], np.full((1, 2), 10.0), TABLE_SHAPE), table)])
    optimizer.apply_gradients([(RowSlices([1], np.full((1, 2), 0.1), TABLE_SHAPE), table)])
    assert np.isnan(table.numpy()[0]).all()
    assert np.isfinite(table.numpy()[1:]).all()


# Last values after four steps of TensorFlow 2.9.3 (CPU, keras.optimizers.experimental) from [1, -2] and 0.5 with these
# gradients.
GRADIENTS = [([0.5, -1.0], 0.25), ([-0.25, 0.75], -1.5), ([1.0, 0.125], 0.5), ([-0.5, -0.25], 2.0)]
RECORDED = [
    ("SGD", {}, [0.9925000071525574, -1.996250033378601], 0.48749998211860657),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}, [0.7558000683784485, -1.8580999374389648], 0.5255250334739685),
    (
        "SGD",
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
        [0.7052199840545654, -1.8347898721694946],
        0.3979724645614624,
    ),
    ("Adagrad", {}, [0.9990905523300171, -1.999535083770752], 0.49926427006721497),
    ("Adadelta", {}, [0.9999987483024597, -1.9999995231628418], 0.49999740719795227),
    ("Adam", {}, [0.9978141784667969, -1.9987878799438477], 0.49956080317497253),
    ("Adam", {"learning_rate": 0.1, "amsgrad": True}, [0.7814143896102905, -1.8787943124771118], 0.4560823142528534),
    ("AdamW", {"weight_decay": 0.0}, [0.9978141784667969, -1.9987878799438477], 0.49956080317497253),
    ("Adamax", {}, [0.9981902837753296, -1.998841643333435], 0.4994007647037506),
    ("Nadam", {}, [0.9987423419952393, -1.9993665218353271], 0.49880683422088623),
    ("Ftrl", {}, [0.46456798911094666, -1.396512508392334], 0.10703203082084656),
    (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.3,
            "l1_regularization_strength": 0.2,
            "l2_regularization_strength": 0.1,
            "l2_shrinkage_regularization_strength": 0.05,
            "beta": 0.5,
        },
        [0.10444118082523346, -0.6173458099365234],
        -0.02103104069828987,
    ),
    ("RMSprop", {}, [0.9968381524085999, -1.9984374046325684], 0.49636217951774597),
    (
        "RMSprop",
        {"learning_rate": 0.1, "momentum": 0.9},
        [-0.08901351690292358, -1.4386489391326904],
        -0.19425815343856812,
    ),
    (
        "RMSprop",
        {"learning_rate": 0.01, "centered": True},
        [0.9682893753051758, -1.9834380149841309],
        0.4377594590187073,
    ),
    ("SGD", {"learning_rate": 0.1, "clipnorm": 0.5}, [0.9885581731796265, -1.9865537881851196], 0.4249999523162842),
    (
        "SGD",
        {"learning_rate": 0.1, "global_clipnorm": 0.5},
        [0.9531444311141968, -1.9780089855194092],
        0.4629451036453247,
    ),
    ("SGD", {"learning_rate": 0.1, "clipvalue": 0.3}, [0.9950000047683716, -1.9875000715255737], 0.4449999928474426),
    (
        "SGD",
        {"learning_rate": 0.1, "clipnorm": 0.5, "clipvalue": 0.1},
        [0.9885581731796265, -1.9865537881851196],
        0.4249999523162842,
    ),
    (
        "Adam",
        {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        [0.849254846572876, -1.9142701625823975],
        0.45950448513031006,
    ),
    (
        "RMSprop",
        {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5},
        [0.6838119029998779, -1.8437434434890747],
        0.1362193524837494,
    ),
]


@pytest.mark.parametrize(("name", "options", "pair", "single"), RECORDED)
def test_numbers_recorded_from_tensorflow(name, options, pair, single):
    variables = [Variable([1.0, -2.0]), Variable(0.5)]
    optimizer = getattr(keras_optimizers, name)(**options)
    for gradients in GRADIENTS:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    np.testing.assert_allclose(variables[0].numpy(), pair, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(variables[1].numpy(), single, rtol=2e-6, atol=2e-7)


BASE_CONFIG = {
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "jit_compile": jax.default_backend() == "gpu",
}
RATE, SLOW_RATE = float(np.float32(0.001)), float(np.float32(0.01))
ADAM_CONFIG = {"learning_rate": RATE, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
CONFIGS = {
    SGD: {"learning_rate": SLOW_RATE, "momentum": 0.0, "nesterov": False},
    Adagrad: {"learning_rate": RATE, "initial_accumulator_value": 0.1, "epsilon": 1e-7},
    Adadelta: {"learning_rate": RATE, "rho": 0.95, "epsilon": 1e-7},
    Adam: {**ADAM_CONFIG, "amsgrad": False},
    AdamW: {**ADAM_CONFIG, "amsgrad": False, "weight_decay": 0.004},
    Adamax: ADAM_CONFIG,
    Nadam: ADAM_CONFIG,
    RMSprop: {
        "learning_rate": RATE,
        "rho": 0.9,
        "momentum": 0.0,
        "epsilon": 1e-7,
        "centered": False,
        "ema_overwrite_frequency": 100,
    },
    Ftrl: {
        "learning_rate": RATE,
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
        "beta": 0.0,
    },
}


@pytest.mark.parametrize("cls", CONFIGS)
def test_default_configuration_is_that_of_tensorflow(cls):
    config = cls().get_config()
    assert config == {**BASE_CONFIG, **CONFIGS[cls]}
    assert json.loads(json.dumps(config)) == config
    assert cls.from_config(config).get_config() == config
    assert cls().name == cls.__name__.removeprefix("Keras")


@pytest.mark.parametrize("cls", CONFIGS)
def test_constructors_take_what_every_optimizer_takes_in_the_same_order(cls):
    parameters = list(inspect.signature(cls).parameters)
    common = list(inspect.signature(Optimizer).parameters)
    # Keras 3 has its decay in another place in each class; here it goes by name alone.
    common = [*(one for one in common[1:-1] if one != "weight_decay"), "name", "kwargs"]
    assert parameters[0] == "learning_rate"
    assert parameters[-len(common) :] == common


@pytest.mark.parametrize(("cls", "options"), CASES, ids=CASE_NAMES)
def test_an_optimizer_made_from_a_configuration_continues_the_same(cls, options):
    schedule = ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    first = cls(**{**options, "learning_rate": schedule}, clipvalue=0.5, use_ema=True, ema_overwrite_frequency=2)
    config = first.get_config()
    assert config["learning_rate"] == {"class_name": "ExponentialDecay", "config": schedule.get_config()}
    second = cls.from_config(json.loads(json.dumps(config)))
    assert isinstance(config["learning_rate"], dict), "from_config must leave its argument alone"
    variables = [Variable([1.0, -1.0]), Variable([1.0, -1.0])]
    for optimizer, variable in zip((first, second), variables, strict=True):
        for _ in range(3):
            optimizer.apply_gradients([(jnp.array([0.4, -0.8]), variable)])
    np.testing.assert_array_equal(variables[0].numpy(), variables[1].numpy())


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (SGD, {"momentum": 1.1}),
        (SGD, {"momentum": -0.1}),
        (AdamW, {"weight_decay": None}),
        (Ftrl, {"initial_accumulator_value": -0.1}),
        (Ftrl, {"learning_rate_power": 0.1}),
        (Ftrl, {"l1_regularization_strength": -0.1}),
        (Ftrl, {"l2_regularization_strength": -0.1}),
        (Ftrl, {"l2_shrinkage_regularization_strength": -0.1}),
        (Adam, {"learning_rate": None}),
    ],
)
def test_hyperparameters_out_of_range_are_refused(cls, arguments):
    with pytest.raises(ValueError, match=r"Found .* Expected"):
        cls(**arguments)


def test_ftrl_without_accumulator_steps_from_zero():
    variable = Variable([0.5])
    Ftrl(0.1, initial_accumulator_value=0.0, learning_rate_power=0.0).apply_gradients([([1.0], variable)])
    assert np.isfinite(variable.numpy()).all()


def test_amsgrad_of_sgd_has_no_effect():
    variables = [Variable(1.0), Variable(1.0)]
    SGD(0.1, 0.9, False, True).apply_gradients([(1.0, variables[0])])
    SGD(0.1, 0.9, False, False).apply_gradients([(1.0, variables[1])])
    assert variables[0] == variables[1]


@pytest.mark.parametrize(
    ("cls", "options", "slots"),
    [
        (SGD, {}, set()),
        (SGD, {"momentum": 0.5}, {"m"}),
        (Adagrad, {}, {"accumulator"}),
        (Adadelta, {}, {"accumulated_grad", "accumulated_delta_var"}),
        (Adam, {}, {"m", "v"}),
        (AdamW, {"amsgrad": True}, {"m", "v", "vhat"}),
        (Adamax, {}, {"m", "u"}),
        (RMSprop, {"centered": True, "momentum": 0.1}, {"velocity", "momentum", "average_gradient"}),
        (Ftrl, {"use_ema": True}, {"accumulator", "linear", "average"}),
    ],
)
def test_slots_are_named_after_optimizer_and_variable(cls, options, slots):
    optimizer, variable = cls(**options), Variable([1.0], name="dense/kernel")
    optimizer.apply_gradients([([0.5], variable)])
    names = {one.name for one in optimizer.variables}
    assert names == {"iteration", "learning_rate"} | {f"{cls().name}/{slot}/dense/kernel" for slot in slots}


def test_adamw_decays_apart_from_the_gradient_and_leaves_out_what_is_excluded():
    kernel, bias, frozen = Variable([1.0], name="kernel"), Variable([1.0], name="bias"), Variable([1.0], name="other")
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[frozen], var_names=["^bi"])
    optimizer.apply_gradients([([0.0], kernel), ([0.0], bias), ([0.0], frozen)])
    assert [one.numpy()[0] for one in (kernel, bias, frozen)] == pytest.approx([0.95, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="before the first apply_gradients"):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])


@pytest.mark.parametrize("cls", [SGD, Adagrad, Adadelta, Adam, AdamW, Adamax, Nadam, Ftrl, RMSprop])
def test_a_configuration_of_numbers_of_numpy_and_jax_goes_through_json(cls):
    names = {"momentum", "beta_1", "rho", "epsilon", "beta"} & set(inspect.signature(cls).parameters)
    options = {name: np.float32(0.5) for name in names} | {"clipnorm": jnp.float32(2.0), "weight_decay": np.array(0.25)}
    made = cls(np.float32(0.5), use_ema=True, ema_overwrite_frequency=np.int64(3), **options)
    config = json.loads(json.dumps(made.get_config()))
    assert config.items() >= {"learning_rate": 0.5, "clipnorm": 2.0, "weight_decay": 0.25}.items()
    assert all(config[name] == 0.5 for name in names)
    assert cls.from_config(config).get_config() == config


def test_one_pattern_and_one_variable_are_one_each_in_an_exclusion():
    table, bias, one = (Variable([1.0], name=name) for name in ("tables/emb", "dense/bias", "one"))
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=one, var_names="bias")
    optimizer.apply_gradients([([0.0], table), ([0.0], bias), ([0.0], one)])
    assert [each.numpy()[0] for each in (table, bias, one)] == pytest.approx([0.95, 1.0, 1.0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"var_list": ["bias"]}, TypeError, r"Found 'bias' among the variables .* Names are given as var_names"),
        ({"var_list": "bias"}, TypeError, "Found 'bias' among"),
        ({"var_list": [3.0]}, TypeError, "Found a float among"),
        ({"var_names": [Variable(1.0, name="w")]}, TypeError, r"in var_names.*var_list=\[variable\]"),
        ({"var_names": 3}, TypeError, "Found 3 in var_names"),
        ({"var_names": ["bias", ""]}, ValueError, "empty text"),
        ({"var_names": "a["}, ValueError, r"no regular expression.*re.escape\('a\['\)"),
    ],
)
def test_what_excludes_nothing_is_refused(given, error, message):
    optimizer = AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names="kernel")
    with pytest.raises(error, match=message):
        optimizer.exclude_from_weight_decay(**given)
    kernel = Variable([1.0], name="kernel")
    optimizer.apply_gradients([([0.0], kernel)])
    assert kernel.numpy() == 1.0, "the earlier call holds"


def test_one_variable_stands_for_a_list_of_it():
    variable = Variable([1.0, 2.0], name="w")
    optimizer = SGD(1.0, use_ema=True)
    ((gradient, _),) = optimizer.compute_gradients(lambda: (variable.value**2).sum(), variable)
    assert np.asarray(gradient).tolist() == [2.0, 4.0]
    optimizer.minimize(lambda: variable.value.sum(), variable)
    assert variable.numpy().tolist() == [0.0, 1.0]
    optimizer.finalize_variable_values(variable)
    with pytest.raises(TypeError, match=r"Expected a list of them. Write build\(\[variable\]\)"):
        SGD(1.0).build(variable)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"build\(list\("):
        SGD(1.0).build(iter([variable]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Found a list among the variables of compute_gradients"):
        optimizer.minimize(lambda: variable.value.sum(), [[variable]])  # type: ignore[arg-type]


# With Keras 3.15.1 over JAX: rate 0.1, weight_decay=0.3, clipvalue=0.5; a kernel from [1, -2] that gets three
# gradients, a bias from 0.5 that gets 1 and is excluded by name.
DECAYED_BY_KERAS_3 = [
    (SGD, {}, [0.8876505494117737, -1.9345159530639648], 0.34999996423721313),
    (SGD, {"momentum": 0.9}, [0.8905755281448364, -2.0299160480499268], 0.21949999034404755),
    (Adagrad, {}, [0.8684057593345642, -1.9886441230773926], 0.2967022657394409),
    (Adadelta, {}, [0.9125332236289978, -1.8256726264953613], 0.49957090616226196),
    (Adam, {}, [0.8325826525688171, -2.0905654430389404], 0.200003519654274),
    (AdamW, {}, [0.8325826525688171, -2.0905654430389404], 0.200003519654274),
    (Adamax, {}, [0.8280273675918579, -2.053297519683838], 0.20000015199184418),
    (Nadam, {}, [0.8300803899765015, -2.037487506866455], 0.24522873759269714),
    (Ftrl, {}, [0.16041703522205353, -1.0643671751022339], 0.029441015794873238),
    (RMSprop, {}, [0.6741912364959717, -2.4325294494628906], -0.23773720860481262),
]


@pytest.mark.parametrize(("cls", "options", "kernel_after", "bias_after"), DECAYED_BY_KERAS_3)
@pytest.mark.parametrize("way", ["one by one", "compiled", "optax"])
def test_every_optimizer_decays_as_in_keras_3(cls, options, kernel_after, bias_after, way):
    kernel, bias, still = (
        Variable(value, name=name) for name, value in (("kernel", [1.0, -2.0]), ("bias", [0.5]), ("still", [4.0]))
    )
    optimizer = cls(0.1, weight_decay=0.3, clipvalue=0.5, **options)
    assert cls.from_config(optimizer.get_config()).weight_decay == 0.3
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.jit_compile = way == "compiled"
    params = {"kernel": kernel.value, "bias": bias.value}
    pure = optimizer.as_optax()
    state = pure.init(params)
    for gradient in ([0.25, 2.0], [-1.0, 0.125], [0.5, 0.5]):
        own = {"kernel": jnp.array(gradient), "bias": jnp.ones(1)}
        if way == "optax":
            updates, state = pure.update(own, state, params)
            params = {name: params[name] + updates[name] for name in params}
        else:
            # Without a gradient there is no decay either.
            optimizer.apply_gradients([(own["kernel"], kernel), (own["bias"], bias), (None, still)])
            params = {"kernel": kernel.value, "bias": bias.value}
    np.testing.assert_allclose(params["kernel"], kernel_after, rtol=2e-5)
    np.testing.assert_allclose(params["bias"], [bias_after], rtol=2e-5)
    assert float(still.value[0]) == 4.0


def test_nadam_counts_the_momentum_product_once_a_step_for_all_variables():
    many, one = [Variable(1.0) for _ in range(3)], Variable(1.0)
    for optimizer, variables in ((Nadam(0.1), many), (Nadam(0.1), [one])):
        for gradient in (0.5, -0.2, 0.3):
            optimizer.apply_gradients([(gradient, variable) for variable in variables])
    assert [float(variable) for variable in many] == [float(one)] * 3


def test_half_precision_variables_keep_their_dtype():
    variable = Variable(jnp.ones(2, jnp.bfloat16))
    for cls in (SGD, Adam, RMSprop):
        optimizer = cls(0.1, use_ema=True, clipnorm=1.0)
        optimizer.apply_gradients([(jnp.ones(2, jnp.bfloat16), variable)])
        assert variable.dtype == jnp.bfloat16
        assert all(one.dtype == jnp.bfloat16 for one in optimizer.variables if "/" in one.name)


def test_a_schedule_gives_each_step_the_rate_of_the_steps_before_it():
    schedule, variable = CosineDecay(0.5, decay_steps=4), Variable(0.0)
    optimizer = SGD(schedule)
    for step in range(5):
        before = float(variable)
        optimizer.apply_gradients([(1.0, variable)])
        assert before - float(variable) == pytest.approx(float(schedule(step)), abs=1e-6)
