"""Full rankings are those of numpy over the scores of all items: in a run, of a commit, and as recommendations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.id_policies import rows_of as ids_in
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import Evaluated, IdsAltered
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.serving.figures.of_groups import MRR, GroupedAUC, HitRateAt, NDCGAt
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.rank import rank_all
from podembed.serving.predict.recommend import recommend
from podembed.workers.control.stopping import EarlyStopping
from podembed.workers.data.columns import IdColumn, Negatives
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.sources import job_plan, open_evaluation, open_reader
from podembed.workers.job.job import JobConfig
from podembed.workers.job.ranking import RecallAt
from tests.long_tests import long_case
from tests.run_state import committed_state
from tests.training import fit_job

USERS, ITEMS, WIDTH, SEEN = 20, 53, 4, 6


@dataclass(frozen=True)
class Factors:
    """The product of a user's vector and that of an item, the item's bias, and the mean of a history."""

    is_ranked: bool

    def init(self, key: jax.Array, spec: Any) -> Any:
        return {"w": jax.random.normal(key, (WIDTH,))}

    def apply(self, params: Any, batch: Any, context: Any) -> Any:
        found = batch.activations
        history = batch.sequences["history"].sum() / jnp.maximum(batch.lengths["history"], 1)[:, None]
        user = (found["user"] + history) * params["w"] * batch.dense
        if self.is_ranked:
            return jnp.einsum("nd,ncd->nc", user, found["item"]) + found["bias"][..., 0]
        return (user * found["item"]).sum(axis=1) + found["bias"][:, 0]


def job_of(folder: Path, *, is_ranked: bool, evaluation: Any = "all", invalid_ids: Any = "error") -> JobConfig:
    room = 5 if is_ranked else 0
    drawn = Negatives(4, without_positives_of="user", evaluation=evaluation) if is_ranked else None
    recall = RecallAt(5, group_by="user") if evaluation == "all" else RecallAt(5)
    items = TableConfig(ITEMS, WIDTH, combiner="sum", name="items", invalid_ids=invalid_ids)
    biases = TableConfig(ITEMS, 1, combiner="sum", name="biases", invalid_ids=invalid_ids)
    return JobConfig(
        name="likes",
        features={
            "user": FeatureConfig(TableConfig(USERS, WIDTH, combiner="sum", name="users")),
            "item": FeatureConfig(items, max_sequence_length=room),
            "bias": FeatureConfig(biases, max_sequence_length=room),
            "history": FeatureConfig(items, max_sequence_length=4),
        },
        model=Factors(is_ranked),
        data=ParquetData(
            str(folder / "train.parquet"),
            eval_paths=str(folder / "eval.parquet"),
            label="like",
            dense=("mood",),
            features={"item": IdColumn("item", negatives=drawn), "bias": IdColumn("item", negatives=drawn)},
        ),
        batch_size=16,
        num_lanes=4,
        candidates="item" if is_ranked else None,
        metrics=(HitRateAt(5), NDCGAt(5), recall, MRR(), GroupedAUC()) if is_ranked else (),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users with six items each in training, of which some are no likes, and one in the evaluation."""
    folder, random = tmp_path_factory.mktemp("likes"), np.random.default_rng(0)
    items = [random.permutation(ITEMS)[: SEEN + 1] for _ in range(USERS)]
    for name, places in (("train", slice(0, SEEN)), ("eval", slice(SEEN, None))):
        rows = [(user, item, at) for user in range(USERS) for at, item in enumerate(items[user][places].tolist())]
        table = {
            "user": [user for user, _, _ in rows],
            "item": [item for _, item, _ in rows],
            "like": [int(name == "eval" or at % 3 > 0) for _, _, at in rows],
            "history": [
                items[user][:at].tolist() if name == "train" else items[user][:4].tolist() for user, _, at in rows
            ],
            "mood": random.normal(size=len(rows)).astype(np.float32),
        }
        pq.write_table(pa.table(table), folder / f"{name}.parquet", row_group_size=16)
    return folder


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def trained(
    job: JobConfig, folder: Path, reporter: SilentReporter | None = None, max_steps: int | None = None
) -> Result:
    return fit_job(job, folder, max_steps=max_steps, reporter=reporter)


@pytest.fixture(scope="module")
def ranked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(job_of(folder, is_ranked=True), tmp_path_factory.mktemp("ranked"))


