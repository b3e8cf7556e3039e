"""Row optimizers as values: defaults and order of arguments, every check, slots, equality, and learning rates."""

# Wrong arguments are passed on purpose.
# pyright: reportArgumentType=false

import inspect
import math

import numpy as np
import optax
import pytest

from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Lion,
    Momentum,
    RowWiseAdagrad,
    SlotSpec,
    learning_rate_at,
)

BUILT_IN = [SGD, Momentum, Adagrad, RowWiseAdagrad, AdagradMomentum, FTRL, Adam, Lion]
LIMITS = ["clip_weight_min", "clip_weight_max", "weight_decay_factor", "multiply_weight_decay_factor_by_learning_rate"]


COMMON = f"use_gradient_accumulation {' '.join(LIMITS)} slot_variable_creation_fn clipvalue"
POSITIONAL = {
    SGD: f"learning_rate use_gradient_accumulation {' '.join(LIMITS)} clipvalue",
    Momentum: f"learning_rate momentum use_nesterov {COMMON}",
    Adagrad: f"learning_rate initial_accumulator_value {COMMON}",
    AdagradMomentum: f"learning_rate momentum use_nesterov exponent beta2 epsilon {COMMON}",
    FTRL: "learning_rate learning_rate_power l1_regularization_strength l2_regularization_strength beta "
    f"initial_accumulator_value {COMMON} multiply_linear_by_learning_rate allow_zero_accumulator",
    Adam: f"learning_rate beta_1 beta_2 epsilon lazy_adam sum_inside_sqrt {COMMON}",
    Lion: f"learning_rate beta_1 beta_2 {COMMON}",
}


@pytest.mark.parametrize("optimizer", POSITIONAL)
def test_positional_arguments(optimizer):
    parameters = inspect.signature(optimizer).parameters.values()
    found = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert found == [*POSITIONAL[optimizer].split(), "low_dimensional_packing_status"]


def test_defaults():
    assert SGD().learning_rate == Momentum().learning_rate == 0.01
    assert {optimizer().learning_rate for optimizer in BUILT_IN[2:]} == {0.001}
    assert (Momentum().momentum, Momentum().use_nesterov) == (0.9, False)
    assert (Lion().beta_1, Lion().beta_2) == (0.9, 0.99)
    assert Adagrad().initial_accumulator_value == 0.1
    assert Adagrad().epsilon == 0.0
    assert (RowWiseAdagrad().initial_accumulator_value, RowWiseAdagrad().epsilon) == (0.0, 1e-8)
    momentum = AdagradMomentum()
    assert (momentum.momentum, momentum.use_nesterov, momentum.exponent) == (0.0, False, 2)
    assert (momentum.beta2, momentum.epsilon) == (1, 1e-10)
    ftrl = FTRL()
    assert (ftrl.learning_rate_power, ftrl.l1_regularization_strength, ftrl.l2_regularization_strength) == (
        -0.5,
        0.0,
        0.0,
    )
    assert (ftrl.beta, ftrl.initial_accumulator_value) == (0.0, 0.1)
    assert (ftrl.multiply_linear_by_learning_rate, ftrl.allow_zero_accumulator) == (False, False)
    adam = Adam()
    assert (adam.beta_1, adam.beta_2, adam.epsilon, adam.lazy_adam, adam.sum_inside_sqrt) == (
        0.9,
        0.999,
        1e-7,
        True,
        True,
    )
    for optimizer in BUILT_IN:
        made = optimizer()
        assert made.use_gradient_accumulation is True
        assert [getattr(made, name) for name in [*LIMITS, "clipvalue"]] == [None] * 5
        assert made.low_dimensional_packing_status is False


