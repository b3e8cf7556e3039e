"""A user's project whose folders and files have the names of ours, with a job that needs them and only public names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_STEPS = 4
JOB = """
import dataclasses
import os

import embedding
import jax
import jax.numpy as jnp
import orchestrator
from workers.sizes import ROWS

import podembed
from podembed import FeatureConfig, JobConfig, ParquetData, TableConfig
from podembed.embedding import Adagrad


@dataclasses.dataclass(frozen=True)
class Model:
    folder: str

    def init(self, key, num_dense, widths):
        tell(self.folder)
        return {"out": jax.random.normal(key, (sum(widths.values()),))}

    def apply(self, params, dense, activations):
        return jnp.concatenate(list(activations.values()), axis=1) @ params["out"]


def tell(folder):
    with open(f"{folder}/told", "a") as file:
        file.write(f"{os.getpid()} {podembed.__file__}\\n")


def job(*, folder: str) -> JobConfig:
    tell(folder)
    table = TableConfig(vocabulary_size=ROWS, dim=4, combiner="sum", name=embedding.TABLE)
    return JobConfig(
        name=orchestrator.NAME,
        features={"user": FeatureConfig(table)},
        model=Model(folder),
        batch_size=32,
        data=ParquetData(f"{folder}/clicks.parquet", label="click"),
        optimizer=Adagrad(0.05),
    )
"""


def write_project(folder: Path) -> Path:
    """The folders `jobs` and `workers`, and the files `embedding.py` and `orchestrator.py`."""
    files = {
        "jobs/__init__.py": "",
        "jobs/mine.py": JOB,
        "workers/__init__.py": "",
        "workers/sizes.py": "ROWS = 100\n",
        "embedding.py": 'TABLE = "users"\n',
        "orchestrator.py": 'NAME = "mine"\n',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def add_to_checkout(checkout: Path) -> Path:
    """The same job in a checkout, beside the jobs that come with the program, as one that was copied from them."""
    text = JOB.replace("import embedding\n", "").replace("import orchestrator\n", "")
    text = text.replace("from workers.sizes import ROWS\n", "ROWS = 100\n")
    text = text.replace("embedding.TABLE", '"users"').replace("orchestrator.NAME", '"mine"')
    (checkout / "jobs" / "mine.py").write_text(text)
    return checkout


def write_clicks(folder: Path) -> str:
    """The job's data: as many rows as `NUM_STEPS` batches."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.arange(32 * NUM_STEPS)
    pq.write_table(pa.table({"click": rows % 2, "user": rows * 7 % 100}), folder / "clicks.parquet")
    return str(folder)


def told(data: str) -> dict[int, str]:
    """Each process that made the job or its model, and the copy of the program that it runs. Forgets them."""
    file = Path(data, "told")
    lines = [line.split(" ", 1) for line in file.read_text().splitlines()]
    file.unlink()
    return {int(process): place for process, place in lines}


def forget(data: str) -> None:
    """What processes told so far."""
    Path(data, "told").unlink(missing_ok=True)


def training(data: str, storage: Path | str, name: str) -> list[str]:
    """Arguments that train the job."""
    return ["train", "--job", "jobs.mine:job", "--set", f"folder={data}", "--storage", str(storage), "--name", name]
