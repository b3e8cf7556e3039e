"""Several devices a host, in `mesh_process`: spread over samples and over parts of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.device.dense_leaves import specs_of
from podembed.workers.device.gang_errors import GangError
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.options import DeviceOptions
from tests.long_tests import long_case
from tests.small_job import small_job


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


@dataclass
class Declared:
    shardings: Any


STATE = {"params": {"down": shape(16), "up": shape(6, 16)}, "optimizer": {}, "state": {}}
ROOT = Path(__file__).parents[3]
PATIENCE_S = 900.0
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "8": (8, {}),
    "data=4,model=2": (8, {"data": 4, "model": 2}),
    "data=2,model=2": (4, {"data": 2, "model": 2}),
    "data=1,model=8": (8, {"data": 1, "model": 8}),
}
ALONE = "1 separate"
CUT = [name for name, (_, axes) in MESHES.items() if axes]


@pytest.fixture(scope="module", params=["few", long_case("all")])
def found(small_data: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.device.mesh_process", small_data, request.param],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_mesh_and_way_trains_as_one_device(found: dict[str, Any]) -> None:
    """Up to the order of sums: losses, gradients of activations, scores, parameters and optimizer state."""
    alone = found["trained"][ALONE]
    assert len(found["trained"]) == (3 if found["is_few"] else 7)
    for name, one in found["trained"].items():
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(one["scores"], alone["scores"], rtol=1e-3, atol=1e-4, err_msg=name)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-4), name
        for step, wanted in zip(one["gradients"], alone["gradients"], strict=True):
            for gradient, expected in zip(step, wanted, strict=True):
                np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-6, err_msg=name)
        assert one["arrays"].keys() == alone["arrays"].keys()
        for key, values in one["arrays"].items():
            np.testing.assert_allclose(values, alone["arrays"][key], rtol=1e-3, atol=2e-5, err_msg=f"{name} {key}")


def test_a_spread_model_is_summed_in_one_exchange_and_calls_no_host(found: dict[str, Any]) -> None:
    ways = ["8 packed"] if found["is_few"] else ["8 packed", "8 separate"]
    assert found["programs"] == {way: {"asked": ["all-reduce"], "host": []} for way in ways}


def test_what_is_cut_lies_in_parts_and_its_optimizer_state_with_it(found: dict[str, Any]) -> None:
    meshes = {name.split()[0]: one["parts"] for name, one in found["trained"].items() if name.split()[0] in CUT}
    assert len(meshes) == (1 if found["is_few"] else 3)
    for mesh, by_key in meshes.items():
        parts = MESHES[mesh][1]["model"]
        cut = {key for key, (own, whole) in by_key.items() if own != whole}
        assert cut == {
            *(f"params/{name}" for name in ("up", "down")),
            *(f"optimizer/1/0/{slot}/{name}" for slot in ("mu", "nu") for name in ("up", "down")),
        }
        assert all(np.prod(own) * parts == np.prod(whole) for key, (own, whole) in by_key.items() if key in cut)


def test_nothing_is_compiled_after_the_first_step_and_old_state_is_given_away(found: dict[str, Any]) -> None:
    """Also by a short batch, an evaluation, a save and a restore in place."""
    assert {name: one["late"] for name, one in found["trained"].items() if one["late"]} == {}
    assert all(one["is_given_away"] for one in found["trained"].values())


def test_a_step_is_over_once_every_device_has_done_with_its_batch(found: dict[str, Any]) -> None:
    """The host then writes the memory again, from which devices that work on the same samples may still read."""
    meshes = ["data=2,model=2"] if found["is_few"] else ["data=2,model=2", "data=1,model=8"]
    assert found["unfinished"] == dict.fromkeys(meshes, 0)


def test_a_mesh_restarts_with_the_same_bytes_and_another_one_goes_on_near_it(found: dict[str, Any]) -> None:
    same = found["resumed"]["data=4,model=2 to data=4,model=2"]
    whole = found["trained"]["data=4,model=2 separate"]
    assert (same["losses"], same["bytes"]) == (whole["losses"], whole["bytes"])
    for one in found["resumed"].values():
        np.testing.assert_allclose(one["losses"], whole["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("shardings", "said"),
    [
        ({"up": P(None, "modle"), "down": None}, r"Found the axis 'modle' .*'up'. Expected one of \['model'\]"),
        ({"up": P(None, "data"), "down": None}, r"Found the axis 'data' .* but for 'data'"),
        (
            {"up": P("model"), "down": None},
            r"dimension 0 of the parameter 'up' of shape \[6, 16\], cut over model",
        ),
        (lambda name, shape: P("model", None, None), "Expected at most 1 entries"),
        (lambda name, shape: "model", "Found 'model' as the sharding of the parameter"),
        ({"up": P()}, "in another structure than its parameters"),
    ],
    ids=["unknown axis", "axis of the samples", "does not divide", "too long", "no spec", "structure"],
)
def test_a_sharding_that_cannot_be_is_refused(shardings: Any, said: str) -> None:
    with pytest.raises(DenseStateError, match=said):
        specs_of(Declared(shardings), STATE, {"model": 4})


def test_an_optimizer_keeps_what_it_has_of_a_parameter_where_that_lies() -> None:
    """The longest name counts, and the shape. Without axes all is whole."""
    by_name = {"up": P(None, "model"), "inner": {"up": P("model")}}
    params = {"up": shape(6, 16), "inner": {"up": shape(8)}}
    slots = {"mu": params, "factors": {"up": shape(6)}, "count": shape()}
    state = {"params": params, "optimizer": slots, "state": {}}
    assert specs_of(Declared(by_name), state, {"model": 4}) == {
        "params/up": P(None, "model"),
        "params/inner/up": P("model"),
        "optimizer/mu/up": P(None, "model"),
        "optimizer/mu/inner/up": P("model"),
    }
    assert specs_of(Declared(by_name), state, {}) == specs_of(object(), state, {"model": 4}) == {}
    function = Declared(lambda name, shape: P("model") if name == "inner/up" else None)
    assert specs_of(function, state, {"model": 4}).keys() == {"params/inner/up", "optimizer/mu/inner/up"}


def test_another_number_of_devices_than_the_settings_say_is_refused(small_data: str) -> None:
    worker = DeviceWorker(job=small_job(folder=small_data), num_samples=8, options=DeviceOptions(per_host=4))
    with pytest.raises(GangError, match=r"Found 1 x cpu on a host and devices_per_host=4\. Expected 4 devices\. JAX"):
        worker.build()
    worker.options = DeviceOptions(mesh=(("data", 2), ("model", 2)))
    with pytest.raises(GangError, match=r"Found 1 x cpu on a host and mesh=data=2,model=2\. Expected 4 devices\. JAX"):
        worker.build()
