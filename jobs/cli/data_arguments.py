"""From `--data` and `--eval-data` to arguments of a job's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from podembed.jobs.built_in import CLICK_JOBS, RATINGS_JOBS
from podembed.jobs.criteo_files import are_alike, prepare_files, prepared_beside
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.orchestrator.api.config import ConfigurationError


def data_arguments(
    job_name: str,
    data: Sequence[str],
    eval_data: Sequence[str],
    *,
    max_bad_lines: int,
    notice: Callable[[str], None],
) -> dict[str, object]:
    """What a job gets for the paths that the user gave. Those of click logs get Parquet, converted from text if need
    be, and the form of its columns. Those of ratings get a folder. Any other job gets the paths, made absolute, since
    hosts work in other folders.

    Raises:
      ConfigurationError: there is no training data, or not of the form that the job needs.
      InputError: as `prepare_files`.
    """
    if not data:
        raise ConfigurationError("Found --eval-data without --data. Expected training files as well. Pass --data GLOB.")
    if job_name in CLICK_JOBS:
        return _criteo(data, eval_data, max_bad_lines, notice)
    if job_name in RATINGS_JOBS:
        if len(data) != 1 or eval_data or not Path(data[0]).expanduser().is_dir():
            raise ConfigurationError(
                f"Found --data {' '.join(data)}{' with --eval-data' if eval_data else ''} for {job_name}. Expected the "
                "one folder with "
                "ratings.csv and movies.csv, or another of MovieLens. The job holds out ratings by itself."
            )
        # The run record keeps the arguments, and a run may be resumed from another folder.
        return {"data": _absolute(data[0]), "cache": _absolute(DEFAULT_CACHE)}
    arguments: dict[str, object] = {"data": [_absolute(pattern) for pattern in data]}
    if eval_data:
        arguments["eval_data"] = [_absolute(pattern) for pattern in eval_data]
    return arguments


def plan_arguments(job_name: str, data: Sequence[str]) -> dict[str, object]:
    """The same for a plan of the tables alone: text is not converted, and files need not be there unless they decide
    sizes.

    Raises:
      ConfigurationError: as `data_arguments`, for jobs that take a folder.
    """
    if not data:
        return {}
    if job_name in RATINGS_JOBS:
        return data_arguments(job_name, data, (), max_bad_lines=0, notice=print)
    arguments: dict[str, object] = {"data": list(data)}
    prepared = prepared_beside(_absolute(data[0])) if job_name in CLICK_JOBS else None
    return arguments if prepared is None else arguments | {"columns": prepared}


def _criteo(
    data: Sequence[str], eval_data: Sequence[str], max_bad_lines: int, notice: Callable[[str], None]
) -> dict[str, object]:
    def as_parquet(patterns: Sequence[str]) -> tuple[list[str], str]:
        return prepare_files(
            patterns, cache_folder=Path(".data/criteo-text"), max_bad_lines=max_bad_lines, notice=notice
        )

    found, columns = as_parquet(data)
    arguments: dict[str, object] = {"data": found, "columns": columns}
    if eval_data:
        arguments["eval_data"], eval_columns = as_parquet(eval_data)
        if not are_alike(columns, eval_columns):
            raise ConfigurationError(
                "Found training and evaluation files with different columns or ids. Expected the same. "
                "Prepare the evaluation text with --like the folder of the training data."
            )
    return arguments


def _absolute(pattern: str) -> str:
    return pattern if "://" in pattern else str(Path(pattern).expanduser().absolute())
