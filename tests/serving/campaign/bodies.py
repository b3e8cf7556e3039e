"""Malformed bodies at random, sent to a real server: each is answered in words, and good ones stay right."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter

from tests.serving.campaign.schedule import Base

_STATUS = (200, 400, 404, 408, 413, 415)
_ODD = (None, -1, 1 << 63, 1 << 70, 1e400, float("nan"), "", "\x00", "x" * 5000, [], [[]], {}, [None], True)


def malformed(whole: bytes, choose: random.Random) -> bytes:
    """A body that may be none."""
    kind = choose.randrange(5)
    if kind == 0:
        data = bytearray(whole)
        for _ in range(choose.randrange(1, 8)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        return bytes(data)
    if kind == 1:
        return whole[: choose.randrange(len(whole))]
    document = json.loads(whole)
    if kind == 2:
        return json.dumps(_odd(document, choose)).encode()
    if kind == 3:
        at = choose.randrange(len(whole))
        return whole[:at] + choose.randbytes(choose.randrange(1, 64)) + whole[at:]
    return choose.randbytes(choose.randrange(200))


def _odd(document: object, choose: random.Random) -> object:
    """One value somewhere is another one."""
    if isinstance(document, dict) and document and choose.random() < 0.9:
        name = choose.choice(list(document))
        if choose.random() < 0.1:
            return {other: value for other, value in document.items() if other != name}
        return {**document, name: _odd(document[name], choose)}
    if isinstance(document, list) and document and choose.random() < 0.7:
        at = choose.randrange(len(document))
        return [*document[:at], _odd(document[at], choose), *document[at + 1 :]]
    return choose.choice(_ODD)


def run_bodies(base: Base, *, port: int, count: int, seed: int) -> dict[str, int]:
    """Sends them.

    Raises:
      AssertionError: an answer has another status, no words, or the server does not go on.
    """
    choose = random.Random(seed)
    columns = {name: values[:3] for name, values in base.columns.items() if name not in ("label", "sample_id")}
    good = json.dumps(columns).encode()
    tensors = [
        {"name": name, "datatype": "INT64", "shape": [3], "data": values}
        for name, values in columns.items()
        if not isinstance(values[0], list)
    ]
    infer = json.dumps({"inputs": tensors}).encode()
    counts: Counter[str] = Counter()
    expected = _ask(_connected(port), "/score", good, {})
    assert expected[0] == 200, expected
    connection = _connected(port)
    for number in range(count):
        path, whole = choose.choice((("/score", good), ("/v2/models/small/infer", infer)))
        headers = {"Content-Type": "application/json"}
        if path != "/score" and choose.random() < 0.3:
            headers["Inference-Header-Content-Length"] = choose.choice(("0", "7", "-1", "x", "999999", str(len(whole))))
        body = malformed(whole, choose)
        try:
            status, text = _ask(connection, path, body, headers)
        except (http.client.HTTPException, OSError) as error:
            raise AssertionError(f"Found {error!r} for body {number}: {body[:300]!r}. Expected an answer.") from error
        assert status in _STATUS, (status, text[:300], body[:300])
        assert status == 200 or b"Expected" in text, (status, text[:300], body[:300])
        counts[str(status)] += 1
        if number % 1000 == 0:
            assert _ask(connection, "/score", good, {}) == expected
    assert _ask(connection, "/score", good, {}) == expected
    return dict(counts)


def _connected(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30)


def _ask(connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()
