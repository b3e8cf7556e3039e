"""A real S3 service in a child process, for tests: moto's server behind the loopback interface, and the environment
that leads to it.

moto decides a conditional put by looking and then writing, in one thread a request, so two puts could both win. Here
puts are answered one after the other, which makes the decision as atomic as it is with the service it stands for.

Run as `python -m tests.object_store` it serves until its standard input ends, and prints its port first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUCKET = "runs"
# Names in one answer to a request for a listing; 1000 in the service itself.
PAGE_SIZE = 100


@contextlib.contextmanager
def object_store() -> Iterator[Mapping[str, str]]:
    """Starts the service with one empty bucket. Yields the variables with which s3fs finds it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.object_store"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(timeout=20)


def _one_put_at_a_time(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return application(environ, start_response)
        with lock:
            return [*application(environ, start_response)]

    return answer


def main() -> None:
    from moto.backends import get_backend
    from moto.server import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Listings have several pages with few files, too.
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE_SIZE)
    get_backend("s3")["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    # moto's usual application first lists the folders of all services, with each request.
    application = create_backend_app("s3")
    server = make_server(
        "127.0.0.1", 0, _one_put_at_a_time(application), threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
