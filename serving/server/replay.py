"""`replay`: scores recorded requests again, and compares the bits.

Each row names the version that answered. Of a run, that version is loaded again, as long as its commit is there. A
server is asked about those rows alone that the version which answers now was asked about.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from glob import glob
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.run.reference import open_published
from podembed.serving.publish.versions import read_version
from podembed.serving.server.recorder import POSITION, REQUEST, UNIX_S, VERSION
from podembed.serving.server.replica import Replica

_OWN = (REQUEST, POSITION, VERSION, UNIX_S)
_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Replayed:
    """How recorded samples compare. Mutated as they are scored.

    Attributes:
      num_equal, num_other: samples whose outputs have the same bits now, and others.
      num_skipped: samples by version that could not be asked again, and why.
      first: what differs first, in words.
    """

    num_equal: int = 0
    num_other: int = 0
    num_skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    first: str = ""


def replay(log: str, target: str) -> Replayed:
    """Scores all requests of a log again.

    Args:
      log: folder that a server recorded into, or a glob of its files.
      target: a run, or the URL of a server.

    Raises:
      ConfigurationError: no log, no run, or no server there.
    """
    paths = sorted(glob(log if "*" in log else f"{glob_escaped(log)}/*.parquet"))
    if not paths:
        raise ConfigurationError(f"Found no recorded files at {log}. Expected some. Serve with --record {log} first.")
    is_url = target.startswith(("http://", "https://"))
    found = Replayed()
    replicas: dict[str, Replica] = {}
    for request in _requests(paths):
        version = request.column(VERSION)[0].as_py()
        outputs = [name for name in request.column_names if name.startswith("_") and name not in _OWN]
        columns = {
            name: [_sent(value) for value in request.column(name).to_pylist()]
            for name in request.column_names
            if name not in (*_OWN, *outputs)
        }
        try:
            scored = _asked(target, columns, version) if is_url else _scored(target, columns, version, replicas)
        except _Skipped as error:
            count, _ = found.num_skipped.get(version, (0, ""))
            found.num_skipped[version] = count + request.num_rows, str(error)
            continue
        _compare(found, request, {name: scored.get(name.removeprefix("_")) for name in outputs})
    return found


def render(found: Replayed) -> str:
    """A line for each result."""
    lines = [f"the same bits: {plural(found.num_equal, 'sample')}"]
    if found.num_other:
        lines.append(f"other bits: {plural(found.num_other, 'sample')}; the first: {found.first}")
    for version, (count, why) in found.num_skipped.items():
        lines.append(f"not scored: {plural(count, 'sample')} of {version}: {why}")
    return "\n".join(lines)


def glob_escaped(path: str) -> str:
    """A path in which no letter means something to `glob`."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


class _Skipped(Exception):
    """Some samples cannot be scored again."""


def _requests(paths: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of each request."""
    for path in paths:
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(
                f"Found no Parquet file in {path} ({error!s:.200}). Expected one that was recorded. Move it away."
            ) from error
        if missing := [name for name in _OWN if name not in table.column_names]:
            raise ConfigurationError(
                f"Found no column {missing[0]} in {path}. Expected a file that `podembed serve --record` wrote. Pass "
                "its folder."
            )
        starts = np.flatnonzero(np.asarray(table.column(POSITION)) == 0).tolist()
        for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
            yield table.slice(start, stop - start)


def _sent(value: Any) -> Any:
    """A value as a client sends it."""
    if isinstance(value, list):
        return [_sent(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value


def _scored(
    run: str, columns: dict[str, list[Any]], version: str, replicas: dict[str, Replica]
) -> dict[str, np.ndarray]:
    if version not in replicas:
        store = open_published(run)
        replica = Replica(store)
        try:
            replica.answer_with(read_version(store, version))
        except ConfigurationError as error:
            raise _Skipped(str(error)) from error
        # One at a time is in memory.
        replicas.clear()
        replicas[version] = replica
    replica = replicas[version]
    with replica.use() as loaded:
        return loaded.model.score_whole(loaded.model.read(columns), loaded.most_samples)


def _asked(url: str, columns: dict[str, list[Any]], version: str) -> dict[str, np.ndarray]:
    body = json.dumps(columns).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/score", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        raise _Skipped(f"{error.code} {error.read().decode(errors='replace'):.200}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Found no server at {url} ({error}). Expected one. Start it: podembed serve."
        ) from error
    if found.get("model_version") != version:
        raise _Skipped(f"{found.get('model_version')} answers now")
    return {name: np.array(values, np.float32) for name, values in found.items() if name != "model_version"}


def _compare(found: Replayed, request: pa.Table, scored: dict[str, np.ndarray | None]) -> None:
    is_equal = np.ones(request.num_rows, bool)
    for name, values in scored.items():
        if values is None:
            continue  # A server answers /score with the scores alone.
        recorded = np.array(request.column(name).to_pylist()).astype(values.dtype).reshape(values.shape)
        differs = recorded != values
        is_equal &= ~differs.reshape(len(values), -1).any(axis=1)
        if differs.any() and not found.first:
            at = int(np.flatnonzero(differs.reshape(len(values), -1).any(axis=1))[0])
            own = request.column(REQUEST)[0].as_py()
            found.first = f"{name} {recorded[at]} of sample {at} of request {own} is {values[at]} now"
    found.num_equal += int(is_equal.sum())
    found.num_other += int((~is_equal).sum())
