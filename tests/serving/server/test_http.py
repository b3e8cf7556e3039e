"""The server over HTTP: what clients send and get, errors, limits, tokens; and as a process with a client that we did
not write.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.http as triton
from starlette.testclient import TestClient

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_model import scores_among
from podembed.serving.publish.publisher import publish
from podembed.serving.server.app import App
from podembed.serving.server.endpoints import Limits
from podembed.serving.server.recorder import RequestLog
from podembed.serving.server.replay import replay
from podembed.serving.server.replica import Replica
from podembed.serving.server.scorer import Busy, Scorer, TooLate, _read, _Request
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from tests.serving.predict import served_data
from tests.serving.predict.served_data import pooled_job, write_data
from tests.serving.server.served_runs import data_table, listed, part, predicted, store_of
from tests.training import fit_job


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def job(data: Path) -> JobConfig:
    return pooled_job(str(data))


@pytest.fixture(scope="module")
def run(data: Path, job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    reference = JobReference(function=f"{served_data.__name__}:pooled_job", arguments={"folder": str(data)})
    path = fit_job(reference, tmp_path_factory.mktemp("runs"), name="pooled").path
    publish(path, job=job)
    return path


@pytest.fixture(scope="module")
def columns(data: Path) -> dict[str, list[Any]]:
    return listed(data_table(data).drop_columns(["click"]))


@pytest.fixture(scope="module")
def expected(run: str, job: JobConfig, data: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return predicted(run, job, data / "part-*.parquet", tmp_path_factory.mktemp("scores") / "p.parquet")


@pytest.fixture(scope="module")
def replica(run: str) -> Replica:
    replica = Replica(store_of(run))
    replica.follow()
    return replica


@pytest.fixture
def client(replica: Replica) -> Iterator[TestClient]:
    app = App(replica, name="clicks", limits=Limits(samples=400, body_bytes=1 << 18, list_length=20, timeout_s=5))
    with TestClient(app.asgi()) as client:
        yield client
    app.close()


def test_columns_get_their_scores_and_the_version(
    client: TestClient, replica: Replica, columns: dict[str, list[Any]], expected: np.ndarray
) -> None:
    answer = client.post("/score", json=columns)
    assert answer.status_code == 200, answer.text
    assert replica.current is not None
    assert answer.json()["model_version"] == answer.headers["model-version"] == replica.current.name
    assert np.array(answer.json()["score"], np.float32).tobytes() == expected.tobytes()
    # A single value stands for all samples.
    context = {name: values[0] if name == "visits" else values[:9] for name, values in columns.items()}
    repeated = {**part(columns, 0, 9), "visits": columns["visits"][:1] * 9}
    assert client.post("/score", json=context).json() == client.post("/score", json=repeated).json()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda c: {**c, "item": ["x"] * 5}, 400, "Found text"),
        (lambda c: {**c, "item": [99] * 5}, 400, "Expected 0 to 39"),
        (lambda c: {name: c[name] for name in c if name != "item"}, 400, "without"),
        (lambda c: {**c, "item": [1, 2]}, 400, "or one value for all"),
        (lambda c: {**c, "tags": [["a"] * 21] * 5}, 413, "Found a list of 21 values in column 'tags'"),
        (lambda c: {name: values * 100 for name, values in c.items()}, 413, "Found 500 samples. Expected at most 400"),
        (lambda c: {**c, "tags": [[["a"]]] * 5}, 400, "list in a list"),
        (lambda c: [c], 400, "Expected an object of columns"),
        (lambda c: {**c, "user": ["x" * (1 << 19)] * 5}, 413, "Found a body of more than"),
        (lambda c: {}, 400, "Found columns"),
        (lambda c: {**c, "price": [1e400] * 5}, 400, "Found"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    client: TestClient, columns: dict[str, list[Any]], change: Any, status: int, words: str
) -> None:
    answer = client.post("/score", content=json.dumps(change(part(columns, 0, 5))))
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert client.post("/score", json=part(columns, 0, 5)).status_code == 200, "it goes on"


def test_malformed_bodies_are_refused(client: TestClient, columns: dict[str, list[Any]]) -> None:
    random = np.random.default_rng(0)
    whole = json.dumps(part(columns, 0, 3)).encode()
    infer = "/v2/models/clicks/infer"
    tensors = json.dumps({"inputs": [{"name": "item", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}).encode()
    for path, body in (("/score", whole), (infer, tensors)):
        for _ in range(300):
            changed = bytearray(body)
            for at in random.integers(0, len(body), random.integers(1, 5)):
                changed[at] = random.integers(0, 256)
            cut = bytes(changed[: random.integers(0, len(body) + 1)])
            assert client.post(path, content=cut).status_code in (200, 400, 413), cut
    good = {"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}
    for document in (
        {"inputs": [good], "parameters": [1]},
        {"inputs": [good], "outputs": [{}]},
        {"inputs": [good], "outputs": "ab"},
        {"inputs": [good], "outputs": [{"name": "score", "parameters": [1]}]},
        {"inputs": [good | {"parameters": "x"}]},
        {"inputs": [good | {"data": [1 << 63]}]},
        {"inputs": [good | {"datatype": "UINT8", "data": [-1]}]},
        {"inputs": [good | {"shape": [1.5]}]},
        {"inputs": [good | {"shape": {"a": 1}}]},
        {"inputs": [good | {"datatype": "X"}]},
        {"inputs": [good | {"name": ["item"]}]},
    ):
        assert client.post(infer, json=document).status_code == 400, document
    for text in ("\u00b2", "9" * 5000):
        assert client.post("/score", params={"min_version": text}, content=whole).status_code == 400
    missing = client.post("/v2/models/other/infer", json={})
    assert (missing.status_code, "Expected POST /score" in missing.json()["error"]) == (404, True)
    refused = client.get("/score")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    for header in ("-1", "x", "99999999", "0"):
        assert (
            client.post(infer, content=tensors, headers={"inference-header-content-length": header}).status_code == 400
        )


def test_health_pages_and_series(client: TestClient, columns: dict[str, list[Any]]) -> None:
    client.post("/score", json=part(columns, 0, 5))
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").status_code == 200
    assert client.get("/v2/models/clicks/ready").status_code == 200
    found = client.get("/v2/models/clicks").json()
    assert found["parameters"] == {"bits": "same"}
    assert found["outputs"][0]["name"] == "score"
    kinds = {one["name"]: (one["datatype"], len(one["shape"])) for one in found["inputs"]}
    assert kinds["item"] == ("INT64", 1)
    assert kinds["user"] == ("BYTES", 1)
    assert kinds["price"] == ("FP32", 1)
    assert kinds["image"] == ("FP32", 2)
    assert client.get(f"/v2/models/clicks/versions/{found['versions'][0]}").status_code == 200
    assert client.get("/v2/models/clicks/versions/v1").status_code == 404
    assert client.post("/score", content=client.get("/example").content).status_code == 200
    page = client.get("/").text
    assert found["versions"][0] in page
    assert "curl " in page
    described = client.get("/openapi.json").json()
    example = described["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert set(example) == set(kinds)
    series = client.get("/metrics").text
    assert 'podembed_serve_requests_total{path="/score",status="200"}' in series
    assert "podembed_serve_step " in series


def test_a_token_is_asked_for_but_not_by_probes(replica: Replica, columns: dict[str, list[Any]]) -> None:
    app = App(replica, name="clicks", token="s3cret")
    with TestClient(app.asgi()) as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.post("/score", json=part(columns, 0, 1)).status_code == 401
        right = {"Authorization": "Bearer s3cret"}
        assert client.post("/score", json=part(columns, 0, 1), headers=right).status_code == 200
        wrong = {"Authorization": "Bearer s3cre"}
        assert client.post("/score", json=part(columns, 0, 1), headers=wrong).status_code == 401
        app.is_draining = True
        assert client.get("/v2/health/ready").status_code == 503
        assert client.post("/score", json=part(columns, 0, 1), headers=right).status_code == 200
    app.close()


def test_a_version_can_be_waited_for(client: TestClient, replica: Replica, columns: dict[str, list[Any]]) -> None:
    assert replica.current is not None
    own = part(columns, 0, 1)
    step = replica.current.manifest.step
    for known in (str(step), replica.current.name):
        assert client.post("/score", params={"min_version": known}, json=own).status_code == 200
    began_s = time.monotonic()
    late = client.post("/score", params={"timeout": "0.2"}, headers={"If-Version-At-Least": str(step + 1)}, json=own)
    assert late.status_code == 409
    assert time.monotonic() - began_s >= 0.2
    assert client.post("/score", params={"min_version": "new"}, json=own).status_code == 400
    assert client.post("/score", params={"timeout": "-1"}, json=own).status_code == 400


def test_a_full_queue_refuses_and_late_requests_are_not_scored(replica: Replica, columns: dict[str, list[Any]]) -> None:
    scorer = Scorer(replica, most_waiting=6)
    with replica._changed:
        first = scorer.submit(part(columns, 0, 3), num_samples=3, timeout_s=9)
        while scorer.num_waiting:
            time.sleep(0.001)
        late = scorer.submit(part(columns, 0, 3), num_samples=3, timeout_s=0)
        gone = scorer.submit(part(columns, 0, 3), num_samples=3, timeout_s=9)
        assert gone.cancel()
        assert scorer.num_waiting == 6
        assert scorer.oldest_s >= 0
        with pytest.raises(Busy):
            scorer.submit(part(columns, 0, 1), num_samples=1, timeout_s=9)
        time.sleep(0.01)
    assert len(first.result(9).outputs["score"]) == 3
    with pytest.raises(TooLate):
        late.result(9)
    scorer.close()
    with pytest.raises(Busy):
        scorer.submit(part(columns, 0, 1), num_samples=1, timeout_s=9)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_recorded_requests_are_scored_again(
    share: float, run: str, job: JobConfig, replica: Replica, columns: dict[str, list[Any]], tmp_path: Path
) -> None:
    assert replica.current is not None
    recorder = RequestLog(str(tmp_path / "log"), share=share)
    recorder._random.seed(0)
    app = App(replica, name="clicks", recorder=recorder)
    read = {name: columns[name] for name in replica.current.model.columns}
    with TestClient(app.asgi()) as client:
        for start in range(0, 40, 4):
            assert client.post("/score", json=part(read, start, start + 3)).status_code == 200
        context = {name: values[0] if name == "visits" else values[7:20] for name, values in read.items()}
        client.post("/score", json=context)
        client.post("/score", json={"item": 7})
        if share == 1:
            # A value that no column of a file holds: this request alone is not recorded.
            odd = {**part(read, 0, 1), "wild": [(1 << 64) - 1]}
            assert client.post("/score", json=odd).status_code == 200
            late = {**part(read, 0, 2), "seen": ["2024-01", None]}
            assert client.post("/score", json=late).status_code in (200, 400)
    app.close()
    assert recorder.num_dropped == int(share == 1)
    found = replay(str(tmp_path / "log"), run)
    assert found.num_other == 0
    assert found.num_skipped == {}
    assert found.num_equal == 10 * 3 + 13 if share == 1 else 0 < found.num_equal < 43
    if share < 1:
        return
    # It is data of the job.
    (path,) = (tmp_path / "log").glob("*.parquet")
    scores = predicted(run, job, path, tmp_path / "p.parquet")
    recorded = pq.read_table(path)
    assert scores.tobytes() == np.array(recorded.column("_score").to_pylist(), np.float32).tobytes()
    changed = recorded.set_column(recorded.column_names.index("_score"), "_score", pa.array(scores + 1))
    pq.write_table(changed, path)
    assert replay(str(tmp_path / "log"), run).num_other == 43
    with pytest.raises(ConfigurationError, match=r"Found no column _request in .*p\.parquet"):
        replay(str(tmp_path / "p.parquet*"), run)
    with pytest.raises(ConfigurationError, match="Found no recorded files"):
        replay(str(tmp_path / "none"), run)


@pytest.mark.parametrize("odd", ["", None, "7", True, 7.0, 1 << 60, "x", [7], -1])
@pytest.mark.parametrize("column", ["user", "item", "visits"])
def test_what_a_value_means_does_not_depend_on_others_beside_it(
    replica: Replica, columns: dict[str, list[Any]], column: str, odd: Any
) -> None:
    """Requests that wait together are read together, unless that would make others of them."""
    version = replica.current
    assert version is not None

    def of(value: Any) -> _Request:
        asked = {name: columns[name][:1] for name in version.model.columns} | {column: [value]}
        return _Request(asked, 1, 0.0, 1e9, Future())

    def scores(requests: list[_Request]) -> list[bytes]:
        groups = _read(version, requests)
        found = {}
        for group in groups:
            rows = scores_among(version.model.score([group.samples])[0])
            found |= {id(one): rows[at].tobytes() for at, one in enumerate(group.requests)}
        return [found.get(id(one), b"refused") for one in requests]

    plain, other = columns[column][0], odd
    assert scores([of(plain), of(other), of(plain)]) == [
        *scores([of(plain)]),
        *scores([of(other)]),
        *scores([of(plain)]),
    ]
    # An empty text is a missing value, wherever it stands.
    if (column, odd) == ("item", ""):
        both = {name: columns[name][:1] * 2 for name in version.model.columns} | {column: [plain, ""]}
        null = both | {column: [plain, None]}
        read = version.model.read
        assert version.model.score([read(both)])[0]["score"].tobytes() == (
            version.model.score([read(null)])[0]["score"].tobytes()
        )


def test_a_slow_client_is_given_up(replica: Replica) -> None:
    app = App(replica, name="clicks", limits=Limits(timeout_s=0.2))

    async def body() -> Any:
        yield b'{"item": '
        await asyncio.sleep(5)
        yield b"[1]}"

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.post("/score", content=body())).status_code

    assert asyncio.run(ask()) == 408
    app.close()


def test_a_process_answers_a_client_of_others_and_ends_when_told(
    run: str, columns: dict[str, list[Any]], expected: np.ndarray
) -> None:
    """Text, lists with row splits, vectors and times as the Open Inference Protocol has them, in JSON and in bytes."""
    command = [
        sys.executable,
        "-m",
        "podembed",
        "serve",
        run,
        "--port",
        "0",
        "--name",
        "clicks",
        "--drain-seconds",
        "60",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        # Tensors have no missing values. Those of other columns are the same as empty texts, empty lists and zeros.
        whole = zip(*(columns[name] for name in ("price", "history", "tags", "brands")), strict=True)
        kept = [at for at, values in enumerate(whole) if None not in values]
        given = {name: [values[at] for at in kept] for name, values in columns.items()}
        given["image"] = [[value or 0 for value in image or (0, 0, 0)] for image in given["image"]]
        try:
            _ask_process(server, given, expected[kept])
        finally:
            server.kill()


def _ask_process(server: subprocess.Popen[str], columns: dict[str, list[Any]], expected: np.ndarray) -> None:
    assert server.stdout is not None
    lines = [server.stdout.readline(), server.stdout.readline()]
    assert "same bits as published" in lines[0]
    address = lines[1].split()[2].removeprefix("http://")
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("clicks")
    inputs = client.get_model_metadata("clicks")["inputs"]
    for is_binary in (True, False):
        tensors = [one for tensor in inputs for one in _tensors(tensor, columns[tensor["name"]], is_binary)]
        wanted = [triton.InferRequestedOutput("score", binary_data=is_binary)]
        answer = client.infer("clicks", tensors, outputs=wanted, request_id="7")
        assert answer.as_numpy("score").tobytes() == expected.tobytes()
        assert answer.get_response()["id"] == "7"
        assert answer.get_response()["model_version"].startswith("v0")
    with pytest.raises(triton.InferenceServerException, match="Found columns"):
        client.infer("clicks", tensors[:1])
    # Answered while it drains.
    server.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + 30
    while client.is_server_ready() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert client.infer("clicks", tensors, outputs=wanted).as_numpy("score").tobytes() == expected.tobytes()
    client.close()
    # A second signal does not wait for the rest of that minute.
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0


def _tensors(tensor: dict[str, Any], values: list[Any], is_binary: bool) -> list[Any]:
    """One column as tensors. What is missing cannot be told in bytes, so those are empty texts or empty lists."""
    name, datatype = tensor["name"], tensor["datatype"]
    dtype: Any = {"INT64": np.int64, "FP32": np.float32, "BYTES": object}[datatype]

    def one(name: str, array: np.ndarray, datatype: str) -> Any:
        made = triton.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array, binary_data=is_binary)
        return made

    if datatype == "BYTES" and not any(isinstance(value, list) for value in values):
        values = [value or "" for value in values]
    if len(tensor["shape"]) == 1 and any(isinstance(value, list) for value in values):
        lists = [value or [] for value in values]
        flat = [value or "" if datatype == "BYTES" else value for own in lists for value in own]
        splits = np.cumsum([0, *map(len, lists)])
        return [one(name, np.array(flat, dtype), datatype), one(f"{name}.row_splits", splits, "INT64")]
    return [one(name, np.array(values, dtype), datatype)]
