"""What is built once for all of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installation.builds import build_wheel, copy_checkout, environment, install
from tests.installation.project import forget, write_clicks


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_checkout(tmp_path_factory.mktemp("built") / "checkout", with_links=True))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has everything but podembed."""
    return environment(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment into which the wheel is installed."""
    python = environment(tmp_path_factory.mktemp("installed") / "env")
    install(python, wheel)
    return python


@pytest.fixture(scope="session")
def written_clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture
def clicks(written_clicks: str) -> str:
    """The data. Nothing is told there yet: tests before may have let processes tell, and never asked."""
    forget(written_clicks)
    return written_clicks
