"""The campaign in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.serving.server.rows import TableMemory
from tests.serving.campaign.schedule import Base, simulate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.made(tmp_path_factory.mktemp("base"), num_steps=6)


def test_answers_stay_right_in_random_histories(base: Base, tmp_path: Path) -> None:
    counts = simulate(base, tmp_path, range(1, 7))
    assert counts["ask: right"] > 30
    for part in ("publish", "copy_to", "follow", "restart"):
        assert counts[f"{part}: killed"], counts


def test_a_version_that_changes_under_an_answer_is_found(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All versions have one index then, so the next one changes the last.
    monkeypatch.setattr(TableMemory, "copy", lambda memory, places: places)
    with pytest.raises(AssertionError):
        simulate(base, tmp_path, range(1, 12))
