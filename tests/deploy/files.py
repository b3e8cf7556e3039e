"""What lies in `deploy/`, as values."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.test_imports import ROOT

KUBERAY = ROOT / "deploy" / "kuberay"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
FILES = sorted(KUBERAY.glob("*.yaml"))
JOBS = [path for path in FILES if path.name.startswith("rayjob-")]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def ray_job(path: Path) -> dict[str, Any]:
    """The spec of the only document, which is a RayJob."""
    (job,) = documents(path)
    assert job["kind"] == "RayJob"
    return job["spec"]


def words(path: Path) -> list[str]:
    """The entrypoint of a RayJob."""
    return shlex.split(ray_job(path)["entrypoint"])


def flag(path: Path, name: str) -> str:
    """The value of a flag of the entrypoint."""
    found = words(path)
    return found[found.index(name) + 1]


def groups(path: Path) -> list[dict[str, Any]]:
    return ray_job(path)["rayClusterSpec"]["workerGroupSpecs"]


def pods(path: Path) -> list[dict[str, Any]]:
    """The pod specs of the head and of the worker groups."""
    cluster = ray_job(path)["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
