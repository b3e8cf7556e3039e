"""What pyproject.toml declares is used, and what constraints.txt pins is needed by it: a package that nothing imports
is only one more to trust.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.test_imports import MODULES, ROOT, packages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Distributions whose module has another name.
MODULE_OF = {
    "dm-haiku": "haiku",
    "faiss-cpu": "faiss",
    "google-crc32c": "google_crc32c",
    "ml-dtypes": "ml_dtypes",
    "mlflow-skinny": "mlflow",
    "protobuf": "google",
    "vl-convert-python": "vl_convert",
    "tensorboardx": "tensorboardX",
}
# Nothing of ours imports these: fsspec finds them by the protocol of a URL.
BY_URL = {"gcsfs", "s3fs"}
# Nor these: JAX writes exported programs with the one, and the test client of FastAPI sends requests with the other.
BY_OTHERS = {"flatbuffers", "httpx"}
# Programs and plugins that the Makefile, pytest and the README call, not modules.
TOOLS = {"pytest-xdist", "pyright", "ruff", "setuptools", "uv", "gcp-storage-emulator"}


def name_of(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def unused(requirements: Iterable[str], imported: set[str]) -> set[str]:
    names = {name_of(requirement) for requirement in requirements} - BY_URL - BY_OTHERS - TOOLS
    return {name for name in names if MODULE_OF.get(name, name.replace("-", "_")) not in imported}


def requires(name: str) -> list[str]:
    """What a package says that it needs. One that is not installed yet says nothing, so its needs look superfluous."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def test_every_dependency_is_imported() -> None:
    assert unused(PROJECT["dependencies"], set().union(*map(packages, MODULES))) == set()


def test_every_extra_is_imported_or_found_by_its_url() -> None:
    imported = set().union(*map(packages, MODULES))
    # Of these many files only the names count, and to parse them would take longer than all other rules.
    for path in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        imported |= set(re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    found = {name: unused(requirements, imported) for name, requirements in extras.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_every_pin_is_needed() -> None:
    """Reached from what the project and its extra `dev` declare, through the metadata of what is installed."""
    wanted = [(Requirement(text), "") for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])]
    needed: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement, extra = wanted.pop()
        environment = dict(default_environment()) | {"extra": extra}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        needed.add(name)
        for inner in ("", *requirement.extras):
            if (name, inner) not in seen:
                seen.add((name, inner))
                wanted += [(Requirement(text), inner) for text in requires(name)]
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {canonicalize_name(pin) for pin in pins} - needed == set()