def scores_of(result: Result, rows: list[dict[str, Any]]) -> np.ndarray:
    """float64 `[n, items]`, in numpy."""
    state = {key: values.astype(np.float64) for key, values in committed_state(result.path).items()}
    users, items, biases = (state[f"{name}/rows"] for name in ("users", "items", "biases"))
    histories = np.stack([items[row["history"]].sum(axis=0) / max(1, len(row["history"])) for row in rows])
    moods = np.array([row["mood"] for row in rows])[:, None]
    user = (users[[row["user"] for row in rows]] + histories) * state["dense/params/w"] * moods
    return user @ items.T + biases[:, 0]


def figures(scores: np.ndarray, rows: list[dict[str, Any]], allowed: Sequence[set[int]], k: int) -> dict[str, float]:
    places, aucs = [], []
    for row, own in zip(rows, scores, strict=True):
        others = sorted(allowed[row["user"]] - {row["item"]})
        above = int((own[others] > own[row["item"]]).sum())
        places.append(above + 1)
        aucs.append((1 - above / len(others), len(others) + 1))
    found = np.array(places)
    values, sizes = np.array(aucs).T
    hits = float((found <= k).mean())
    ndcg = float(np.where(found <= k, 1 / np.log2(found + 1), 0).mean())
    auc = float(np.average(values, weights=sizes))
    return {
        f"hit_rate@{k}": hits,
        f"ndcg@{k}": ndcg,
        f"recall@{k}": hits,
        "mrr": float((1 / found).mean()),
        "gauc": auc,
    }


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def unseen(folder: Path) -> list[set[int]]:
    """By user, the items that are in no liked training sample."""
    liked = [(row["user"], row["item"]) for row in rows_of(folder, "train") if row["like"]]
    return [{*range(ITEMS)} - {item for owner, item in liked if owner == user} for user in range(USERS)]


def test_a_run_its_commit_and_numpy_agree(folder: Path, ranked: Result) -> None:
    job, rows = job_of(folder, is_ranked=True), rows_of(folder, "eval")
    expected = figures(scores_of(ranked, rows), rows, unseen(folder), 5)
    found = ranked.evaluations[-1]
    assert found.values == pytest.approx(expected)
    assert found.num_samples == USERS
    assert astuple(evaluate(ranked.path, job=job).evaluation) == astuple(found)
    # In one block a sample, whatever room the job has, and also with drawn candidates in its own evaluations.
    for other in (job, job_of(folder, is_ranked=True, evaluation=9)):
        assert rank_all(ranked.path, job=other, at=(5,)).evaluation.values == pytest.approx(expected)


def test_any_job_can_be_ranked_without_what_a_sample_names(folder: Path, tmp_path: Path) -> None:
    result = trained(job := job_of(folder, is_ranked=False), tmp_path)
    rows, everything = rows_of(folder, "eval"), [{*range(ITEMS)}] * USERS
    scores = scores_of(result, rows)
    found = rank_all(result.path, job=job, feature="item", at=(5,)).evaluation
    alone = {name: value for name, value in figures(scores, rows, everything, 5).items() if name != "recall@5"}
    assert found.values == pytest.approx(alone)
    assert "Pass --users FEATURE" in found.missing["recall@5"]
    found = rank_all(result.path, job=job, feature="item", users="user", at=(5,)).evaluation
    assert (found.values, found.missing) == (pytest.approx(figures(scores, rows, everything, 5)), {})
    histories = [{*range(ITEMS)} - {*row["history"]} for row in rows]
    found = rank_all(result.path, job=job, feature="item", at=(5,), without=("history",), users="user")
    assert found.evaluation.values == pytest.approx(figures(scores, rows, histories, 5))
    both = [unseen(folder)[user] & histories[user] for user in range(USERS)]
    found = rank_all(result.path, job=job, feature="item", at=(5,), without=("history", "user"))
    assert found.evaluation.values == pytest.approx(figures(scores, rows, both, 5))
    pq.write_table(pa.table({"item": [*range(0, ITEMS, 3), 3]}), tmp_path / "some.parquet")
    some = [str(tmp_path / "some.parquet")]
    found = rank_all(result.path, job=job, feature="item", at=(5,), items=some, users="user")
    assert found.evaluation.values == pytest.approx(figures(scores, rows, [{*range(0, ITEMS, 3)}] * USERS, 5))


