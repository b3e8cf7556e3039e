"""`Shards`: the processes that hold the tables of a run, as one that scores asks them for rows."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.server.held_versions import NotYet
from podembed.serving.server.open_inference import HEADER_LENGTH
from podembed.serving.server.shares import ROWS, shard_of_keys, shard_of_rows
from podembed.workers.checkpoint.checkpoint_files import TableFiles

_TIMEOUT_S = 5.0


class ShardAway(Exception):
    """A shard does not answer, or not with what it should."""


class RemoteRows:
    """Rows of a table as shards sent them to a thread. As `TableRows`. Mutated: which ones are here.

    Args:
      files: of the table in a commit.
    """

    def __init__(self, files: TableFiles) -> None:
        self.files = files
        self.arena = np.zeros((1, files.dim), np.float32)
        # One thread answers, another makes vectors of all items.
        self._local = threading.local()

    def put(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Takes some rows in the place of the last ones.

        Args:
          ids: rising.
        """
        self._local.ids, self._local.rows = ids, rows

    def places_of(self, ids: np.ndarray) -> np.ndarray | None:
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def values(self, ids: np.ndarray) -> np.ndarray:
        return self._local.rows[np.searchsorted(self._local.ids, ids)]


class Shards:
    """See the module. Any thread may ask.

    Args:
      urls: of all shards, in any order.
      token: that they ask for, or None.
      timeout_s: seconds until a shard counts as away.

    Raises:
      ConfigurationError: one is no URL.
    """

    def __init__(self, urls: Sequence[str], *, token: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        self._urls = [urlsplit(url.rstrip("/")) for url in urls]
        for url, text in zip(self._urls, urls, strict=True):
            if url.scheme not in ("http", "https") or not url.hostname or not _has_port(url):
                raise ConfigurationError(f"Found --shards {text!r}. Expected URLs, such as http://shard-0:8000.")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._local = threading.local()
        # By number of the shard, once all have said which one they are.
        self._order: list[int] = []
        self._run_id = ""
        self._is_lost = False

    def require(self, version: str, run_id: str) -> None:
        """Returns if all shards of the run are there, and have a version.

        Raises:
          ConfigurationError: they are not the shards of the run, each once.
          NotYet: one has not loaded it, or does not answer.
        """
        count = len(self._urls)
        found: dict[int, int] = {}
        for at in range(count):
            try:
                status, document = self._document(at)
            except ssl.SSLCertVerificationError as error:
                raise ConfigurationError(
                    f"Found a certificate of {self._name(at)} that this machine does not trust "
                    f"({error.verify_message}). Expected one that it does. Add its authority to those of the system "
                    "(SSL_CERT_FILE)."
                ) from error
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise NotYet(
                    f"Found no answer of the shard at {self._name(at)} ({error}). Expected it. Start it."
                ) from error
            if status in (401, 403):
                raise ConfigurationError(
                    f"Found another token in the shard at {self._name(at)}. Expected the same as here. Pass both the "
                    "same --token-file."
                )
            if status != 200:
                raise NotYet(
                    f"Found status {status} of {self._name(at)} ({document.get('error', '')}). Expected a shard. Start "
                    "one there with `podembed serve RUN --shard I/S`."
                )
            said = document.get("parameters") or {}
            place: Any = (said.get("shard"), said.get("shards"), said.get("run"))
            if place[1:] != (count, run_id) or place[0] in found:
                raise ConfigurationError(
                    f"Found shard {place[0]} of {place[1]}, of run {place[2]}, at {self._name(at)}. Expected each of "
                    f"the {count} shards of run {run_id} once. Correct --shards."
                )
            found[int(place[0])] = at
            if version not in document.get("versions", ()):
                raise NotYet(f"Found no version {version} in the shard at {self._name(at)} yet. Expected it. Wait.")
        self._order = [found[number] for number in range(count)]
        self._run_id, self._is_lost = run_id, False

    def fetch(self, version: str, tables: Mapping[str, RemoteRows], wanted: Mapping[str, np.ndarray]) -> None:
        """Puts the rows of some ids into their tables, all at once.

        Args:
          wanted: ids by table, in any order.

        Raises:
          ShardAway: one does not answer.
        """
        if self._is_lost:
            # One may have come back at another's address.
            try:
                self.require(version, self._run_id)
            except (ConfigurationError, NotYet) as error:
                raise ShardAway(str(error)) from error
        count = len(self._order)
        asked: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
        places: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, ids in wanted.items():
            distinct, files = np.unique(ids), tables[name].files
            shard_of = shard_of_keys if files.is_dynamic else shard_of_rows
            places[name] = distinct, shard_of(distinct, num_buckets=files.num_buckets, count=count)
            for number in np.unique(places[name][1]).tolist():
                asked[number][name] = distinct[places[name][1] == number]
        answers = self._ask(version, asked)
        for name, (distinct, shard) in places.items():
            rows = np.empty((len(distinct), tables[name].files.dim), np.float32)
            for number, answer in answers.items():
                if name in answer:
                    rows[shard == number] = answer[name]
            tables[name].put(distinct, rows)

    def _ask(self, version: str, asked: Sequence[Mapping[str, np.ndarray]]) -> dict[int, dict[str, np.ndarray]]:
        """The answers of those shards that are asked for something. All are asked before the first is waited for."""
        path = f"/v2/models/{ROWS}/versions/{version}/infer"
        sent = {number: _body(ids) for number, ids in enumerate(asked) if ids}
        for number, (body, length) in sent.items():
            self._send(self._order[number], path, body, length)
        found = {}
        for number, (body, length) in sent.items():
            at = self._order[number]
            try:
                found[number] = self._received(at, path, body, length, asked[number])
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self._close()
                self._is_lost = True
                raise ShardAway(
                    f"Found no rows of shard {number} of {len(self._order)} at {self._name(at)} ({error}). Expected "
                    "them. Ask again; if it lasts, look at that shard."
                ) from error
        return found

    def _send(self, at: int, path: str, body: bytes, length: int) -> None:
        # One that cannot be sent is sent again before its answer is read.
        try:
            self._connection(at).request("POST", path, body, {**self._headers, HEADER_LENGTH: str(length)})
        except (OSError, http.client.HTTPException):
            self._forget(at)

    def _received(
        self, at: int, path: str, body: bytes, length: int, asked: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        connection = self._connection(at)
        try:
            response = connection.getresponse()
        except (http.client.HTTPException, ConnectionError):
            # It had closed a connection that was not used for some time, or was not sent.
            self._forget(at)
            connection = self._connection(at)
            connection.request("POST", path, body, {**self._headers, HEADER_LENGTH: str(length)})
            response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {data[:300].decode(errors='replace')}")
        end = int(response.headers.get(HEADER_LENGTH) or -1)
        if end < 0:
            raise ValueError("no tensors as bytes")
        rows = {}
        for tensor in json.loads(data[:end])["outputs"]:
            size, shape = int(tensor["parameters"]["binary_data_size"]), tuple(map(int, tensor["shape"]))
            rows[tensor["name"]] = np.frombuffer(data[end : end + size], "<f4").reshape(shape)
            end += size
        if {name: len(values) for name, values in rows.items()} != {name: len(ids) for name, ids in asked.items()}:
            raise ValueError("other tables or numbers of rows than were asked for")
        return rows

    def _document(self, at: int) -> tuple[int, dict[str, Any]]:
        # One that was not used for some time may be closed by now, and a new one costs little here.
        self._forget(at)
        connection = self._connection(at)
        connection.request("GET", f"/v2/models/{ROWS}", headers=self._headers)
        response = connection.getresponse()
        document = json.loads(response.read())
        return response.status, document if isinstance(document, dict) else {}

    def _connection(self, at: int) -> http.client.HTTPConnection:
        """Of this thread, to one shard."""
        connections = self._local.__dict__.setdefault("connections", {})
        if at not in connections:
            url = self._urls[at]
            assert url.hostname is not None
            timeout_s = self._timeout_s
            if url.scheme == "https":
                context = ssl.create_default_context()
                made = http.client.HTTPSConnection(url.hostname, url.port, timeout=timeout_s, context=context)
            else:
                made = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
            connections[at] = made
        return connections[at]

    def _forget(self, at: int) -> None:
        connection = self._local.__dict__.get("connections", {}).pop(at, None)
        if connection is not None:
            connection.close()

    def _close(self) -> None:
        """Of this thread, since answers to what was sent may still come."""
        for at in range(len(self._urls)):
            self._forget(at)

    def _name(self, at: int) -> str:
        url: SplitResult = self._urls[at]
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"


def _has_port(url: SplitResult) -> bool:
    """Whether its port is one, or it has none."""
    try:
        return url.port is None or url.port > 0
    except ValueError:
        return False


def _body(ids: Mapping[str, np.ndarray]) -> tuple[bytes, int]:
    """A request, and the length of its JSON."""
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": "INT64",
                    "shape": [len(values)],
                    "parameters": {"binary_data_size": 8 * len(values)},
                }
                for name, values in ids.items()
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return b"".join([header, *(values.astype("<i8").tobytes() for values in ids.values())]), len(header)
