"""docs/from-ray-train.md against the installed Ray: every name of Ray Train's configs is there, and what is said to be
here, is.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

import podembed

PAGE = (Path(__file__).parents[2] / "docs" / "from-ray-train.md").read_text(encoding="utf-8")


def ray_file(name: str) -> ast.Module:
    """Parsed, since `ray.train` cannot be imported without pandas, which nothing here needs."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse((Path(spec.origin).parent / name).read_text(encoding="utf-8"))


def fields(file: str, name: str) -> set[str]:
    (found,) = [node for node in ast.walk(ray_file(file)) if isinstance(node, ast.ClassDef) and node.name == name]
    declared = [node for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id for node in declared if isinstance(node.target, ast.Name) and node.target.id[0] != "_"}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def named(text: str) -> set[str]:
    """Words between backquotes in the first column of a section's table."""
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return set(re.findall(r"`(?:ray\.train\.)?([A-Za-z_]+)(?:\(\))?`", " ".join(first)))


@pytest.mark.parametrize("name", ["ScalingConfig", "RunConfig", "FailureConfig", "CheckpointConfig"])
def test_every_setting_of_ray_train_is_explained(name: str) -> None:
    # Those that Ray Train 2 only keeps in order to refuse them may be left out.
    refused = {"sync_config", "verbose", "progress_reporter", "log_to_file"}
    assert fields("train/v2/api/config.py", name) - refused - named(section(name)) == set()


def test_every_field_of_a_result_is_explained() -> None:
    expected = fields("train/v2/api/result.py", "Result") | fields("air/result.py", "Result")
    assert expected - named(section("Result")) == set()


def test_every_argument_of_the_trainer_and_function_of_a_loop_is_explained() -> None:
    tree = ray_file("train/v2/api/data_parallel_trainer.py")
    (init,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"][:1]
    arguments = {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)} - {"self"}
    assert arguments - named(section("Trainer")) == set()
    assert {"report", "get_checkpoint", "get_context"} <= named(section("Trainer"))


@pytest.mark.parametrize("name", ["ScalingConfig", "RunConfig", "FailureConfig", "CheckpointConfig", "Result"])
def test_what_is_said_to_be_here_is_here(name: str) -> None:
    ours = getattr(podembed, name)
    there = {field.name for field in dataclasses.fields(ours)}
    said = set(re.findall(rf"`{name}\.([a-z_]+)", PAGE))
    assert said
    assert said <= there
    last_rows = [line for line in section(name).splitlines() if line.startswith("| |")]
    alone = {word for line in last_rows for word in re.findall(r"`([a-z_]+)`", line.split("|")[2])}
    assert alone <= there
