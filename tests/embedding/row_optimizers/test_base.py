"""A row optimizer is one file: arguments, slots, compiled rule, constants and oracle; the table of them is complete."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podembed.embedding
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Uniform
from podembed.embedding.kernels.row_vectors import columns_of, jit, load, splat, store
from podembed.embedding.kernels.updates import decayed, gradient_of, limit_weight
from podembed.embedding.optimizers import FTRL, ROW_OPTIMIZERS, Adagrad, AdagradMomentum, Adam, CustomRowOptimizer
from podembed.embedding.row_optimizers.base import LearningRate, Optimizer, SlotSpec, learning_rate_at
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding import reference


@dataclass(frozen=True)
class _HeavyBall(Optimizer):
    """`m = keep * m + g; w -= lr * m`."""

    keep: float = 0.5
    learning_rate: LearningRate = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_max: float | None = None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (SlotSpec(name="momentum", width="element"),)

    def kernel(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _update, (float(self.keep),)

    def oracle(
        self, weight: np.ndarray, slots: Sequence[np.ndarray], gradient: np.ndarray, rate: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        m = self.keep * slots[0] + gradient
        return weight - rate * m, [m]


@jit
def _update(width, dim, table, momentum, rows, head, following, gradients, learning_rate, limits, keep):
    rate, kept = splat(width, np.float32(learning_rate)), splat(width, np.float32(keep))
    for u in range(rows.shape[0]):
        row = rows[u]
        for column in range(0, dim, columns_of(width)):
            g = gradient_of(width, gradients, head, u, following, column, limits)
            w = decayed(width, load(width, table, row, column), limits)
            m = kept * load(width, momentum, row, column) + g
            store(momentum, row, column, m)
            store(table, row, column, limit_weight(width, w - rate * m, limits))


@pytest.mark.parametrize("clip_weight_max", [None, 0.2])
def test_a_new_optimizer_needs_nothing_outside_its_file(clip_weight_max: float | None) -> None:
    optimizer = _HeavyBall(clip_weight_max=clip_weight_max)
    table = Table(TableSpec.of(TableConfig(12, 8, Uniform(-0.5, 0.5), optimizer, name="t"), seed=0), np.array([0]))
    table.initialize()
    rows, slots = table.rows.copy(), {name: slot.copy() for name, slot in table.slots.items()}
    rng = np.random.default_rng(0)
    for _ in range(3):
        touched, gradients = rng.integers(0, 12, 9), rng.standard_normal((9, 8)).astype(np.float32)
        table.update(touched, gradients, 0.1)
        reference.update(optimizer, rows, slots, touched, gradients, 0.1)
    assert np.array_equal(table.rows, rows)
    assert np.array_equal(table.slots["momentum"], slots["momentum"])


def test_the_table_has_every_optimizer_and_users_can_import_it() -> None:
    folder = Path(podembed.embedding.__file__).parent / "row_optimizers"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    written = {one.name for one in classes if any(getattr(base, "id", "") == "Optimizer" for base in one.bases)}
    assert {cls.__name__ for cls in ROW_OPTIMIZERS} == written
    assert written <= set(podembed.embedding.__all__)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("rule", ROW_OPTIMIZERS, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("rate", [-1.0, -1e-9, NAN, INFINITE, -INFINITE, 1e39, 10**400])
def test_a_learning_rate_that_cannot_train_is_refused(rule: Any, rate: float) -> None:
    with pytest.raises(ValueError, match=r"Found learning_rate=.*Expected a (finite )?number"):
        rule(learning_rate=rate, **_update_of(rule))


@pytest.mark.parametrize("rule", ROW_OPTIMIZERS, ids=lambda rule: rule.__name__)
def test_hyperparameters_are_finite_and_flags_are_bools(rule: Any) -> None:
    for argument in fields(rule):
        kind, _, _ = str(argument.type).partition(" | ")
        if kind == "float" and argument.name != "learning_rate":
            with pytest.raises(ValueError, match=f"Found {argument.name}=nan"):
                rule(**{argument.name: NAN}, **_update_of(rule))
        if kind == "bool":
            for wrong in ("no", 0, 1.0, []):
                with pytest.raises(TypeError, match=f"Found {argument.name}=.* Expected True or False"):
                    rule(**{argument.name: wrong}, **_update_of(rule))


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        (Adagrad, {"initial_accumulator_value": INFINITE}),
        (Adagrad, {"epsilon": INFINITE}),
        (Adagrad, {"weight_decay_factor": -0.1}),
        (Adagrad, {"clipvalue": NAN}),
        (Adagrad, {"clipvalue": -1.0}),
        (Adagrad, {"clipvalue": (NAN, None)}),
        (Adam, {"epsilon": INFINITE}),
        (AdagradMomentum, {"momentum": -0.1}),
        (AdagradMomentum, {"momentum": 1.5}),
        (AdagradMomentum, {"beta2": 1.5}),
        (FTRL, {"l1_regularization_strength": -1.0}),
        (FTRL, {"l2_regularization_strength": -1.0}),
        (FTRL, {"beta": -1.0}),
        (FTRL, {"learning_rate_power": 0.5}),
    ],
)
def test_hyperparameters_out_of_their_range_are_refused(rule: Any, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"Found {name}="):
        rule(**arguments)


def test_limits_of_weights_may_be_infinite_and_a_rate_zero() -> None:
    Adagrad(0.0, clip_weight_min=-INFINITE, clip_weight_max=INFINITE, clipvalue=INFINITE)
    of_numpy: dict[str, Any] = {"learning_rate": np.float32(0.1), "use_gradient_accumulation": np.bool_(True)}
    Adagrad(**of_numpy)


@pytest.mark.parametrize("rate", [-0.1, NAN, INFINITE])
def test_a_schedule_that_returns_no_rate_is_named_with_its_step(rate: float) -> None:
    with pytest.raises(ValueError, match=r"Found .* from the learning rate .* at step 7\. Expected a finite number"):
        learning_rate_at(lambda step: rate, 7)


def test_the_first_value_of_a_slot_is_a_number() -> None:
    with pytest.raises(TypeError, match="initial_value of slot 'm'"):
        SlotSpec(name="m", width="row", initial_value="0")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="initial_value of slot 'm'"):
        SlotSpec(name="m", width="row", initial_value=NAN)


def _update_of(rule: type) -> dict[str, Any]:
    """What a rule cannot be made without."""
    return {"update": lambda g, row, slots, rate, constants: (row, slots)} if rule is CustomRowOptimizer else {}
