"""A framework that is not installed is named with the extra that brings it."""

from __future__ import annotations

import pytest

from podembed.workers.model.extras import framework


def test_a_missing_framework_is_named_with_its_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module no_such_framework\..*podembed\[haiku\]") as found:
        framework("no_such_framework.part", extra="haiku")
    assert found.value.name == "no_such_framework"


def test_a_framework_that_lacks_something_itself_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flax\.no_such_part'"):
        framework("flax.no_such_part", extra="flax")
