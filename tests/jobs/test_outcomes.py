"""Exit codes and words of every way in which a command can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from podembed.jobs.outcomes import exit_code
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import CrashLoop, JobFailed
from podembed.orchestrator.commit.holder import Holder, RunIsHeld
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.run_record import RunMismatch
from podembed.orchestrator.run.input_record import InputChanged
from podembed.workers.data.columns import DataConfigError
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.job import JobError
from podembed.workers.job.quality import QualityError
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.strict_json import DocumentRefused

HOLDER = Holder(submission="s-1", hostname="h", process=7, machine="")


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize("code", [0, 85])
def test_a_command_that_ends_by_itself_keeps_its_code(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: code) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (JobFailed("device 0 failed: KeyError: 'oops'\nTraceback ..."), 1, "KeyError: 'oops'\nTraceback ..."),
        (CrashLoop("host 1 died. That was fault 4"), 88, "fault 4"),
        (Fenced(3, 4, "/runs/x"), 86, "Generation 4"),
        (RunIsHeld(HOLDER, 3.2, "/runs/x"), 87, "--take-over"),
        (ConfigurationError("Found num_hosts=0."), 87, "num_hosts=0"),
        (InputChanged("The data files changed."), 87, "changed"),
        (DataConfigError("Found no paths."), 87, "no paths"),
        (JobError("Found job 'x'."), 87, "job 'x'"),
        (InputError("part-0.parquet is damaged."), 87, "damaged"),
        (QualityError("Found no weight in any row."), 87, "no weight"),
        (StorageError("no space"), 87, "no space"),
        (DocumentRefused("RUN.json", "damage", "none"), 87, "RUN.json"),
        (RunMismatch({"batch_size": (96, 48)}, "/runs/x"), 87, "batch_size is 96, given 48"),
        (KeyboardInterrupt(), 130, "What was committed stands"),
    ],
)
def test_a_known_outcome_has_a_code_and_one_message_without_our_traceback(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error)) == code
    printed: Any = capsys.readouterr().err
    assert words in printed
    assert "outcomes.py" not in printed


def test_anything_else_shows_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(raising(ZeroDivisionError("a bug")))
