"""What tests of commands share."""

from __future__ import annotations

import pytest

from podembed.jobs.cli.main import main


@pytest.fixture
def podembed(capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process; gives its exit code, what it printed, and what it complained about."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    return call