def test_slots():
    found = {
        optimizer.__name__: [(slot.name, slot.width, slot.initial_value) for slot in optimizer().slots]
        for optimizer in BUILT_IN
    }
    assert found == {
        "SGD": [],
        "Momentum": [("momentum", "element", 0.0)],
        "Adagrad": [("accumulator", "element", 0.1)],
        "RowWiseAdagrad": [("accumulator", "row", 0.0)],
        "AdagradMomentum": [("accumulator", "element", 0.0), ("momentum", "element", 0.0)],
        "FTRL": [("accumulator", "element", 0.1), ("linear", "element", 0.0)],
        "Adam": [("momentum", "element", 0.0), ("velocity", "element", 0.0)],
        "Lion": [("momentum", "element", 0.0)],
    }
    assert Adam().row_bytes(16) == 3 * 64
    assert RowWiseAdagrad().row_bytes(16) == 68


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Adagrad(initial_accumulator_value=0.0), "initial_accumulator_value"),
        (lambda: Adagrad(initial_accumulator_value=-0.1), "initial_accumulator_value"),
        (lambda: Adagrad(initial_accumulator_value=-0.1, epsilon=1e-8), "initial_accumulator_value"),
        (lambda: Adagrad(epsilon=-1e-8), "epsilon"),
        (lambda: Adagrad(epsilon=math.nan), "epsilon"),
        (lambda: RowWiseAdagrad(epsilon=0.0), "initial_accumulator_value"),
        (lambda: RowWiseAdagrad(initial_accumulator_value=-1.0), "initial_accumulator_value"),
        (lambda: FTRL(initial_accumulator_value=0.0), "initial_accumulator_value"),
        (lambda: FTRL(initial_accumulator_value=0.0, allow_zero_accumulator=True), "initial_accumulator_value"),
        (lambda: Adam(beta_1=1.0), "beta_1"),
        (lambda: Adagrad(True), "learning_rate=True"),
        (lambda: Adam(beta_1=-0.1), "beta_1"),
        (lambda: Adam(beta_2=1.0), "beta_2=1.0"),
        (lambda: Adam(beta_2=math.nan), "beta_2"),
        (lambda: Adam(epsilon=0.0), "epsilon"),
        (lambda: Adam(lazy_adam=False, use_gradient_accumulation=False), "lazy_adam=False"),
        (lambda: Momentum(momentum=-0.1), "momentum"),
        (lambda: Momentum(momentum=1.1), "momentum"),
        (lambda: Lion(beta_1=1.0), "beta_1"),
        (lambda: Lion(beta_2=-0.1), "beta_2"),
        (lambda: Lion(beta_2=math.nan), "beta_2"),
        (lambda: AdagradMomentum(epsilon=0.0), "epsilon"),
        (lambda: AdagradMomentum(exponent=0.0), "exponent"),
        (lambda: AdagradMomentum(exponent=-1), "exponent"),
        (lambda: Adagrad(slot_variable_creation_fn=3), "slot_variable_creation_fn"),
        (lambda: SGD("0.1"), "learning_rate"),
        (lambda: SGD(None), "learning_rate"),
        (lambda: SGD(clipvalue=(0.1, 0.2, 0.3)), "two limits"),
    ],
)
def test_checks(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("optimizer", BUILT_IN)
def test_common_checks(optimizer):
    for clipvalue in (1.0, 0.0, (None, 1.0)):
        with pytest.raises(ValueError, match="use_gradient_accumulation"):
            optimizer(use_gradient_accumulation=False, clipvalue=clipvalue)
    with pytest.raises(TypeError, match="tuple"):
        optimizer(clipvalue=[-1.0, 1.0])
    with pytest.raises(ValueError, match="Swap"):
        optimizer(clip_weight_min=1.0, clip_weight_max=0.0)
    with pytest.raises(ValueError, match=r"clipvalue=-1\.0\. Expected a number of at least 0"):
        optimizer(clipvalue=-1.0)
    assert optimizer(clip_weight_min=0.0, clip_weight_max=0.0).clip_weight_max == 0.0


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (SGD, "weight_decay_factor"),
        (Adagrad, "initial_accumulator_value"),
        (RowWiseAdagrad, "epsilon"),
        (AdagradMomentum, "momentum"),
        (AdagradMomentum, "exponent"),
        (FTRL, "l1_regularization_strength"),
        (FTRL, "initial_accumulator_value"),
        (Adam, "beta_2"),
        (Adam, "clip_weight_max"),
        (Adam, "clipvalue"),
    ],
)
def test_options_are_numbers(optimizer, name):
    for value in ("0.5", [0.5], (0.5, "x"), lambda: 0.5):
        with pytest.raises(TypeError, match=f"Found {name}="):
            optimizer(**{name: value})
    number = np.float32(0.5)
    assert getattr(optimizer(**{name: number}), name) == ((-number, number) if name == "clipvalue" else number)


