"""Every kind of column, served: the scores of `podembed predict` to the last bit, alone, together, with a context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.artifact.exported_model import scores_among
from podembed.serving.predict.exported_program import padded_size
from podembed.serving.publish.publisher import publish
from podembed.serving.server.replica import Replica
from podembed.serving.server.served_model import run_size
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from tests.serving.predict import served_data
from tests.serving.predict.served_data import write_data
from tests.serving.server.served_runs import data_table, listed, part, predicted, scored, store_of
from tests.training import fit_job

JOBS = ("pooled_job", "sequence_job", "columns_job")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_a_served_score_is_that_of_predict(name: str, data: Path, tmp_path: Path) -> None:
    reference = JobReference(function=f"{served_data.__name__}:{name}", arguments={"folder": str(data)})
    job: JobConfig = getattr(served_data, name)(str(data))
    run = fit_job(reference, tmp_path, name=name).path
    version = publish(run, job=job).version
    replica = Replica(store_of(run), most_samples=512)
    assert replica.follow()
    assert not replica.follow()
    assert replica.current is not None
    assert replica.current.version == version
    assert replica.current.has_same_bits
    expected = predicted(run, job, data / "part-*.parquet", tmp_path / "p.parquet")
    columns = listed(data_table(data).drop_columns(["click"]))
    assert scored(replica, columns).tobytes() == expected.tobytes()
    assert len(np.unique(expected)) > 100, "they tell samples apart"
    # Several requests in one run of the program, as clients send them at once.
    model, most = replica.current.model, replica.current.most_samples
    cuts = [(0, 1), (1, 2), (2, 40), (40, 171), (171, 300)]
    cuts = [cut for cut in cuts if cut[1] <= most]
    assert len(cuts) >= 3
    together = model.score([model.read(part(columns, *cut)) for cut in cuts])
    for (start, stop), outputs in zip(cuts, together, strict=True):
        found = outputs["scores" if "scores" in outputs else "score"]
        assert found.tobytes() == expected[start:stop].tobytes()
    # A context of one sample beside the items of many.
    own = {*model.columns[::3]} - {"brands", "shares"}
    read = {name: columns[name] for name in model.columns}
    context = {name: values[:40] if name in own else values[5:6] for name, values in read.items()}
    repeated = {name: values if name in own else values * 40 for name, values in context.items()}
    assert scored(replica, context).tobytes() == scored(replica, repeated).tobytes()
    cut = scores_among(model.score_whole(model.read(context, with_context=True), 16))
    assert cut.tobytes() == scored(replica, context).tobytes()
    with pytest.raises(ModelError, match=r"Expected one length of at least 1. Pass a value a sample, or one value"):
        model.read({**columns, model.columns[0]: columns[model.columns[0]][:2]}, with_context=True)
    # In runs of their own sizes, of which the last ones are small.
    for count in (65, 190, 300):
        cut = scores_among(model.score_whole(model.read(part(columns, 0, count)), min(256, most)))
        assert cut.tobytes() == expected[:count].tobytes()


@pytest.mark.parametrize("most", [64, 512])
def test_runs_are_never_larger_than_one_of_all(most: int) -> None:
    for count in range(1, 1200):
        left, runs = count, []
        while left:
            runs.append(run_size(left, most))
            left -= runs[-1]
        assert min(runs) > 0
        assert max(map(padded_size, runs)) <= most
        assert sum(map(padded_size, runs)) <= max(most, padded_size(count))
    assert [run_size(count, 512) for count in (64, 190, 193, 384)] == [64, 128, 193, 256]
