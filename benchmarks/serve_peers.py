"""What another server answers on a workload with the same model in torch, in pairs with ours. Prints one JSON line.

    python benchmarks/serve_peers.py --peer litserve --python VENV/bin/python --bench A10 --samples 128 --seconds 8

Both servers are up, and `wrk` asks one after the other, `--pairs` times, as fast as they answer. Then `open_loop.py`
asks both at 70 % of the lower rate. VENV has `pip install torch numpy` and the
peer: `litserve`, `bentoml`, `ray[serve]` or `mlserver`. The last wants an older fastapi than the others, so an
environment of its own. `peers/` says how each is set up. Weights are random. Bodies are those of `serve.py`, in the
frame that a peer's protocol asks for. CPU seconds are those of all processes of a server. `--batch 1` scores each
request alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import serve  # noqa: E402
from benchmarks.compare import spread  # noqa: E402
from benchmarks.measuring import process_tree  # noqa: E402

PEERS = ("litserve", "bentoml", "ray-serve", "mlserver")
START_S = 120
WARM_UP_S = 2
OPEN_SHARE = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--python", default=sys.executable, help="of the environment with the peer")
    parser.add_argument("--bench", default="A10")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="most requests that a peer scores together")
    parser.add_argument("--wait", type=float, default=0.002, help="seconds that a peer waits for others to score with")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options)))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run, _, columns = serve.trained(folder, options.bench)
    bodies = [serve.body_of(columns, at, options.samples) for at in range(serve.NUM_BODIES)]
    framed_bodies = [framed(options.peer, body) for body in bodies]
    warm_up = argparse.Namespace(**vars(options) | {"seconds": WARM_UP_S})
    pairs = []
    ours_up = serve.serving(run, ["--workers", str(options.workers)])
    with ours_up as (pids, _, address), serving(folder, options) as (server, url):
        wait_for(server, url, framed_bodies[0], folder / "log", options)
        for number in range(options.pairs):
            load = os.getloadavg()[0]
            if number == 0:
                serve.asked(pids, f"{address}/score", bodies, warm_up)
                serve.asked(process_tree(server.pid), url, framed_bodies, warm_up)
            ours = serve.asked(pids, f"{address}/score", bodies, options)
            theirs = serve.asked(process_tree(server.pid), url, framed_bodies, options)
            rate = OPEN_SHARE * min(ours["requests_s"], theirs["requests_s"])
            ours |= serve.latencies(f"{address}/score", bodies[0], rate, options)
            theirs |= serve.latencies(url, framed_bodies[0], rate, options)
            pairs.append({"load": round(load, 1), "open_rate": round(rate), "ours": ours, "theirs": theirs})
    ratios = [pair["ours"]["samples_per_cpu_s"] / pair["theirs"]["samples_per_cpu_s"] for pair in pairs]
    said = {name: getattr(options, name) for name in ("peer", "bench", "samples", "threads", "workers", "batch")}
    return said | {"samples_per_cpu_s_ratio": spread(ratios), "pairs": pairs}


@contextmanager
def serving(folder: Path, options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server's first process, and where it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {name: getattr(options, name) for name in ("bench", "threads", "workers", "batch")}
    environment = os.environ | {
        "PEER_SETTINGS": json.dumps(given | {"port": port, "wait_s": options.wait}),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(options.threads),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "BENTOML_DO_NOT_TRACK": "True",
    }
    own = ROOT / "benchmarks" / "peers"
    if options.peer == "bentoml":
        command = ["-m", "bentoml", "serve", "benchmarks.peers.on_bentoml:Scores", "--host", "127.0.0.1"]
        command += ["--port", str(port)]
    elif options.peer == "mlserver":
        write_mlserver(folder, port, options)
        command = ["-c", "from mlserver.cli import main; main()", "start", str(folder)]
    else:
        command = [str(own / f"on_{options.peer.replace('-', '_')}.py")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [os.path.abspath(options.python), *command],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        try:
            path = "v2/models/clicks/infer" if options.peer == "mlserver" else "score"
            yield server, f"http://127.0.0.1:{port}/{path}"
        finally:
            end(server)


def write_mlserver(folder: Path, port: int, options: argparse.Namespace) -> None:
    """Its two files of settings. With one worker the model is in the server's process, which is its fastest way."""
    server: dict[str, Any] = {"host": "127.0.0.1", "http_port": port, "grpc_port": 0, "metrics_endpoint": None}
    server |= {"parallel_workers": options.workers if options.workers > 1 else 0, "debug": False}
    model: dict[str, Any] = {"name": "clicks", "implementation": "benchmarks.peers.on_mlserver.Scores"}
    if options.batch > 1:
        model |= {"max_batch_size": options.batch, "max_batch_time": options.wait}
    (folder / "settings.json").write_text(json.dumps(server), encoding="utf-8")
    (folder / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")


def end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it started."""
    processes = process_tree(server.pid)
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for process in processes[1:]:
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            continue


def framed(peer: str, body: bytes) -> bytes:
    """The columns of a request, as a peer's protocol wants them."""
    columns = json.loads(body)
    if peer == "bentoml":
        return json.dumps({"requests": [columns]}).encode()
    if peer != "mlserver":
        return body
    samples = max(map(len, columns.values()))
    inputs = [{"name": "samples", "shape": [1], "datatype": "INT64", "data": [samples]}]
    for name, values in columns.items():
        shape = [len(values), len(values[0])] if isinstance(values[0], list) else [len(values)]
        datatype = "FP32" if isinstance(values[0], float) else "INT64"
        inputs.append({"name": name, "shape": shape, "datatype": datatype, "data": values})
    return json.dumps({"inputs": inputs}).encode()


def scores_of(peer: str, answer: Any) -> list[float]:
    if peer == "bentoml":
        return answer[0]
    return answer["outputs"][0]["data"] if peer == "mlserver" else answer["score"]


def wait_for(server: subprocess.Popen[bytes], url: str, body: bytes, log: Path, options: argparse.Namespace) -> None:
    """Returns when the server has answered with as many scores as samples.

    Raises:
      RuntimeError: it ended, answered something else, or took too long to start.
    """
    until = time.monotonic() + START_S
    reason = "no answer"
    while time.monotonic() < until and server.poll() is None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                scores = scores_of(options.peer, json.load(answer))
            if len(scores) == options.samples and len(set(scores)) > options.samples // 2:
                return
            reason = f"{len(scores)} scores, {len(set(scores))} different ones"
            break
        except (OSError, urllib.error.URLError) as error:
            reason = str(error)
            time.sleep(0.5)
    words = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    raise RuntimeError(
        f"Found {reason} of {options.peer} at {url}. Expected {options.samples} scores. Its last words:\n{words}"
    )


if __name__ == "__main__":
    main()
