"""The commands that score data with a commit of a run: their flags and their words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from podembed.jobs.search_path import current_folder


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Judge a commit on data: all figures of the job. The run may be in training, and nothing is written."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    data: tuple[str, ...] = ()
    """Files or globs with the columns of the job; by default its evaluation data. Quote globs."""
    commit: str | None = None
    """Commit to read, by its name or its step; by default the newest that counts."""
    memory_gib: float = 4.0
    """Memory for rows of tables. Larger tables are read by need, and some parts of them again."""


Scoring = Evaluate

ScoringCommand = Annotated[Evaluate, tyro.conf.subcommand("evaluate")]


def run(command: Scoring) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, InputError, StorageError, QualityError: see `orchestrator.outcomes` for the words and codes.
    """
    return _evaluate(command)


def _evaluate(command: Evaluate) -> int:
    from podembed.orchestrator.inference.evaluate import evaluate

    found = evaluate(
        command.run,
        data=command.data,
        commit=command.commit,
        folder=current_folder(),
        kept_bytes=_kept_bytes(command.memory_gib),
    )
    evaluation = found.evaluation
    print(f"{found.commit} (step {evaluation.step}) on {evaluation.num_samples:,} samples of {', '.join(found.paths)}")
    width = max(map(len, evaluation.values), default=0)
    for name, value in evaluation.values.items():
        print(f"{name.ljust(width)}  {value:.8f}")
    for row in found.bad_rows:
        print(f"left out: {row}", file=sys.stderr)
    return 0


def _kept_bytes(memory_gib: float) -> int:
    from podembed.orchestrator.api.config import ConfigurationError

    if not memory_gib > 0:
        raise ConfigurationError(
            f"Found --memory-gib {memory_gib:g}. Expected more than 0. Leave it out for 4, or pass what may be used."
        )
    return int(memory_gib * (1 << 30))