def test_users_with_several_held_out_items_have_the_figures_of_papers(
    folder: Path, ranked: Result, tmp_path: Path
) -> None:
    """Recall and NDCG as He et al., LightGCN, 2020: of a user's list of all items, averaged over users."""
    job, held_out, k = job_of(folder, is_ranked=True), rows_of(folder, "eval"), 5
    random, unseen_items = np.random.default_rng(1), unseen(folder)
    rows = []
    for user, row in enumerate(held_out):
        for item in random.permutation(sorted(unseen_items[user]))[: 1 + user % 4].tolist():
            rows.append(row | {"item": item})
    rows = [rows[at] for at in random.permutation(len(rows))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "several.parquet")
    scores, labels, places = [], [], []
    for user, row in enumerate(held_out):
        among = np.array(sorted(unseen_items[user]))
        scores.append(scores_of(ranked, [row])[0, among])
        labels.append(np.isin(among, [other["item"] for other in rows if other["user"] == user]).astype(np.int64))
        order = np.argsort(-scores[-1])
        places += (np.flatnonzero(labels[-1][order]) + 1).tolist()
    expected = brute_force(scores, labels, k) | {f"hit_rate@{k}": float((np.array(places) <= k).mean())}
    data = [str(tmp_path / "several.parquet")]
    found = rank_all(ranked.path, job=job, at=(k,), data=data).evaluation.values
    assert found == pytest.approx(expected)
    assert found[f"recall@{k}"] != pytest.approx(found[f"hit_rate@{k}"], abs=1e-3), "else this test says nothing"
    # The run's own evaluation has them where its metrics say so.
    metrics = (HitRateAt(k), *(kind(k, group_by="user") for kind in (NDCGAt, RecallAt)))
    metrics += (MRR(group_by="user"), GroupedAUC(group_by="user"))
    assert evaluate(ranked.path, job=replace(job, metrics=metrics), data=data).evaluation.values == found


@pytest.mark.parametrize("without", [None, (), ("history",)])
def test_the_best_items_of_each_row(folder: Path, ranked: Result, tmp_path: Path, without: Any) -> None:
    job, rows = job_of(folder, is_ranked=True), rows_of(folder, "eval")
    contexts = pa.table({name: [row[name] for row in rows] for name in ("user", "history", "mood")})
    pq.write_table(contexts, tmp_path / "contexts.parquet")
    out = str(tmp_path / "best.parquet")
    found = recommend(
        ranked.path, job=job, top=7, data=[str(tmp_path / "*.parquet")], out=out, columns=["user"], without=without
    )
    assert found.columns == ("user", "item", "score")
    scores = scores_of(ranked, rows)
    left_out = {None: [{*range(ITEMS)} - kept for kept in unseen(folder)], (): [set()] * USERS}
    for user, row in enumerate(pq.read_table(out).to_pylist()):
        scores[user, sorted(left_out.get(without, [{*row["history"]} for row in rows])[user])] = -np.inf
        assert row["user"] == user
        assert row["item"] == np.argsort(-scores[user])[:7].tolist()
        assert row["score"] == pytest.approx(scores[user, row["item"]], rel=1e-4, abs=1e-6)


OFFSET = 1 << 28


class Whole(Factors):
    """Scores that are integers, of which float32 does not hold all."""

    def apply(self, params: Any, batch: Any, context: Any) -> Any:
        return OFFSET + jnp.round(1e6 * super().apply(params, batch, context)).astype(jnp.int32)


def test_scores_that_are_integers_are_ranked_as_such(folder: Path, ranked: Result, tmp_path: Path) -> None:
    job = replace(job_of(folder, is_ranked=True), model=Whole(True))
    found = rank_all(ranked.path, job=job, at=(5,)).evaluation.values
    assert found["hit_rate@5"] == ranked.evaluations[-1].values["hit_rate@5"]
    assert found["mrr"] == pytest.approx(ranked.evaluations[-1].values["mrr"])
    recommend(ranked.path, job=job, top=7, data=str(folder / "eval.parquet"), out=tmp_path / "best.parquet", without=())
    scores = np.array(pq.read_table(tmp_path / "best.parquet")["score"].to_pylist())
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    expected = scores_of(ranked, rows_of(folder, "eval"))
    np.testing.assert_allclose(scores[:, 0] - OFFSET, 1e6 * expected.max(axis=1), atol=1000)
    assert len(np.unique(scores % 32)) > 16, "as float32 they would be multiples of 32"


