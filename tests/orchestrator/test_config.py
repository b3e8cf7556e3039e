"""Settings of a run that cannot work are refused where they are made."""

from __future__ import annotations

import pytest

from orchestrator.config import ConfigurationError, RunConfig


@pytest.mark.parametrize("name", ["", ".", "../clicks", "team/../../clicks", "/clicks", "team//clicks", "clicks/"])
def test_a_run_lies_below_its_storage_path(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a folder below storage_path"):
        RunConfig(name=name)


@pytest.mark.parametrize("name", ["clicks", "team/clicks", ".hidden", "a..b", None])
def test_names_of_folders_are_taken(name: str | None) -> None:
    assert RunConfig(name=name).name == name
