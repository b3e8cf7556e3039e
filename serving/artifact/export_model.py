"""`export_model`: a commit as files that score without podembed.

They are a program, dense parameters, tables, and the schema of the input. docs/inference.md has each of their fields.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact import exported_columns, exported_extra, exported_model
from podembed.serving.artifact.export_files import MANIFEST, ExportFiles, export_folder
from podembed.serving.artifact.input_schema import input_schema
from podembed.serving.artifact.row_formats import ExportSource, write_npy, write_safetensors_header
from podembed.serving.committed_rows import BATCH_BYTES
from podembed.serving.predict import exported_program
from podembed.serving.predict.committed_model import CommittedModel, with_commit
from podembed.serving.predict.portable_forward import export_forward, output_shapes
from podembed.serving.predict.trained_forward import SCORED_PARTS, check_dense
from podembed.serving.predict.trained_kinds import trained_kinds
from podembed.version import version
from podembed.workers.declared_types import several
from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import place

PROGRAM = "forward.jax"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """An export that was written.

    Attributes:
      path: its folder or URL.
      commit: that it was made of.
      columns: that it needs.
      outputs: shape of each output for a sample, by name.
      size_bytes: size of all files.
    """

    path: str
    commit: str
    columns: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    size_bytes: int


def export_model(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    outputs: str | Sequence[str] = (),
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
) -> ExportedModel:
    """Writes a commit as a model that scores without podembed. Tables are copied a part at a time.

    Args:
      run: folder or URL of a run, for its newest commit, or `RUN@COMMIT`.
      out: a folder that is not there yet, or a URL.
      outputs: names of those that the model gives, by default all. It asks for no column that none depends on.
      commit: name of the commit, or its step.
      job: job of a run that was started with a job as a value.
      folder: where the job's module may lie if it is not installed.

    Raises:
      ConfigurationError: no run, no commit, no job, a model that cannot be exported, or nothing can be written there.
      ChunkDamaged: the commit is damaged; nothing was written.
    """

    def write(model: CommittedModel) -> ExportedModel:
        folder = place(out)
        with export_folder(folder) as files:
            return _write(model, files, folder, several(outputs))

    return with_commit(run, write, commit=commit, job=job, folder=folder)


def _write(model: CommittedModel, files: ExportFiles, out: str, wanted: Sequence[str]) -> ExportedModel:
    for spec in model.specs:
        if spec.keys.columns:
            raise ConfigurationError(
                f"Found table '{spec.name}' with keys that come and go. Expected tables whose ids are row numbers, "
                "since an exported model has no map of keys. Serve it (podembed serve), or score with podembed.predict."
            )
    dense = model.dense(SCORED_PARTS)
    document, outputs = describe_model(model, files, dense, wanted)
    files.write("dense.safetensors", lambda file: _write_safetensors(file, dense))
    for at, table in enumerate(model.tables):
        name = f"tables/{at}.npy"
        source = ExportSource(
            store=model.state.store, table=table, arrays=table.arrays[:1], information={}, batch_bytes=BATCH_BYTES
        )
        files.write(name, lambda file, source=source: write_npy(file, source))
        document["tables"][at]["file"] = name
    files.write_bytes("served_model.py", _served_source().encode())
    document["files"] = dict(files.written)
    document["sha256"] = exported_model.manifest_digest(document)
    # Last, so that what has a manifest is whole.
    files.write_bytes(MANIFEST, json.dumps(document, indent=1).encode())
    return ExportedModel(
        path=out,
        commit=model.state.manifest.name,
        columns=exported_columns.needed(document),
        outputs=outputs,
        size_bytes=sum(one["size_bytes"] for one in files.written.values()),
    )


def describe_model(
    model: CommittedModel, files: ExportFiles, dense: Mapping[str, np.ndarray], wanted: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The fields of a manifest, but for `files` and `sha256`, and the shape of each output for a sample. Program and
    vocabularies are written.

    Args:
      dense: leaves of parameters and state, by their keys.
      wanted: names of outputs; without any, all.

    Raises:
      ConfigurationError: a model that cannot be exported, or no package to write it with.
    """
    _require_flatbuffers()
    job, manifest = model.job, model.state.manifest
    try:
        check_dense(job, dense)
        exported = export_forward(job, step=manifest.step, wanted=wanted)
    except DenseStateError as error:
        raise ConfigurationError(f"{error} It is the model of {model.state.location}.") from error
    outputs = output_shapes(exported)
    files.write_bytes(PROGRAM, bytes(exported.serialize()))
    document = {
        "format": exported_model.FORMAT,
        "format_version": exported_model.FORMAT_VERSION,
        "job": job.name,
        "run_id": manifest.run_id,
        "commit": manifest.name,
        "step": manifest.step,
        "batch_size": job.batch_size,
        "program": PROGRAM,
        "platforms": list(exported.platforms),
        "outputs": {name: list(shape) for name, shape in outputs.items()},
        **input_schema(job, exported, files, kinds=trained_kinds(model)),
        "tables": [
            {"name": table.name, "num_rows": table.num_rows, "dim": config.dim}
            for table, config in zip(model.tables, job.tables, strict=True)
        ],
        "versions": {"podembed": version(), **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}},
    }
    return document, outputs


def _served_source() -> str:
    """The reader of exports: its four files in one, without the imports of one from another."""
    parts = []
    for module in (exported_columns, exported_extra, exported_program, exported_model):
        text = Path(module.__file__ or "").read_text(encoding="utf-8")
        pattern = r"^from (__future__|podembed[.\w]*) import (\([^)]*\)|.*)\n"
        parts.append(re.sub(pattern, "", text, flags=re.MULTILINE) if parts else text)
    return "\n\n".join(parts)


def _require_flatbuffers() -> None:
    """`jax.export` needs it, and JAX does not declare it."""
    try:
        import flatbuffers  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            "Found no package flatbuffers. Expected it, since JAX writes exported programs with it. Install "
            "podembed[export]."
        ) from error


def _write_safetensors(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """One tensor a leaf, named by its key."""
    write_safetensors_header(file, {key: (values.dtype, values.shape) for key, values in arrays.items()})
    for values in arrays.values():
        file.write(np.ascontiguousarray(values).tobytes())
