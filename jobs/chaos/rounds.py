"""The rounds of a campaign, one after another, and the undisturbed run before them."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from podembed.jobs.chaos.oracles import Judgement, Measure, judge
from podembed.jobs.chaos.round import RUN_NAME, Campaign, run_round, undisturbed
from podembed.jobs.chaos.schedule import Schedule
from podembed.jobs.chaos.table import row
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.storage.strict_json import canonical_bytes


def run_rounds(
    campaign: Campaign,
    schedules: Sequence[Schedule],
    measure: Measure,
    *,
    folder: Path,
    stop_after_s: float = math.inf,
) -> list[Judgement]:
    """Runs every schedule, and says what came of each as soon as it is known.

    Args:
      measure: what each round is compared with.
      folder: where the rounds lie; those that are met are removed.
      stop_after_s: no further round begins after it.
    """
    judgements = []
    started_s = time.monotonic()
    for at, schedule in enumerate(schedules, 1):
        if time.monotonic() - started_s > stop_after_s:
            print(f"not run: {', '.join(one.label for one in schedules[at - 1 :])}", flush=True)
            break
        where = folder / f"{at:03d}-{schedule.label.replace(' ', '-')}"
        # One that was kept of an earlier campaign in this folder gives way.
        shutil.rmtree(where, ignore_errors=True)
        judged = judge(run_round(schedule, campaign, where), measure)
        judgements.append(judged)
        print(f"{at}/{len(schedules)}  " + "  ".join(row(judged)), flush=True)
        for complaint in judged.complaints:
            print(f"       {complaint}", flush=True)
        if judged.is_met:
            shutil.rmtree(where, ignore_errors=True)
    return judgements


def undisturbed_run(campaign: Campaign, folder: Path) -> str:
    """Where the undisturbed run lies. One that lies in the folder already, of the same job in the same form, is used
    again.

    Raises:
      ConfigurationError: the job does not work even so.
    """
    where, form = folder / "undisturbed", folder / "undisturbed.json"
    shape = [campaign.shape.num_hosts, campaign.shape.num_steps, campaign.shape.commit_every]
    wanted = canonical_bytes([campaign.function, dict(campaign.settings), shape, campaign.run_forked is None])
    if form.exists() and form.read_bytes() == wanted:
        print(f"undisturbed: that of {where}", flush=True)
        return str(where / RUN_NAME)
    shutil.rmtree(where, ignore_errors=True)
    first = undisturbed(campaign, where)
    if first.exit_code != 0:
        raise ConfigurationError(
            f"Found the undisturbed run ended with exit code {first.exit_code}. Expected 0: chaos begins with a job "
            "that works.\n"
            f"{first.output[-3000:]}"
        )
    form.write_bytes(wanted)
    print(f"undisturbed: {campaign.function}, {campaign.shape.num_steps} steps, {first.seconds:.1f} s", flush=True)
    return first.url
