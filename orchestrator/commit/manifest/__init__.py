"""The last-written index of a checkpoint, whose creation under `commit/` is the commit itself.

It names every file with its size and checksum, so that a reader trusts no listing. It carries the step, which is the
position in the data, so that model and input cannot part. `docs/checkpoint-format.md` describes the JSON. Read
`value.py` first; `problems.py` says what makes one consistent, and `json_form.py` writes and reads it.
"""

from podembed.orchestrator.commit.manifest.json_form import MAX_MANIFEST_BYTES, from_json, require_version, to_json
from podembed.orchestrator.commit.manifest.problems import problems
from podembed.orchestrator.commit.manifest.value import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    Manifest,
    Owners,
    commit_file,
    commit_name,
    delta_files,
    parse_commit_name,
)
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, ChunkFile, TableFiles

__all__ = [
    "FORMAT_VERSION",
    "MAX_MANIFEST_BYTES",
    "READABLE_VERSIONS",
    "ArrayFiles",
    "ChunkFile",
    "DenseFile",
    "Manifest",
    "Owners",
    "TableFiles",
    "commit_file",
    "commit_name",
    "delta_files",
    "from_json",
    "parse_commit_name",
    "problems",
    "require_version",
    "to_json",
]
