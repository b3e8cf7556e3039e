"""The program of docs/inference.md for Ray Serve, by requests to replicas on a real Ray."""

from __future__ import annotations

import socket
import sys
from typing import Any

import httpx
import numpy as np
import pytest

from podembed.serving.artifact.export_model import export_model
from podembed.serving.artifact.exported_model import load
from tests.long_tests import is_long
from tests.pages import blocks
from tests.serving.predict.served_data import sequence_job, write_data
from tests.training import fit_job

COLUMNS: dict[str, Any] = {
    "price": [1.5, None, 0.0],
    "image": [[1, 2, 3], None, [0.5, None, 0]],
    "visits": [3, 0, 7],
    "seen": ["2024-05-01", "2024-05-02T13:00", "1999-01-01"],
    "item": [7, 35, 0],
    "history": [[1, 2], [], [35, 3, 1, 4, 1, 5]],
}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("served")
    write_data(folder)
    job = sequence_job(str(folder))
    run = fit_job(job, folder)
    export_model(run.path, out=str(folder / "model"), job=job)
    return str(folder / "model")


@is_long
@pytest.mark.ray
def test_the_page_serves_an_export_with_ray_serve(export: str, ray_cluster: None) -> None:
    from ray import serve

    _, program = blocks("docs/inference.md")
    names: dict[str, Any] = {}
    exec(compile(program.code.replace('"/models/clicks"', repr(export)), "page", "exec"), names)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(names["app"])
        answers = [httpx.post(f"http://127.0.0.1:{port}/", json=COLUMNS, timeout=300.0) for _ in range(4)]
    finally:
        serve.shutdown()
    expected = load(export).predict(COLUMNS)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(np.array(answer.json()["score"], np.float32), expected)
    assert len(np.unique(expected)) == 3
    assert "served_model" not in sys.modules, "replicas load it"