def test_items_of_another_kind_than_in_training_are_refused(folder: Path, ranked: Result, tmp_path: Path) -> None:
    pq.write_table(pa.table({"item": pa.array([3, 4], pa.date32())}), tmp_path / "items.parquet")
    with pytest.raises(InputError, match=r"Found column 'item' with times in .*items.parquet. Expected integers, as"):
        rank_all(ranked.path, job=job_of(folder, is_ranked=True), at=(3,), items=str(tmp_path / "items.parquet"))


def brute_force(scores: list[np.ndarray], labels: list[np.ndarray], k: int) -> dict[str, float]:
    """Figures of groups without ties, by sorting each."""
    hits, gains, recalls, reciprocals, areas, sizes = [], [], [], [], [], []
    for values, wanted in zip(scores, labels, strict=True):
        assert len(set(values.tolist())) == len(values)
        ranked = wanted[np.argsort(-values)]
        places = np.flatnonzero(ranked) + 1
        if len(places):
            hits.append(float(places[0] <= k))
            best = (1 / np.log2(1 + np.arange(1, min(k, len(places)) + 1))).sum()
            gains.append((1 / np.log2(1 + places[places <= k])).sum() / best)
            recalls.append((places <= k).mean())
            reciprocals.append(1 / places[0])
        if 0 < len(places) < len(values):
            pairs = [value > other for value in values[wanted == 1] for other in values[wanted == 0]]
            areas.append(np.mean(pairs))
            sizes.append(len(values))
    return {
        f"hit_rate@{k}": float(np.mean(hits)),
        f"ndcg@{k}": float(np.mean(gains)),
        f"recall@{k}": float(np.mean(recalls)),
        "mrr": float(np.mean(reciprocals)),
        "gauc": float(np.average(areas, weights=sizes)),
    }


def test_drawn_candidates_and_groups_have_the_figures_of_brute_force(folder: Path, tmp_path: Path) -> None:
    """Of one positive a sample, and of several positives of a user; also of a run that was cut and went on."""
    (data := tmp_path / "data").mkdir()
    pq.write_table(pq.read_table(folder / "train.parquet"), data / "train.parquet", row_group_size=16)
    held_out = rows_of(folder, "eval")
    pq.write_table(pq.read_table(folder / "eval.parquet"), data / "eval.parquet")
    ranked = replace(job_of(data, is_ranked=True, evaluation=12), num_epochs=2)
    by_user = replace(
        job_of(folder, is_ranked=False),
        data=replace(job_of(folder, is_ranked=False).data, eval_paths=str(folder / "train.parquet")),
        metrics=tuple(replace(metric, group_by="user") for metric in ranked.metrics),  # pyright: ignore
        num_epochs=2,
    )
    for name, job in (("ranked", ranked), ("by user", by_user)):
        whole = trained(job, tmp_path / f"{name} whole")
        trained(job, tmp_path / f"{name} cut", max_steps=6)
        result = trained(job, tmp_path / f"{name} cut")
        rows = held_out if name == "ranked" else rows_of(folder, "train")
        scores = scores_of(result, rows)
        if name == "ranked":
            index = build_index(job.resolved_data.for_evaluation())
            reader, steps = open_evaluation(job, None, index, range(job.num_lanes))
            found: dict[int, list[int]] = {at: [] for at in range(USERS)}
            for batch in map(reader.read, range(steps)):
                for sample, ids in zip(batch.sample_ids.tolist(), batch.features["item"].to_lists(), strict=True):
                    found.get(sample, []).extend(ids)
            assert all(len(set(ids)) == 13 and ids[0] == rows[at]["item"] for at, ids in found.items())
            assert all({*ids[1:]} <= unseen(folder)[rows[at]["user"]] for at, ids in found.items())
            values = [scores[at, ids] for at, ids in found.items()]
            labels = [np.eye(13)[0]] * USERS
        else:
            own = [np.array([at for at, row in enumerate(rows) if row["user"] == user]) for user in range(USERS)]
            values = [np.array([scores[at, rows[at]["item"]] for at in of_user]) for of_user in own]
            labels = [np.array([rows[at]["like"] for at in of_user]) for of_user in own]
        expected = brute_force(values, labels, 5)
        for one in (whole, result):
            assert one.evaluations[-1].metrics == pytest.approx(expected)


