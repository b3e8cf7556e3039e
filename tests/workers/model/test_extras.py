"""A framework that is not installed is named with the extra that brings it, and so is what makes no module."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import pytest
from flax import nnx

from podembed.workers.model.equinox_model import EquinoxModel
from podembed.workers.model.extras import framework
from podembed.workers.model.flax_models import NnxModel


def test_a_missing_framework_is_named_with_its_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module no_such_framework\..*podembed\[haiku\]") as found:
        framework("no_such_framework.part", extra="haiku")
    assert found.value.name == "no_such_framework"


def test_a_framework_that_lacks_something_itself_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flax\.no_such_part'"):
        framework("flax.no_such_part", extra="flax")


class Made(nnx.Module):
    def __call__(self, batch: Any, context: Any) -> Any:
        return batch.dense[:, 0]


@pytest.mark.parametrize("adapter", [NnxModel, EquinoxModel])
def test_what_makes_no_module_is_refused_when_it_is_declared(adapter: Any) -> None:
    made: Any = Made() if adapter is NnxModel else eqx.nn.Identity()
    with pytest.raises(
        TypeError, match=rf"Found {adapter.__name__}\(a (Made|Identity)\).*that makes the module. Write"
    ):
        adapter(made)
    with pytest.raises(TypeError, match=r"does not take (rngs|key), spec: too many positional arguments"):
        adapter(lambda rngs: Made())
    adapter(lambda anything, of_the_job: Made())
