"""The claims of a driver on an opened run, for tests without a driver."""

from __future__ import annotations

import time

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.run.claims import Claims
from podembed.orchestrator.run.run import OpenRun
from tests.sentences import saying


def claims_of(run: OpenRun, *, told: list[str] | None = None, policies: CheckpointConfig | None = None) -> Claims:
    """Of a driver that begins now; what it says is appended to `told`."""
    return Claims(run, policies or CheckpointConfig(), emit=saying([] if told is None else told), unix_s=time.time)