@pytest.mark.parametrize("evaluation", ["all", 9])
def test_an_evaluation_without_a_positive_loses_its_figures_and_nothing_else(
    folder: Path, tmp_path: Path, evaluation: Any
) -> None:
    """The best commits and the end of training may not hang on them."""
    rows = [row | {"like": 0} for row in rows_of(folder, "eval")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "eval.parquet")
    pq.write_table(pq.read_table(folder / "train.parquet"), tmp_path / "train.parquet", row_group_size=16)
    job = job_of(tmp_path, is_ranked=True, evaluation=evaluation)
    result = trained(job, tmp_path / "runs", listener := Listener())
    assert result.step == 8
    found = result.evaluations[-1]
    assert list(found.values) == ([] if evaluation == "all" else ["log_loss", "loss"])
    assert {*found.missing} == {"hit_rate@5", "ndcg@5", "recall@5", "mrr", "gauc"}
    assert "Found no sample of label 1" in found.missing["recall@5"]
    (said,) = [event.sentence() for event in listener.events if isinstance(event, Evaluated)]
    assert ". No hit_rate@5, ndcg@5, mrr, gauc: Found no sample of label 1. Expected some to rank." in said or (
        ". No hit_rate@5, ndcg@5, recall@5, mrr, gauc: Found no sample of label 1" in said
    )
    assert astuple(evaluate(result.path, job=job).evaluation) == astuple(found)
    for stops in (None, EarlyStopping(patience=2, metric="ndcg@5")):
        config = RunConfig(
            storage_path=str(tmp_path / f"asked {bool(stops)}"),
            eval_every_steps=4,
            checkpoint_config=CheckpointConfig(keep_best=0 if stops else 1, metric="ndcg@5"),
        )
        asked = replace(job, early_stopping=stops)
        trainer = Trainer(asked, scaling_config=ScalingConfig(in_process=True), run_config=config)
        what = "when training ends" if stops else "which commits are best"
        with pytest.raises(ConfigurationError, match=f"no ndcg@5 .*step 4, .*{what}. Found no sample of label 1"):
            trainer.fit()


@pytest.mark.parametrize("policy", ["drop", *map(long_case, ["clip", "hash"])])
def test_a_positive_outside_of_the_table_is_ranked_as_its_row_and_counted(
    folder: Path, tmp_path: Path, policy: Any
) -> None:
    """Among all items and among those that are given, in a run and of its commit. One that is dropped is no item."""
    rows, outside = rows_of(folder, "eval"), {0: ITEMS + 8, 3: -5, 7: 2**40}
    for at, item in outside.items():
        rows[at]["item"] = item
    # A history comes again with each part of the candidates, and counts once.
    if policy != "drop":
        rows[5]["history"] = [ITEMS + 9, *rows[5]["history"][1:]]
    for name, given in (("all", 0), ("given", 9)):
        (data := tmp_path / name).mkdir()
        table = job_of(folder, is_ranked=True, invalid_ids=policy).features["item"].table
        found = [
            row
            | {"item": int(ids_in(np.array([row["item"]]), table)[0])}
            | {"history": ids_in(np.array(row["history"]), table).tolist()}
            for row in rows
        ]
        others = [sorted({*range(20, 28)} - {row["item"]}) for row in found]
        written = [
            row | {"item": [row["item"], *more]} if given else row for row, more in zip(rows, others, strict=True)
        ]
        pq.write_table(pa.Table.from_pylist(written), data / "eval.parquet")
        train = rows_of(folder, "train")
        pq.write_table(pa.Table.from_pylist(train), data / "train.parquet", row_group_size=16)
        job = job_of(data, is_ranked=True, invalid_ids=policy)
        if given:
            declared = Negatives(4, without_positives_of="user", given=given)
            columns = {key: replace(source, negatives=declared) for key, source in job.data.id_columns.items()}
            job = replace(job, data=replace(job.data, features=columns))
        result = trained(job, data, listener := Listener())
        kept = [row for row in found if row["item"] >= 0]
        assert len(kept) == (USERS - len(outside) if policy == "drop" else USERS)
        allowed = [{*range(20, 28)}] * USERS if given else unseen(folder)
        expected = figures(scores_of(result, kept), kept, allowed, 5)
        assert result.evaluations[-1].metrics == pytest.approx(expected)
        assert astuple(evaluate(result.path, job=job).evaluation) == astuple(result.evaluations[-1])
        if not given:
            assert rank_all(result.path, job=job, at=(5,)).evaluation.values == pytest.approx(expected)
        altered = [event for event in listener.events if isinstance(event, IdsAltered)]
        assert {event.table: event.count for event in altered} == {"items": 3 + (policy != "drop"), "biases": 3}


