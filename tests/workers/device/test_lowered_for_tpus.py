"""Steps of jobs, lowered for TPUs on a CPU: what would reach the TPU's compiler. Whether it runs there is not seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.jobs.models.dcn_v2 import DCNv2
from podembed.jobs.models.dlrm import DLRM
from podembed.jobs.models.two_towers import TwoTowers
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS
from tests.small_job import small_job

NAMES = ("user", "c1", "c2", "c3")
BATCH_SIZE = 32
MODELS: dict[str, Callable[[], Any]] = {
    "dlrm": lambda: DLRM(bottom=(8,), top=(8,)),
    "dcn_v2": lambda: DCNv2(cross_layers=2, deep=(8,)),
    "two towers": lambda: TwoTowers(user=("user", "c1"), item=("c2", "c3")),
}
# Code for the processor, and calls back to the host, which would stop a TPU at every step.
OF_THE_HOST = re.compile(r"podembed_\w+|callback|@xla_ffi\w*|infeed|outfeed|stablehlo\.(?:send|recv)")


def declared(model: Any) -> JobConfig:
    features = {name: FeatureConfig(TableConfig(10, 8, name=name)) for name in NAMES}
    data = ParquetData("none-*.parquet", label="label", dense=("x", "y"), features={n: IdColumn(n) for n in NAMES})
    return JobConfig(name="lowered", features=features, model=model, data=data, batch_size=BATCH_SIZE)


def lowered(job: JobConfig) -> tuple[str, str]:
    """Forward pass and training step, for TPUs."""
    worker = DeviceWorker(job=job, num_samples=BATCH_SIZE)
    worker.build(is_rehearsal=True)
    forward, train = worker.programs.lower(LARGEST_LEVELS, platform="tpu")
    return forward.as_text(), train.as_text()


def check(forward: str, train: str) -> None:
    assert jax.devices()[0].platform == "cpu"
    for text in (forward, train):
        assert not OF_THE_HOST.findall(text)
        assert "stablehlo.dot_general" in text
    assert "stablehlo.all_reduce" not in forward
    assert train.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradient_reach_the_compiler(name: str) -> None:
    check(*lowered(declared(MODELS[name]())))


def test_those_of_the_small_job(small_data: str) -> None:
    check(*lowered(small_job(folder=small_data, audit=False)))
