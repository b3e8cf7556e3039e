"""The commands that score data with a commit of a run: their flags and their words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from podembed.jobs.search_path import current_folder


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Judge a commit on data: all figures of the job. The run may be in training, and nothing is written."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    data: tuple[str, ...] = ()
    """Files or globs with the columns of the job; by default its evaluation data. Quote globs."""
    rank_all: str | None = None
    """Rank the item that each sample has of this feature among all items of its table. It prints hit rates of
    samples, and over users recall and NDCG at --at, MRR and grouped AUC, in the place of other figures."""
    at: tuple[int, ...] = (10,)
    """With --rank-all: how many places count."""
    items: tuple[str, ...] = ()
    """With --rank-all: files with the column of the items; these alone are ranked."""
    without: tuple[str, ...] | None = None
    """With --rank-all: features whose items are left out. Of a user they are those of training, and of a history those
    of the sample itself. By default without_positives_of of the job's negatives."""
    users: str | None = None
    """With --rank-all: the feature of the users over whom recall, NDCG, MRR and AUC are averaged. By default it is the
    user whose training items are left out."""
    commit: str | None = None
    """Commit to read, by its name or its step; by default the newest that counts."""
    memory_gib: float = 4.0
    """Memory for rows of tables. Larger tables are read by need, and some parts of them again."""


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Write the scores of a commit for all rows of some data, which needs no labels. The run may be in training."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    data: tuple[str, ...]
    """Files or globs with the columns of the job. Quote globs."""
    out: str
    """Parquet file to write, in the order of the rows; it appears when it is complete."""
    columns: tuple[str, ...] = ()
    """Columns of Parquet data to keep beside the scores."""
    outputs: tuple[str, ...] = ()
    """Outputs of the model to write, by default all. Features that none depends on need no columns."""
    top: int | None = None
    """Write so many of the best items of all for each row, and their scores, in the place of the row's scores."""
    rank_all: str | None = None
    """With --top: the feature of the items; by default the job's candidates."""
    items: tuple[str, ...] = ()
    """With --top: files with the column of the items; these alone are ranked."""
    without: tuple[str, ...] | None = None
    """With --top: as for evaluate."""
    commit: str | None = None
    """Commit to read, by its name or its step; by default the newest that counts."""
    force: bool = False
    """Replace a file that is there."""
    memory_gib: float = 4.0
    """Memory for rows of tables. Larger tables are read by need, and some parts of them again."""


@dataclass(frozen=True, kw_only=True)
class ExportModel:
    """Write a commit as files that score without podembed: program, dense parameters, tables, schema of the input."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    out: str
    """Folder to make, or a URL."""
    outputs: tuple[str, ...] = ()
    """Outputs that the model shall give, by default all. It asks for no column that none depends on."""
    commit: str | None = None
    """Commit to read, by its name or its step; by default the newest that counts."""


Scoring = Evaluate | Predict | ExportModel

ScoringCommand = (
    Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[ExportModel, tyro.conf.subcommand("export-model")]
)


def run(command: Scoring) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, InputError, StorageError, QualityError: see `jobs.outcomes` for the words and codes.
    """
    match command:
        case Evaluate():
            return _evaluate(command)
        case Predict():
            return _predict(command)
        case ExportModel():
            return _export_model(command)


def _evaluate(command: Evaluate) -> int:
    from podembed.orchestrator.events.progress import NO_FIGURE
    from podembed.serving.predict.evaluate import evaluate
    from podembed.serving.predict.rank import rank_all

    common: dict[str, Any] = {
        "data": command.data,
        "commit": command.commit,
        "folder": current_folder(),
        "kept_bytes": _kept_bytes(command.memory_gib),
    }
    if command.rank_all is None:
        _require_unset(command, "--rank-all FEATURE", at=(10,), items=(), without=None, users=None)
        found = evaluate(command.run, **common)
    else:
        found = rank_all(
            command.run,
            feature=command.rank_all,
            items=command.items,
            without=command.without,
            users=command.users,
            at=command.at,
            **common,
        )
    evaluation = found.evaluation
    print(f"{found.commit} (step {evaluation.step}) on {evaluation.num_samples:,} samples of {', '.join(found.paths)}")
    width = max(map(len, evaluation.values), default=0)
    if not evaluation.values:
        print(f"{NO_FIGURE}; --rank-all FEATURE ranks items of any job")
    for name, value in evaluation.values.items():
        print(f"{name.ljust(width)}  {value:.8f}")
    for name, why in evaluation.missing.items():
        print(f"no {name}: {why}", file=sys.stderr)
    for row in found.bad_rows:
        print(f"left out: {row}", file=sys.stderr)
    return 0


def _predict(command: Predict) -> int:
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.serving.predict.predict import predict
    from podembed.serving.predict.recommend import recommend

    common: dict[str, Any] = {
        "data": command.data,
        "out": command.out,
        "columns": command.columns,
        "commit": command.commit,
        "folder": current_folder(),
        "force": command.force,
        "kept_bytes": _kept_bytes(command.memory_gib),
    }
    if command.top is None:
        _require_unset(command, "--top 10", rank_all=None, items=(), without=None)
        found = predict(command.run, outputs=command.outputs, **common)
    else:
        if command.outputs:
            raise ConfigurationError(
                "Found --outputs beside --top. Expected one of them, since --top writes items and scores. Leave out "
                "--outputs."
            )
        found = recommend(
            command.run,
            top=command.top,
            feature=command.rank_all,
            items=command.items,
            without=command.without,
            **common,
        )
    print(f"{found.path}: {found.num_rows:,} rows of {', '.join(found.columns)} by {found.commit}")
    for row in found.bad_rows:
        print(f"without scores: {row}", file=sys.stderr)
    return 0


def _export_model(command: ExportModel) -> int:
    from podembed.orchestrator.api.text import format_bytes
    from podembed.serving.artifact.export_model import export_model

    found = export_model(
        command.run, out=command.out, outputs=command.outputs, commit=command.commit, folder=current_folder()
    )
    print(f"{found.path}: model of {found.commit}, {format_bytes(found.size_bytes)}")
    print(f"columns  {', '.join(found.columns)}")
    shapes = [f"{name} [{', '.join(map(str, ('n', *shape)))}]" for name, shape in found.outputs.items()]
    print(f"outputs  {', '.join(shapes)}")
    return 0


def _require_unset(command: Evaluate | Predict, flag: str, **defaults: Any) -> None:
    """Raises `ConfigurationError` for flags that do nothing without another one."""
    from podembed.orchestrator.api.config import ConfigurationError

    given = [name for name, default in defaults.items() if getattr(command, name) != default]
    if given:
        name = given[0].replace("_", "-")
        raise ConfigurationError(f"Found --{name} without {flag.split()[0]}. Expected both. Pass {flag} as well.")


def _kept_bytes(memory_gib: float) -> int:
    from podembed.orchestrator.api.config import ConfigurationError

    if not memory_gib > 0:
        raise ConfigurationError(
            f"Found --memory-gib {memory_gib:g}. Expected more than 0. Leave it out for 4, or pass what may be used."
        )
    return int(memory_gib * (1 << 30))