@dataclass(frozen=True)
class Chances(Factors):
    """The loss is what a model gets to know of its ids; the scores take it off, which only training feels."""

    def apply(self, params: Any, batch: Any, context: Any) -> Any:
        return super().apply(params, batch, context) - batch.log_q["item"]

    def loss(self, outputs: Any, batch: Any, context: Any) -> Any:
        return batch.log_q["item"].sum(axis=1) + 10 * batch.log_frequency["item"][:, 0]


def test_a_run_gives_its_model_the_chances_of_drawn_ids_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    """The loss of a step is that of its batch as it is read, also of a run that goes on."""
    declared = Negatives(4, by="popularity", without_positives_of="user", evaluation=9, log_q=True, log_frequency=True)
    job = job_of(folder, is_ranked=True)
    # A bias of the same ids need not ask for them.
    columns = {
        "item": IdColumn("item", negatives=declared),
        "bias": IdColumn("item", negatives=replace(declared, log_q=False, log_frequency=False)),
    }
    job = replace(job, model=Chances(is_ranked=True), data=replace(job.data, features=columns), num_epochs=2)
    trained(job, tmp_path, max_steps=5)
    result = trained(job, tmp_path)
    index = build_index(job.resolved_data)
    rooms = {name: shape[:-1] for name, shape in job.activation_shapes.items()}
    reader = open_reader(job.resolved_data, index, job_plan(job, index), range(job.num_lanes), rooms=rooms)
    assert sorted(result.losses) == [*range(5, result.step)]
    for step, loss in result.losses.items():
        batch = reader.read(step)
        values = batch.columns["item/log_q"].sum(axis=1) + 10 * batch.columns["item/log_frequency"][:, 0]
        assert loss == pytest.approx(np.average(values, weights=batch.weights), rel=1e-5)
    found, rows = result.evaluations[-1], rows_of(folder, "eval")
    assert astuple(evaluate(result.path, job=job).evaluation) == astuple(found)
    scores = scores_of(result, rows)
    ranked = rank_all(result.path, job=job, at=(5,), items=[str(folder / "eval.parquet")]).evaluation.values
    held_out = {row["item"] for row in rows}
    assert ranked == pytest.approx(figures(scores, rows, [held_out & kept for kept in unseen(folder)], 5))


def test_what_cannot_be_ranked_is_named(folder: Path, ranked: Result, tmp_path: Path) -> None:
    job = job_of(folder, is_ranked=True)
    plain = job_of(folder, is_ranked=False)
    with pytest.raises(ConfigurationError, match=r"no candidates in the job 'likes'.*Pass --rank-all FEATURE"):
        rank_all(ranked.path, job=plain)
    with pytest.raises(ConfigurationError, match=r"no feature 'user' to rank. Expected one of \['item', 'bias'\]"):
        rank_all(ranked.path, job=job, feature="user")
    with pytest.raises(ConfigurationError, match=r"feature 'history' with room for \[4\]"):
        rank_all(ranked.path, job=plain, feature="history")
    with pytest.raises(ConfigurationError, match=r"Found --users films"):
        rank_all(ranked.path, job=job, users="films")
    with pytest.raises(ConfigurationError, match=r"Found --without films"):
        rank_all(ranked.path, job=job, without=("films",))
    with pytest.raises(ConfigurationError, match=r"Found --top 0"):
        recommend(ranked.path, job=job, top=0, data=["x"], out=str(tmp_path / "x"))
    tied = replace(job, metrics=(HitRateAt(5),))
    assert {*rank_all(ranked.path, job=tied, at=(3,)).evaluation.values} >= {"hit_rate@3", "hit_rate@5", "mrr"}
