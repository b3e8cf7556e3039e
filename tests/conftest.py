"""What tests share: one Ray cluster for the whole session, started only if a test asks for it."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest
from hypothesis import HealthCheck, settings

from podembed.workers.device.compile_cache import use_compile_cache
from tests.compiled import FOLDER, compiled_in, variables
from tests.long_tests import VARIABLE, examples, skip_long
from tests.object_store import BUCKET, object_store
from tests.scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from tests.small_job import write_small_data

if TYPE_CHECKING:
    from podembed.orchestrator.api.result import Result
    from podembed.orchestrator.stepwise.strategy import PodStrategy
    from tests.processes import Listeners

# How long an example takes says nothing on a machine that others use, too. `make test` has the same examples each time,
# so that what it finds is due to what was changed; long tests draw others each time.
settings.register_profile(
    "tests",
    deadline=None,
    max_examples=examples(100),
    derandomize=VARIABLE not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# libtpu is there for tests that compile with it. Where nobody says so, it looks for a TPU, and complains.
if "JAX_PLATFORMS" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
# Before JAX makes its devices: several processes share the machine.
os.environ.setdefault("PJRT_NPROC", "1")
# Of clusters that tests start, as of those of the program: no idle workers, which cost a second each.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Tests wait for the compiler more than for anything else, and it takes a third less so. Long tests have programs as
# users have them.
if VARIABLE not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # The imports above have loaded JAX, which reads the variable once. Without this, only processes that tests start
    # and those of pytest-xdist had such programs, and this process had numbers with other last bits than they.
    jax.config.update("jax_disable_most_optimizations", True)
# Processes that tests start read the variables, but for this one it is too late. It writes as they do.
os.environ.update(variables(compiled_in(FOLDER)))
for name, value in compiled_in(FOLDER).items():
    jax.config.update(name, value)
use_compile_cache(str(FOLDER))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules of tests, and what they import, are a few million objects that stay. To look for garbage among them again
    and again takes a third of the time of collecting, and some of that of every test.
    """
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_long(items)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this machine with room for three hosts."""
    from podembed.orchestrator.cluster.connection import connected

    with connected(num_hosts=3):
        yield


@pytest.fixture(scope="session")
def far_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module in a folder that this process put on its search path, as scripts do."""
    folder = tmp_path_factory.mktemp("far_away")
    (folder / "far_away_function.py").write_text("def answer():\n    return 42\n")
    sys.path.append(str(folder))
    yield "far_away_function"
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def pod_strategy(ray_cluster: None, far_away: str) -> Iterator[PodStrategy]:
    """Two hosts for tests of the step-by-step mode; each test closes its embedding."""
    from podembed.orchestrator.stepwise.strategy import PodStrategy

    with PodStrategy(num_hosts=2, step_timeout_s=600.0, run_timeout_s=600.0) as strategy:
        yield strategy


@pytest.fixture(scope="session")
def listeners() -> Listeners:
    """Sees where the processes of `two_hosts` listen."""
    from tests.processes import Listeners

    return Listeners()


@pytest.fixture(scope="session")
def two_hosts(
    ray_cluster: None, small_data: str, listeners: Listeners, tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """A run of the small job that nothing disturbs."""
    from tests.orchestrator.driver.test_equality import train_small

    return train_small(small_data, tmp_path_factory.mktemp("undisturbed"), "two", num_hosts=2, reporter=listeners)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the small job's data."""
    folder: Path = tmp_path_factory.mktemp("small-data")
    write_small_data(folder)
    return str(folder)


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[Mapping[str, str]]:
    """The variables that lead to an S3 service of this session."""
    with object_store() as environment:
        yield environment


@pytest.fixture
def s3_url(s3_environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder of an object store that this process reaches."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"