def test_clipvalue_becomes_two_limits():
    assert (SGD(clipvalue=2.0).clip_gradient_min, SGD(clipvalue=2.0).clip_gradient_max) == (-2.0, 2.0)
    assert (SGD(clipvalue=(None, 3.0)).clip_gradient_min, SGD(clipvalue=(None, 3.0)).clip_gradient_max) == (None, 3.0)
    assert SGD().clip_gradient_min is None
    assert SGD(clipvalue=2.0) == SGD(clipvalue=(-2.0, 2.0))
    assert SGD() == SGD(clipvalue=(None, None))
    assert SGD(clipvalue=np.float32(2.0)).clip_gradient_min == -2.0


def test_equality_and_hash_are_by_value_and_callables_by_identity():
    assert Adagrad(0.1) == Adagrad(0.1)
    assert hash(Adagrad(0.1)) == hash(Adagrad(0.1))
    assert Adagrad(0.1) != Adagrad(0.2)
    assert SGD(0.1) != Adagrad(0.1)
    rate, same = (lambda: 0.1), (lambda: 0.1)
    assert SGD(rate) == SGD(rate)
    assert SGD(rate) != SGD(same)
    assert len({Adam(), Adam(), Adam(lazy_adam=False)}) == 2


def test_only_non_lazy_adam_touches_all_rows():
    assert [optimizer().touches_all_rows for optimizer in BUILT_IN] == [False] * len(BUILT_IN)
    assert Adam(lazy_adam=False).touches_all_rows


def test_learning_rates():
    assert learning_rate_at(0.25, 7) == 0.25
    assert learning_rate_at(np.float32(0.5), 7) == 0.5
    assert learning_rate_at(lambda: 0.1, 7) == 0.1
    assert learning_rate_at(lambda scale=2.0: scale, 7) == 2.0
    assert learning_rate_at(lambda step: step * 0.5, 7) == 3.5
    schedule = optax.piecewise_constant_schedule(1.0, {5: 0.1})
    assert learning_rate_at(schedule, 0) == 1.0
    assert learning_rate_at(schedule, 9) == pytest.approx(0.1)


def _step(gradient, row, slots, learning_rate, hyperparameters):
    return row - learning_rate * gradient, slots


@pytest.mark.parametrize("returned", [None, "0.1", [0.1, 0.2], np.array([0.1, 0.2])])
def test_a_learning_rate_that_returns_no_number_is_named(returned):
    with pytest.raises(TypeError, match=r"from the learning rate .*Return a float"):
        learning_rate_at(lambda: returned, 0)


def test_custom_optimizer_is_a_value():
    one = CustomRowOptimizer(_step, (SlotSpec(name="seen", width="row"),), {"b": 1.0, "a": 2.0})
    same = CustomRowOptimizer(
        slots=[SlotSpec(name="seen", width="row")], update=_step, hyperparameters=(("a", 2.0), ("b", 1.0))
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one.slots == (SlotSpec(name="seen", width="row"),)
    assert one.row_bytes(4) == 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: CustomRowOptimizer(update=None),
        lambda: CustomRowOptimizer(_step, hyperparameters={"not a name": 1.0}),
        lambda: CustomRowOptimizer(_step, hyperparameters={"beta": math.inf}),
        lambda: CustomRowOptimizer(_step, hyperparameters={"beta": "0.9"}),
        lambda: CustomRowOptimizer(_step, (SlotSpec(name="a", width="row"), SlotSpec(name="a", width="row"))),
        lambda: SlotSpec(name="rows", width="row"),
        lambda: SlotSpec(name="a b", width="row"),
        lambda: SlotSpec(name="a", width="column"),
    ],
)
def test_custom_optimizer_is_checked(make):
    with pytest.raises(ValueError, match="Found"):
        make()
