"""Settings of a run that cannot work are refused where they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig, ScalingConfig, WarmStart
from podembed.orchestrator.run.reference import split_reference
from podembed.workers.declared_types import several


@pytest.mark.parametrize(
    "name", ["", ".", "../clicks", "team/../../clicks", "/clicks", "team//clicks", "clicks/", "a\nb"]
)
def test_a_run_lies_below_its_storage_path(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of a folder below storage_path"):
        RunConfig(name=name)


@pytest.mark.parametrize("name", ["clicks", "team/clicks", ".hidden", "a..b", None])
def test_names_of_folders_are_taken(name: str | None) -> None:
    assert RunConfig(name=name).name == name


def test_steps_may_be_epochs() -> None:
    config = RunConfig(
        checkpoint_config=CheckpointConfig(every_steps="0.25epoch", keep_every_steps="2epochs"),
        eval_every_steps="1epoch",
        max_steps="1.5 epoch",
    ).in_steps(40)
    checkpoints = config.checkpoint_config
    assert (checkpoints.every_steps, checkpoints.keep_every_steps) == (10, 80)
    assert (config.eval_every_steps, config.max_steps) == (40, 60)
    assert (config.last_step(100), config.last_step(50)) == (60, 50)
    assert RunConfig(eval_every_steps=7).in_steps(40) == RunConfig(eval_every_steps=7)


@pytest.mark.parametrize(
    "value", ["0epoch", "-1epoch", "epoch", "1/0epoch", "500", "", "one epoch", "infepoch", True, 0]
)
@pytest.mark.parametrize("name", ["every_steps", "keep_every_steps", "eval_every_steps", "max_steps"])
def test_what_is_neither_steps_nor_epochs_is_refused_when_it_is_declared(name: str, value: object) -> None:
    kind = CheckpointConfig if name in ("every_steps", "keep_every_steps") else RunConfig
    with pytest.raises(ConfigurationError, match=f"Found {name}={value!r}.*Expected"):
        kind(**{name: value})  # type: ignore[arg-type]


def test_epochs_that_are_no_whole_steps_are_refused_by_their_field() -> None:
    with pytest.raises(
        ConfigurationError, match=r"max_steps of 0\.33 epochs, which is 13\.2 steps of an epoch of 40.*max_steps 13"
    ):
        RunConfig(max_steps="0.33epoch").in_steps(40)
    with pytest.raises(ConfigurationError, match="keep_every_steps of 0.5 epochs"):
        RunConfig(checkpoint_config=CheckpointConfig(keep_every_steps="0.5epoch")).in_steps(41)


def test_places_are_text_or_paths_and_know_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert RunConfig(storage_path="~/runs").storage_path == "/home/ann/runs"
    assert RunConfig(storage_path=Path("~/runs")).storage_path == "/home/ann/runs"  # type: ignore[arg-type]
    assert RunConfig(storage_path="s3://bucket/~/runs").storage_path == "s3://bucket/~/runs"
    assert WarmStart(source="~/runs/a").source == "/home/ann/runs/a"
    assert split_reference(Path("~/runs/a")) == ("/home/ann/runs/a", None)
    with pytest.raises(ConfigurationError, match=r"storage_path=''.*as an unset variable gives it.*storage_path='\.'"):
        RunConfig(storage_path="")


def test_one_text_is_no_sequence_of_its_letters() -> None:
    with pytest.raises(ConfigurationError, match=r"Found rules='@dense=reinit' in WarmStart.*\('@dense=reinit',\)"):
        WarmStart(source="a", rules="@dense=reinit")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Found resources_per_host='CPU=4'\. Expected a dictionary"):
        ScalingConfig(resources_per_host="CPU=4")  # type: ignore[arg-type]
    assert several("user") == ("user",)
    assert several(10) == (10,)
    assert several(["a", "b"]) == ("a", "b")
    assert several(Path("a")) == (Path("a"),)
