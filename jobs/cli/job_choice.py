"""Which job the flags mean, and its arguments."""

from __future__ import annotations

from pathlib import Path

from podembed.jobs.built_in import BUILT_IN_JOBS, CLICK_JOBS, RATINGS_JOBS, parse_settings
from podembed.jobs.drift_files import DEFAULT_CACHE
from podembed.jobs.search_path import current_folder
from podembed.jobs.synthetic import DEFAULT_FOLDER
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.job.reference import JobReference

# What the built-in jobs train on, and where it comes from.
_CLICKS = (
    "click logs in the form of Criteo. Pass --data '/data/day_*.gz', or Parquet of that form. `podembed train` without "
    "--job and --data generates some (job synthetic)."
)
_RATINGS = (
    "the folder of a MovieLens data set. Download one, such as ml-latest-small, from "
    "https://grouplens.org/datasets/movielens/, and pass --data ml-latest-small."
)
# Jobs that write their own data: the argument that says where, and its default.
_GENERATED = {"synthetic": ("folder", DEFAULT_FOLDER), "drift": ("cache", DEFAULT_CACHE)}


def job_reference(job_name: str, settings: tuple[str, ...], given: dict[str, object]) -> JobReference:
    """The job's function with its arguments."""
    named = parse_settings(settings)
    if both := sorted(named.keys() & given.keys()):
        raise ConfigurationError(
            f"Found --set {both[0]}=... beside --data, which gives it too. Expected one of them. Leave one out."
        )
    arguments = {**named, **given}
    if job_name in _GENERATED:
        # The run record keeps the arguments, and a run may be resumed from another folder.
        name, default = _GENERATED[job_name]
        arguments[name] = str(Path(str(arguments.get(name, default))).absolute())
    needed = _RATINGS if job_name in RATINGS_JOBS else _CLICKS if job_name in CLICK_JOBS else None
    if needed and "data" not in arguments:
        raise ConfigurationError(f"Found --job {job_name} without --data. Expected {needed}")
    if job_name in BUILT_IN_JOBS:
        return JobReference(function=BUILT_IN_JOBS[job_name], arguments=arguments)
    return JobReference(function=job_name, arguments=arguments, folder=current_folder())
