"""Models of papers on click logs: DLRM (Naumov et al., 2019) and DCN-V2 (Wang et al., 2021).

They are the job `criteo` with one model each. Data is read, hashed and prepared as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podembed import JobConfig, ReadOrder
from podembed.jobs.criteo import criteo


def dlrm(
    *,
    data: Sequence[str],
    eval_data: Sequence[str] = (),
    columns: str = "podembed",
    vocabulary_size: int | None = None,
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
    order: ReadOrder = "shuffled",
) -> JobConfig:
    """DLRM on click logs. Arguments are those of `criteo`."""
    job = criteo(
        data=data,
        eval_data=eval_data,
        columns=columns,
        model="dlrm",
        vocabulary_size=vocabulary_size,
        batch_size=batch_size,
        epochs=epochs,
        dim=dim,
        learning_rate=learning_rate,
        dense_learning_rate=dense_learning_rate,
        seed=seed,
        staleness=staleness,
        wire_dtype=wire_dtype,
        order=order,
    )
    return replace(job, name="dlrm")


def dcn_v2(
    *,
    data: Sequence[str],
    eval_data: Sequence[str] = (),
    columns: str = "podembed",
    vocabulary_size: int | None = None,
    batch_size: int = 1024,
    epochs: int = 1,
    dim: int = 16,
    learning_rate: float = 0.05,
    dense_learning_rate: float = 1e-3,
    seed: int = 0,
    staleness: int = 0,
    wire_dtype: str = "float32",
    order: ReadOrder = "shuffled",
) -> JobConfig:
    """DCN-V2 on click logs. Arguments are those of `criteo`."""
    job = criteo(
        data=data,
        eval_data=eval_data,
        columns=columns,
        model="dcn_v2",
        vocabulary_size=vocabulary_size,
        batch_size=batch_size,
        epochs=epochs,
        dim=dim,
        learning_rate=learning_rate,
        dense_learning_rate=dense_learning_rate,
        seed=seed,
        staleness=staleness,
        wire_dtype=wire_dtype,
        order=order,
    )
    return replace(job, name="dcn_v2")
