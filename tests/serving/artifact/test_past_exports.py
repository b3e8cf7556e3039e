"""Exports of past versions are read and have the scores that they had.

`artifacts/` has one of each format, as it was written then, with `expected.json`: columns, and the scores of the reader
that lay beside it.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from podembed.serving.artifact.exported_model import _READ_VERSIONS, load

ARTIFACTS = sorted((Path(__file__).parent / "artifacts").glob("*.zip"))


def test_there_is_one_of_each_format() -> None:
    assert [int(path.name.split("-")[1]) for path in ARTIFACTS] == sorted(_READ_VERSIONS)


@pytest.mark.parametrize("path", ARTIFACTS, ids=lambda path: path.stem)
def test_a_past_export_has_its_scores(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text(encoding="utf-8"))
    model = load(str(tmp_path), reads_tables=True)
    # Another kind of processor may have other last bits.
    np.testing.assert_allclose(model.predict(expected["columns"]), expected["scores"], rtol=1e-4, atol=1e-4)
