"""Tables held by three shards, over real sockets: the scores of one process, to the bit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.hashing import mix64
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.serving.publish.listing import roll_back
from podembed.serving.publish.publisher import publish
from podembed.serving.server.app import App
from podembed.serving.server.held_versions import NotYet
from podembed.serving.server.listening import PatientProtocol
from podembed.serving.server.replica import Replica
from podembed.serving.server.shard_server import ShardServer, ShardVersions
from podembed.serving.server.shards import Shards
from podembed.serving.server.shares import ShardPlace, TableShare, shard_of_keys, shard_of_rows
from tests.serving.server.served_runs import listed, newest_commit, part, predicted, scored, store_of
from tests.small_job import small_job
from tests.training import fit_job

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
COUNT = 3
TOKEN = "of the test"


@contextmanager
def listening(versions: ShardVersions, *, port: int = 0, keep_alive_s: float = 5) -> Iterator[str]:
    """A shard at a socket of its own, as its process has it."""
    program = ShardServer(versions, token=TOKEN).asgi()
    kept: dict[str, Any] = {"timeout_keep_alive": keep_alive_s}
    settings = uvicorn.Config(program, port=port, log_level="warning", lifespan="off", http=PatientProtocol, **kept)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def held(run: str, *, count: int = COUNT) -> list[ShardVersions]:
    shards = [ShardVersions(store_of(run), ShardPlace(index=at, count=count)) for at in range(count)]
    for one in shards:
        one.follow()
    return shards


@contextmanager
def asked(shards: Sequence[ShardVersions]) -> Iterator[Shards]:
    with ExitStack() as stack:
        yield Shards([stack.enter_context(listening(one)) for one in reversed(shards)], token=TOKEN)


@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "keys"])
def test_scores_have_the_bits_of_one_process_in_each_version(dynamic: bool, small_data: str, tmp_path: Path) -> None:
    """Deltas, a full commit, and a rollback. A version counts when all shards have it."""
    import pyarrow.parquet as pq

    job = small_job(folder=small_data, audit=False, cut_bags=True, dynamic=dynamic, room=0.5)
    path = sorted(Path(small_data).glob("*.parquet"))[0]
    columns = part(listed(pq.read_table(path)), 0, 150)
    scores: dict[str, bytes] = {}

    def train(steps: int) -> tuple[str, str]:
        run = fit_job(
            job,
            tmp_path,
            name="run",
            max_steps=steps,
            checkpoint_config=CheckpointConfig(every_steps=3, num_to_keep=2, full_every=3),
        ).path
        name = publish(run, job=job, keep=3).version.name
        commit = newest_commit(run)
        scores[name] = predicted(run, job, path, tmp_path / f"{commit}.parquet", commit=commit)[:150].tobytes()
        return run, name

    run, first = train(4)
    shards = held(run)
    with asked(shards) as remote:
        replica = Replica(store_of(run), shards=remote)
        assert replica.follow()
        assert replica.current is not None
        assert replica.current.has_same_bits
        assert scored(replica, columns).tobytes() == scores[first]
        for steps in (7, 10):
            before = replica.current.name
            _, name = train(steps)
            assert shards[0].follow()
            assert shards[1].follow()
            assert not replica.follow()
            assert f"no version {name} in the shard" in str(replica.error)
            assert replica.current.name == before
            assert scored(replica, columns).tobytes() == scores[before]
            assert shards[2].follow()
            assert replica.follow()
            assert replica.error is None
            assert scored(replica, columns).tobytes() == scores[name]
        wanted = before
        roll_back(store_of(run), wanted)
        for one in shards:
            assert one.follow()
        assert replica.follow()
        assert scored(replica, columns).tobytes() == scores[wanted]
        # Two of the three versions are in memory.
        assert shards[0].names == [wanted, name]
        _refuses(remote, replica)
    # Each has its share of the tables that are cut into several buckets.
    held_rows = [sum(len(table.arena) // 2 for table in one.current.tables.values()) for one in shards if one.current]
    assert min(held_rows) > 0.1 * sum(held_rows)
    assert sum(held_rows) == sum(one.num_rows for one in replica.current.manifest.tables)


def _refuses(remote: Shards, replica: Replica) -> None:
    """What a client of a shard gets wrong, and what a process that scores does without one."""
    assert replica.current is not None
    app = App(replica, name="clicks")
    url, name = next(iter(remote._urls)).geturl(), replica.current.name
    table = next(iter(replica.current.tables))

    def ask(version: str, tables: dict[str, Any], token: str = TOKEN) -> tuple[int, str]:
        inputs = [{"name": one, "datatype": "INT64", "shape": [len(ids)], "data": ids} for one, ids in tables.items()]
        answer = httpx.post(
            f"{url}/v2/models/rows/versions/{version}/infer",
            json={"inputs": inputs},
            headers={"Authorization": f"Bearer {token}"},
        )
        return answer.status_code, answer.text

    for version, tables, token, status, words in (
        (name, {table: [1]}, "another", 401, "no valid token"),
        ("v1", {table: [1]}, TOKEN, 404, "Expected 'v1' among them"),
        (name, {"none": [1]}, TOKEN, 400, "Found table 'none'"),
        (name, {table: list(range(-40, 40))}, TOKEN, 400, "that shard 2 of 3 holds"),
    ):
        assert (status, True) == ((found := ask(version, tables, token))[0], words in found[1]), found
    twice = Shards([url] * COUNT, token=TOKEN)
    with pytest.raises(ConfigurationError, match="Expected each of the 3 shards"):
        twice.require(name, replica.current.version.run_id)
    with pytest.raises(ConfigurationError, match="Found another token in the shard"):
        Shards([url] * COUNT).require(name, replica.current.version.run_id)
    with pytest.raises(NotYet, match="Found no answer of the shard at http://127.0.0.1:1 "):
        Shards(["http://127.0.0.1:1"], token=TOKEN).require(name, replica.current.version.run_id)
    app.close()


def test_a_shard_that_is_away_is_an_answer_in_words_until_it_is_back(small_data: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, name="run", max_steps=3).path
    publish(run, job=job)
    shards = held(run, count=2)
    columns = part(listed(pq.read_table(sorted(Path(small_data).glob("*.parquet"))[0])), 0, 90)
    with listening(shards[0]) as first:
        with listening(shards[1]) as second:
            replica = Replica(store_of(run), shards=Shards([first, second], token=TOKEN))
            replica.follow()
            assert replica.current is not None
            app = App(replica, name="clicks")
            columns = {name: columns[name] for name in replica.current.model.columns}
            transport = httpx.ASGITransport(app=app.asgi())
            expected = _post(transport, columns)
            assert expected[0] == 200
        status, body = _post(transport, columns)
        assert (status, f"no rows of shard 1 of 2 at {second}" in body["error"]) == (503, True), body
        with listening(shards[1], port=int(second.rpartition(":")[2])):
            assert _post(transport, columns) == expected
    app.close()


def _post(transport: httpx.ASGITransport, columns: dict[str, Any]) -> tuple[int, Any]:
    import asyncio

    async def ask() -> tuple[int, Any]:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post("/score", json=columns)
            return answer.status_code, answer.json()

    return asyncio.run(ask())


_ASKED = "GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "sent", "again"),
    [
        ("", "", ""),
        (_ASKED, "", ""),
        ("", "GET /v2 HTTP/1.1\r\nHost: a\r\nX: ", "x"),
        (_ASKED, "GET /v2 HTTP/1.1\r\nHost: a\r\nX: ", "x"),
        (_ASKED, "\r\n", "\r\n"),
        # Bodies of requests that are answered before these came.
        ("POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n", "x", "x"),
    ],
)
def test_a_connection_that_does_not_send_a_whole_request_is_closed(
    small_data: str, tmp_path: Path, before: str, sent: str, again: str
) -> None:
    with a_shard(small_data, tmp_path, keep_alive_s=0.2) as address, socket.create_connection(address, 30) as slow:
        slow.sendall(before.encode())
        assert not before or slow.recv(1 << 16).startswith(b"HTTP/1.1 ")
        slow.sendall(sent.encode())
        slow.settimeout(0.05)
        received = None
        began_s = time.monotonic()
        while received is None and time.monotonic() < began_s + 30:
            try:
                received = slow.recv(1)
            except TimeoutError:
                # Bytes that come now and then do not put the end off.
                slow.sendall(again.encode())
            except ConnectionResetError:
                received = b""
        assert received == b""


def test_a_header_has_a_size_and_a_request_that_runs_is_waited_for(small_data: str, tmp_path: Path) -> None:
    with a_shard(small_data, tmp_path, keep_alive_s=0.2) as address:
        with socket.create_connection(address, 30) as long:
            long.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: ")
            with suppress(ConnectionError):
                for _ in range(40):
                    long.sendall(b"x" * 10_000)
            with suppress(ConnectionError):
                assert long.recv(100).startswith(b"HTTP/1.1 431 ")
        # The header of the next request begins with the first one.
        with socket.create_connection(address, 30) as piped:
            piped.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\nGET /v2 HTTP/1.1\r\n")
            assert piped.recv(1 << 16).startswith(b"HTTP/1.1 200")
            piped.sendall(b"Host: a\r\n\r\n")
            assert piped.recv(1 << 16).startswith(b"HTTP/1.1 200")


@contextmanager
def a_shard(small_data: str, folder: Path, *, keep_alive_s: float) -> Iterator[tuple[str, int]]:
    """The address of one that listens."""
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, folder, name="run", max_steps=1).path
    publish(run, job=job)
    (versions,) = held(run, count=1)
    with listening(versions, keep_alive_s=keep_alive_s) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        yield host, int(port)


@pytest.mark.parametrize(("num_rows", "num_buckets", "count"), [(1000, 8, 3), (17, 16, 5), (5, 1, 3), (64, 64, 1)])
def test_each_row_lies_in_one_shard_at_one_place(num_rows: int, num_buckets: int, count: int) -> None:
    ids = np.arange(num_rows)
    layout = BucketLayout(num_rows=num_rows, num_buckets=num_buckets)
    found = []
    for at in range(count):
        share = TableShare(ShardPlace(index=at, count=count), num_buckets=num_buckets, num_rows=num_rows)
        own = ids[share.holds(ids)]
        np.testing.assert_array_equal(share.ids(0, share.num_rows), own)
        np.testing.assert_array_equal(share.local(own), np.arange(share.num_rows))
        assert set(layout.buckets_of(own).tolist()) <= set(share.buckets.tolist())
        assert (shard_of_rows(own, num_buckets=num_buckets, count=count) == at).all()
        assert not share.holds(np.array([-1, num_rows])).any()
        found.append(own)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), ids)
    keys = np.array([-(1 << 63), -1, 0, 7, (1 << 63) - 1])
    buckets = (mix64(keys) & np.uint64(num_buckets - 1)).astype(np.int64)
    np.testing.assert_array_equal(shard_of_keys(keys, num_buckets=num_buckets, count=count), buckets % count)


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0", "1/2/3"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Expected I/S with I from 0 to S - 1"):
        ShardPlace.of(text)
    with pytest.raises(ConfigurationError, match="Expected URLs"):
        Shards([text])
