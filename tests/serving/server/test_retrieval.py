"""The best items of all: exact scores, candidates of an index, items of a file, filters, a new version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import RandomNormal
from podembed.jobs.models.dlrm import DLRM
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.recommend import recommend
from podembed.serving.publish.publisher import publish
from podembed.serving.server.app import App
from podembed.serving.server.item_columns import ItemColumns
from podembed.serving.server.replica import Replica
from podembed.serving.server.retrieval import Retrieval
from podembed.serving.server.vector_index import VectorIndex, best_of
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.job import JobConfig
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from tests.processes import wait_for
from tests.serving.server.served_runs import store_of
from tests.training import fit_job

NUM_ITEMS, NUM_USERS, NUM_ROWS = 700, 40, 256
ITEMS = [f"i{at}" for at in range(NUM_ITEMS)]


class Towers:
    """A matrix for each tower, and what becomes of their product."""

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, jax.Array]:
        return {name: jax.random.normal(key, (8, 8)) for name in ("user", "item")}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
        user, item = (batch.activations[name] @ params[name] for name in ("user", "item"))
        return {"scores": 3 * (user * item).sum(1) - 1, "u": user, "v": item, "dense": batch.dense}


def towers_job(folder: Path) -> JobConfig:
    def table(name: str, rows: int) -> TableConfig:
        return TableConfig(rows, 8, RandomNormal(stddev=1.0), name=name)

    return JobConfig(
        name="towers",
        features={
            "user": FeatureConfig(table("users", NUM_USERS)),
            "item": FeatureConfig(table("items", NUM_ITEMS + 1)),
        },
        model=Towers(),
        data=ParquetData(
            f"{folder}/data.parquet",
            label="click",
            dense=("hour",),
            features={"item": IdColumn("item", vocabulary=f"{folder}/items.txt", num_reserved=1)},
        ),
        dense_optimizer=optax.adam(0.1),
        batch_size=64,
    )


def clicks_job(folder: Path) -> JobConfig:
    return JobConfig(
        name="clicks",
        features={
            "user": FeatureConfig(TableConfig(capacity=64, dim=8, name="users")),
            "item": FeatureConfig(TableConfig(64, 8, name="items")),
            "brand": FeatureConfig(TableConfig(16, 8, name="brands")),
        },
        model=DLRM(bottom=(16,), top=(16,)),
        data=ParquetData(
            f"{folder}/data.parquet",
            label="click",
            dense=("hour",),
            features={"item": IdColumn("item", mode="hash"), "brand": IdColumn("brand", mode="hash")},
        ),
        batch_size=64,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("items")
    random = np.random.default_rng(0)
    (folder / "items.txt").write_text("\n".join(ITEMS) + "\n")
    at = random.integers(0, NUM_ITEMS, NUM_ROWS)
    columns: dict[str, Any] = {
        "click": random.integers(0, 2, NUM_ROWS),
        "hour": random.normal(size=NUM_ROWS),
        "user": random.integers(0, NUM_USERS, NUM_ROWS),
        "item": [ITEMS[one] for one in at],
        "brand": [f"b{one % 7}" for one in at],
    }
    pq.write_table(pa.table(columns), folder / "data.parquet")
    catalogue = {
        "item": ITEMS,
        "brand": [f"b{one % 7}" for one in range(NUM_ITEMS)],
        "year": [None if one % 10 == 0 else 2000 + one % 5 for one in range(NUM_ITEMS)],
        "genres": [["war", "crime"][: one % 3] for one in range(NUM_ITEMS)],
    }
    pq.write_table(pa.table(catalogue), folder / "items.parquet")
    return folder


@pytest.fixture(scope="module")
def towers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit_job(towers_job(folder), tmp_path_factory.mktemp("runs"), name="towers", max_steps=2).path


@pytest.fixture(scope="module")
def clicks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = fit_job(clicks_job(folder), tmp_path_factory.mktemp("runs"), name="clicks", max_steps=2).path
    publish(run, job=clicks_job(folder))
    return run


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[TestClient, App, Replica]]]:
    apps: list[App] = []

    def serve(run: str, **options: Any) -> tuple[TestClient, App, Replica]:
        replica = Replica(store_of(run))
        replica.follow()
        app = App(replica, name="m", retrieval=Retrieval(store_of(run), replica, **options))
        apps.append(app)
        return TestClient(app.asgi()), app, replica

    yield serve
    for app in apps:
        app.close()


def recommended(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/recommend", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_items_are_those_of_recommend_and_scores_those_of_score(
    folder: Path, towers: str, serve: Any, tmp_path: Path
) -> None:
    job = towers_job(folder)
    publish(towers, job=job)
    client, app, replica = serve(towers, feature="item")
    assert app.retrieval is not None
    assert replica.current is not None
    assert (app.retrieval.index.towers.user, app.retrieval.index.towers.item) == ("u", "v")
    data = str(folder / "data.parquet")
    recommend(towers, job=job, data=[data], out=str(tmp_path / "best.parquet"), top=12, feature="item")
    rows = pq.read_table(data).to_pylist()[:20]
    expected = pq.read_table(tmp_path / "best.parquet").to_pylist()
    for row, best in zip(rows, expected, strict=False):
        context = {"user": row["user"], "hour": [row["hour"]]}
        found = recommended(client, context=context, k=12)
        assert found["model_version"] == found["index_version"] == replica.current.name
        assert found["items"] == best["item"]
        assert np.allclose(found["score"], best["score"], rtol=1e-5)
        scored = client.post("/score", json={**context, "item": found["items"]}).json()
        assert scored["score"] == found["score"], "to the last bit"
        fewer = recommended(client, context=context, k=3, without=[*found["items"][:2], "nobody", 7])
        assert fewer["items"] == found["items"][2:5]
    series = client.get("/metrics").text
    assert 'podembed_serve_index_recall{version="own"} 1.0' in series
    assert "recommends among 700 items: flat index" in client.get("/").text
    described = client.get("/openapi.json").json()["paths"]["/recommend"]["post"]["requestBody"]
    example = described["content"]["application/json"]["example"]
    assert {*example["context"]} == {"user", "hour"}
    assert len(recommended(client, **example)["items"]) == 10


def test_items_that_are_left_out_do_not_take_the_room_of_others(
    folder: Path, towers: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(towers, job=towers_job(folder))
    client, app, _ = serve(towers, feature="item")
    context = {"user": [3], "hour": [0.5]}
    best = recommended(client, context=context, k=700)["items"]
    assert len(best) == 700
    monkeypatch.setattr(app, "_limits", replace(app._limits, samples=64))
    for some, expected in ((best[4:], best[:4]), (best[200:], best[:4]), (best[:500], best[500:504])):
        assert recommended(client, context=context, k=4, without=some)["items"] == expected


def test_an_older_index_names_candidates_until_that_of_the_new_version_is_there(
    folder: Path, towers: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = towers_job(folder)
    publish(towers, job=job)
    client, app, replica = serve(towers, feature="item")
    before, context = replica.current.name, {"user": [3], "hour": [0.5]}
    fit_job(job, Path(towers).parent, name="towers", max_steps=4)
    publish(towers, job=job)
    made, may_be_made = app.retrieval._made, threading.Event()
    monkeypatch.setattr(app.retrieval, "_made", lambda index: may_be_made.wait(20) and made(index))
    assert replica.follow()
    found = recommended(client, context=context, k=5)
    assert (found["model_version"], found["index_version"]) == (replica.current.name, before)
    scored = client.post("/score", json={**context, "item": found["items"]}).json()
    assert (scored["score"], scored["model_version"]) == (found["score"], found["model_version"])
    may_be_made.set()
    wait_for("the index of the new version", lambda: app.retrieval.index.version != before, seconds=20)
    found = recommended(client, context=context, k=5)
    assert found["model_version"] == found["index_version"] == replica.current.name != before
    assert 'podembed_serve_index_recall{version="next"}' in client.get("/metrics").text


def test_without_towers_all_items_of_a_file_are_scored_and_filtered(folder: Path, clicks: str, serve: Any) -> None:
    client, _, _ = serve(clicks, items=str(folder / "items.parquet"))
    context = {"user": 3, "hour": 0.25}
    catalogue = pq.read_table(folder / "items.parquet").to_pydict()
    whole = client.post("/score", json={**context, "item": ITEMS, "brand": catalogue["brand"]}).json()
    # Their other columns come from the file.
    assert client.post("/score", json={**context, "item": ITEMS}).json() == whole
    own = client.post("/score", json={**context, "item": ["new", "i3"], "brand": ["b1", "b9"]})
    assert own.status_code == 200
    described = client.get("/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]
    assert described["content"]["application/json"]["schema"]["required"] == ["hour", "user", "item"]
    unknown = client.post("/score", json={**context, "item": ["new", "i3"]})
    assert unknown.status_code == 400
    assert "Found item 'new', which is not in" in unknown.json()["error"]
    scores = np.array(whole["score"], np.float32)

    def best(is_allowed: Callable[[int], bool]) -> list[str]:
        return [ITEMS[at] for at in np.argsort(-scores, kind="stable") if is_allowed(int(at))][:6]

    found = recommended(client, context=context, k=6)
    assert (found["items"], found["index_version"]) == (best(lambda at: True), None)
    for wanted, is_allowed in [
        ({"brand": "b3"}, lambda at: at % 7 == 3),
        (
            {"year": [2001, 2003, "2004", True], "brand": ["b3", "b4"]},
            lambda at: at % 10 and at % 5 in (1, 3) and at % 7 in (3, 4),
        ),
        ({"year": None}, lambda at: at % 10 == 0),
        ({"genres": ["crime"]}, lambda at: at % 3 == 2),
        ({"item": ["i5", "i6", "i5000"]}, lambda at: at in (5, 6)),
        ({"brand": []}, lambda at: False),
    ]:
        assert recommended(client, context=context, k=6, filter=wanted)["items"] == best(is_allowed), wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 0}, "Expected a number of items from 1 to 1,000"),
        ({"k": True}, "Found k True"),
        ({"K": 3}, "Found 'K'"),
        ({"context": 7}, 'Found no object "context"'),
        ({"context": {"user": 3}}, "Found a context without ['hour']"),
        ({"context": {"user": [3, 4], "hour": 1}}, "Found 2 values of column 'user'"),
        ({"context": {"user": 3, "hour": 1, "item": "i1"}}, "Found column 'item' in the context"),
        ({"context": {"user": "x", "hour": 1}}, "Found text"),
        ({"without": "i1"}, "Found no list 'without'"),
        ({"filter": ["brand"]}, 'Found no object "filter"'),
        ({"filter": {"price": 3}}, "Expected a column of items, one of ['item', 'brand', 'year', 'genres']"),
        ({"filter": {"brand": {"above": 3}}}, "no value and no list of values"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    folder: Path, clicks: str, serve: Any, change: dict[str, Any], words: str
) -> None:
    client, _, _ = serve(clicks, items=str(folder / "items.parquet"))
    answer = client.post("/recommend", json={"context": {"user": 3, "hour": 1}} | change)
    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text


def test_too_many_items_without_towers_are_refused(clicks: str, serve: Any, tmp_path: Path) -> None:
    many = {"item": np.arange(10_001).astype(str), "brand": ["b1"] * 10_001, "is_new": np.arange(10_001) < 300}
    pq.write_table(pa.table(many), tmp_path / "many.parquet")
    client, _, _ = serve(clicks, items=str(tmp_path / "many.parquet"))
    answer = client.post("/recommend", json={"context": {"user": 3, "hour": 1}})
    assert answer.status_code == 400
    assert "Found 10,001 items to score, of a model without two towers" in answer.json()["error"]
    assert len(recommended(client, context={"user": 3, "hour": 1}, k=400, filter={"is_new": True})["items"]) == 300


def test_keys_that_have_a_row_are_items(folder: Path, clicks: str, serve: Any) -> None:
    client, _, _ = serve(clicks, feature="user")
    users = set(pq.read_table(folder / "data.parquet").column("user").to_pylist())
    found = recommended(client, context={"item": "i1", "brand": "b1", "hour": 0.5}, k=100)
    assert {*found["items"]} == users


def test_a_server_without_items_says_how_to_start_it(clicks: str) -> None:
    replica = Replica(store_of(clicks))
    replica.follow()
    app = App(replica, name="m")
    answer = TestClient(app.asgi()).post("/recommend", json={})
    assert (answer.status_code, "Start it with --recommend FEATURE" in answer.json()["error"]) == (400, True)
    app.close()


def test_files_and_features_that_name_no_items_are_refused(folder: Path, clicks: str, tmp_path: Path) -> None:
    replica = Replica(store_of(clicks))
    replica.follow()

    def start(**options: Any) -> None:
        Retrieval(store_of(clicks), replica, **options).close()

    def written(**columns: Any) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        pq.write_table(pa.table(columns), path)
        return str(path)

    for words, options in [
        ("Expected a feature of the model, one of ['user', 'item', 'brand']", {"feature": "itm"}),
        ("whose values this process cannot list", {"feature": "item"}),
        ("Found no way to read", {"items": str(folder / "items.txt")}),
        ("Found no file", {"items": str(folder / "none.parquet")}),
        ("Found column 'name' as the key", {"items": written(name=["a"], item=["b"])}),
        ("Expected each key once", {"items": written(item=["a", "a"])}),
        ("Expected each key once", {"items": written(item=["a", None])}),
        ("Expected the keys of items, integers or texts", {"items": written(item=[1.5])}),
        ("with its key in column 'item'", {"items": written(name=["a"]), "feature": "item"}),
        ("Found an item in", {"items": written(item=["a", "b"], brand=["x", ["y"][0]], hour=[1.0, float("inf")])}),
        ("Found 0 rows", {"items": written(item=pa.array([], pa.string()))}),
    ]:
        with pytest.raises((ConfigurationError, InputError)) as caught:
            start(**options)
        assert words in str(caught.value)


def test_keys_are_integers_or_their_digits() -> None:
    items = ItemColumns(pa.table({"key": [30, -1, 7]}), "key", "a table")
    assert items.places([7, "30", "-1", "x", 8, 7.0, True, None, 1 << 70, "9" * 50]).tolist() == [2, 0, 1, *[-1] * 7]
    assert items.places([]).tolist() == []
    texts = ItemColumns(pa.table({"key": pa.array(["b", "7"]).dictionary_encode()}), "key", "a table")
    assert texts.places([7, "b", "c", 1.5]).tolist() == [1, 0, -1, -1]


def test_lists_find_nearly_all_and_filters_keep_their_recall() -> None:
    random = np.random.default_rng(0)
    vectors, users = (random.normal(size=(count, 8)).astype(np.float32) for count in (20_000, 16))
    index = VectorIndex(vectors, users, most_flat=5_000)
    assert not index.is_flat
    assert 0.99 <= index.recall <= 1
    allowed = random.random(20_000) < 0.02
    (best,) = best_of(np.where(allowed[:, None], vectors, -100 * users[0]), users[:1])
    found = index.search(users[0], 100, allowed)
    assert allowed[found].all()
    assert len({*best.tolist()} & {*found.tolist()}) > 90
    flat = VectorIndex(vectors, users)
    assert {*flat.search(users[1], 100).tolist()} == {*best_of(vectors, users)[1].tolist()}
