"""Flags that are given more than once lose nothing, or are refused."""

from __future__ import annotations

import pytest
import tyro

from podembed.jobs.built_in import parse_settings
from podembed.jobs.cli.job_choice import job_reference
from podembed.jobs.cli.main import Resume, Train
from podembed.jobs.cli.repeated import gathered
from podembed.jobs.cli.settings import parse_resources
from podembed.jobs.cli.tools import Extract
from podembed.orchestrator.api.config import ConfigurationError
from tests.jobs.cli.test_main import run


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--set a=1 b=2", "--set a=1 b=2"),
        ("--set a=1 --set b=2", "--set a=1 b=2"),
        ("--set=a=1 --hosts 2 --set b=2 c=3", "--set a=1 b=2 c=3 --hosts 2"),
        ("--eval-data x --eval_data y", "--eval-data x y"),
        ("--in-process --in-process --keep 3", "--in-process --keep 3"),
        ("--no-such-flag a --no-such-flag b", "--no-such-flag a --no-such-flag b"),
    ],
)
def test_values_of_a_flag_that_comes_again_are_put_together(given: str, meant: str) -> None:
    assert gathered(given.split(), Train) == meant.split()


def test_the_run_stays_the_run_wherever_it_stands() -> None:
    for given in ("/runs/x --set a=1 --set b=2", "--set=a=1 --set=b=2 /runs/x", "--keep 2 /runs/x --set a=1 --set b=2"):
        resumed = tyro.cli(Resume, args=gathered(given.split(), Resume))
        assert (resumed.run, resumed.set) == ("/runs/x", ("a=1", "b=2"))
    extracted = tyro.cli(
        Extract, args=gathered(["run", "t", "1", "2", "--no-slots", "--commit", "c", "--no-slots"], Extract)
    )
    assert (extracted.ids, extracted.slots, extracted.commit) == (("1", "2"), False, "c")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --name a --name b", "Found --name twice"),
        ("resume /runs/x --hosts 2 --hosts=3", "Found --hosts twice"),
        ("export /runs/x --table a --out x --table b", "Found --table twice"),
    ],
)
def test_a_flag_of_one_value_is_refused_when_it_comes_again(arguments: str, said: str) -> None:
    code, _, err = run(*arguments.split())
    assert (code, said in err) == (2, True)


def test_a_name_that_is_given_twice_within_a_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Found --set seq=\.\.\. twice"):
        parse_settings(("seq=1", "x=1", "seq=1"))
    with pytest.raises(ConfigurationError, match=r"Found --resources CPU=\.\.\. twice"):
        parse_resources(("CPU=1", "GPU=1", "CPU=2"))
    with pytest.raises(ConfigurationError, match=r"Found --set data=\.\.\. beside --data"):
        job_reference("my:job", ("data=x", "epochs=2"), {"data": ["y"]})


@pytest.mark.parametrize("name", ["../x", "team//x", "x/", "/x", "a\nb"])
def test_a_name_of_a_run_is_judged_as_in_a_program(name: str) -> None:
    code, _, err = run("train", "--name", name)
    assert code == 87
    assert f"Found --name {name!r}. Expected the name of a folder below --storage" in err
