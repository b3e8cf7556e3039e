"""The jobs that come with the program, by the name that `--job` takes, and how `--set` writes their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BUILT_IN_JOBS = {
    "synthetic": "podembed.jobs.criteo:synthetic",
    "drift": "podembed.jobs.drift:drift",
    "criteo": "podembed.jobs.criteo:criteo",
    "movielens": "podembed.jobs.movielens:movielens",
    "ncf": "podembed.jobs.papers.ncf:ncf",
    "mf": "podembed.jobs.papers.mf:mf",
    "bpr": "podembed.jobs.papers.mf:bpr",
    "two_tower": "podembed.jobs.papers.two_tower:two_tower",
    "fism": "podembed.jobs.papers.fism:fism",
    "sasrec": "podembed.jobs.papers.sasrec:sasrec",
    "hstu": "podembed.jobs.papers.hstu:hstu",
    "din": "podembed.jobs.papers.din:din",
    "fm": "podembed.jobs.papers.fm:fm",
    "deepfm": "podembed.jobs.papers.fm:deepfm",
    "mmoe": "podembed.jobs.papers.mmoe:mmoe",
    "dlrm": "podembed.jobs.papers.click_logs:dlrm",
    "dcn_v2": "podembed.jobs.papers.click_logs:dcn_v2",
}
# Those that take files of click logs, in the form of Criteo or prepared.
CLICK_JOBS = ("criteo", "dlrm", "dcn_v2")
# Those that take the one folder of a data set in MovieLens' form, and hold out what they evaluate on.
RATINGS_JOBS = ("movielens", "ncf", "mf", "bpr", "two_tower", "fism", "sasrec", "hstu", "din", "fm", "deepfm")


def parse_settings(pairs: tuple[str, ...]) -> Mapping[str, Any]:
    """`name=value` pairs with JSON values; what is no JSON is a string.

    Raises:
      ConfigurationError: a pair without `=`, or two for one name.
    """
    from podembed.orchestrator.api.config import ConfigurationError

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigurationError(f"Found --set {pair}. Expected name=value, such as epochs=2.")
        if name in settings:
            raise ConfigurationError(f"Found --set {name}=... twice. Expected one value for it. Leave one of them out.")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings
