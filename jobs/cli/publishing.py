"""The commands that put a model in front of users: `podembed publish | versions | rollback | pin | serve |
replay`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from podembed.jobs.search_path import current_folder

EXIT_REFUSED = 1


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Offer a commit to servers. The run may be in training. Exits with 1 if a gate refuses it."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run, for its newest commit, or RUN@COMMIT."""
    to: str | None = None
    """Folder or URL of a copy for servers, such as in another region. It offers the version in place of the run, and
    gets what servers need of the commit."""
    commit: str | None = None
    """Commit to publish, by its name or its step; by default the newest that counts."""
    require: tuple[str, ...] = ()
    """Bounds of the commit's evaluation, such as 'auc>=0.70'. A commit that misses one is not offered."""
    max_drop: float | None = None
    """How much worse than in the version before the metrics of --require may be; without --require, auc."""
    keep: int = 2
    """Newest versions whose commits the run, or the copy, keeps, for servers that roll back."""
    outputs: tuple[str, ...] = ()
    """Outputs of the model to answer with, by default all. Features that none depends on are not asked for."""
    rows: Literal["float32", "bfloat16", "int8"] = "float32"
    """Form of the rows in the copy of --to. Says how far they are from those of the run, and how the AUC changes."""
    min_count: int = 0
    """Leave keys that were seen less often out of the copy of --to, for tables with a capacity."""
    follow: bool = False
    """Go on: publish each newest commit, until Ctrl-C."""
    every_commit: bool = False
    """As --follow, but every commit in its order."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """List the versions of a run: the one that counts, those offered before, and those that a gate refused."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run, or of a copy for servers."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Let an older version count again. Servers follow within a second or two."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run, or of a copy for servers."""
    version: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="VERSION")] = None
    """Its name, the beginning of it, or its step; by default the one that was offered before."""


@dataclass(frozen=True, kw_only=True)
class PinCommit:
    """Keep a commit, whatever the keep policies say. Without --commit: list what is pinned."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run, or of a copy for servers."""
    commit: str | None = None
    """Name or step of the commit."""
    reason: str = "by hand"
    """Why, for people."""
    remove: bool = False
    """Leave it to the keep policies again."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer requests with the version that counts, and follow newer ones.

    A run of which nothing is published yet gets its newest commit published first.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run, or of a copy for servers."""
    host: str = "127.0.0.1"
    """Address to listen at. The default can be reached from this machine alone; 0.0.0.0 from others, too."""
    port: int = 8000
    """Port; 0 takes a free one."""
    name: str | None = None
    """Name of the model in paths; by default that of its job."""
    token_file: str | None = None
    """File with a token that clients must send: Authorization: Bearer TOKEN."""
    certificate: str | None = None
    """File of a certificate in PEM, for https."""
    key: str | None = None
    """File of its private key."""
    poll_seconds: float = 1.0
    """Seconds between looks for a newer version."""
    drain_seconds: float = 0.0
    """Seconds after SIGTERM in which it still answers, but says that it is not ready."""
    timeout_seconds: float = 5.0
    """Seconds after which a request is given up, if it names no timeout of its own."""
    record: str | None = None
    """Folder for a share of the requests with their scores, as Parquet files; `podembed replay` scores them again."""
    record_share: float = 0.01
    """Share of the requests that --record keeps."""
    workers: int = 1
    """Processes that score, over the same memory. One for each two or three cores is enough, since a run of the program
    uses several."""
    shard: str | None = None
    """Hold a share of the tables instead, such as 0/3, for processes with --shards."""
    shards: tuple[str, ...] = ()
    """Score with rows of these processes, as URLs: all shards of the run, in any order."""
    recommend: str | None = None
    """Feature of the items among which POST /recommend finds the best; podembed[retrieval] for models of two towers."""
    items: str | None = None
    """Parquet file with a row for each item, its key first: these are recommended, and requests may leave out their
    other columns."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Score recorded requests again, with the versions that answered, and compare the bits.

    Exits with 1 if one differs.
    """

    log: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LOG")]
    """Folder that `podembed serve --record` wrote, or a glob of its files."""
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|URL")]
    """The run, whose versions are loaded again; or a server, which is asked about what it answered with its version."""


Publishing = Publish | Versions | Rollback | PinCommit | Serve | Replay

PublishingCommand = (
    Annotated[Publish, tyro.conf.subcommand("publish")]
    | Annotated[Versions, tyro.conf.subcommand("versions")]
    | Annotated[Rollback, tyro.conf.subcommand("rollback")]
    | Annotated[PinCommit, tyro.conf.subcommand("pin")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
)


def run(command: Publishing) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, InputError, StorageError: see `jobs.outcomes` for the words and codes.
    """
    match command:
        case Publish():
            return _publish(command)
        case Versions():
            return _versions(command)
        case Rollback():
            return _rollback(command)
        case PinCommit():
            return _pin(command)
        case Serve():
            return _serve(command)
        case Replay():
            return _replay(command)


def _publish(command: Publish) -> int:
    from podembed.orchestrator.api.clock import SYSTEM_CLOCK
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.serving.publish.copies import described
    from podembed.serving.publish.following import Following
    from podembed.serving.publish.publisher import Offer, publish
    from podembed.workers.storage.storage_errors import StorageError

    options = {
        "to": command.to,
        "require": command.require,
        "max_drop": command.max_drop,
        "keep": command.keep,
        "outputs": command.outputs,
        "rows": command.rows,
        "min_count": command.min_count,
        "folder": current_folder(),
    }

    def tell(found: Offer) -> None:
        version = found.version.name
        if found.refused is not None:
            print(f"{version} is not offered: {found.refused}", file=sys.stderr, flush=True)
        elif found.is_new:
            print(f"{version} is offered as number {found.number}", flush=True)
        else:
            print(f"{version} is the version that counts already", flush=True)
        if found.copied is not None:
            print("\n".join(described(found.copied, str(command.to))), flush=True)

    if not (command.follow or command.every_commit):
        found = publish(command.run, commit=command.commit, **options)
        tell(found)
        return EXIT_REFUSED if found.refused is not None else 0
    if command.commit is not None:
        raise ConfigurationError(
            "Found --commit beside --follow. Expected one of them, since --follow takes each newest commit. Leave out "
            "--commit."
        )
    # An evaluation may take longer than the time between two commits.
    options["measures"] = False
    following = Following(command.run, every_commit=command.every_commit, options=options)
    told = ""
    while True:
        try:
            for found in following.new():
                tell(found)
        except (ConfigurationError, StorageError) as error:
            # The next commit may be published, and a storage may answer again.
            if str(error) != told:
                print(f"not published: {error}", file=sys.stderr, flush=True)
            told = str(error)
        SYSTEM_CLOCK.sleep(following.poll_s)


def _versions(command: Versions) -> int:
    from podembed.orchestrator.api.text import printable
    from podembed.orchestrator.run.reference import open_published
    from podembed.serving.publish.listing import render_versions

    print(printable(render_versions(open_published(command.run))))
    return 0


def _rollback(command: Rollback) -> int:
    from podembed.orchestrator.run.reference import open_published
    from podembed.serving.publish.listing import roll_back

    pointer = roll_back(open_published(command.run), command.version)
    print(f"{pointer.version} counts again, as number {pointer.number}")
    return 0


def _pin(command: PinCommit) -> int:
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.run.reference import open_published
    from podembed.serving.publish.listing import pin, pinned

    store = open_published(command.run)
    if command.commit is None and command.remove:
        raise ConfigurationError("Found --remove without --commit. Expected both. Name the commit, or list the pins.")
    if command.commit is None:
        print(pinned(store))
        return 0
    print(pin(store, command.commit, reason=command.reason, remove=command.remove))
    return 0


def _serve(command: Serve) -> int:
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.run.reference import open_published, split_reference

    try:
        import httptools  # noqa: F401
        import orjson  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"Found no package {error.name}. Expected it, since the server stands on it. Install podembed[serve]."
        ) from error
    from podembed.serving.publish.listing import published_now
    from podembed.serving.server.endpoints import Limits
    from podembed.serving.server.serve import serve
    from podembed.serving.server.server_config import ServerConfig
    from podembed.serving.server.shares import ShardPlace

    url, commit = split_reference(command.run)
    if commit is not None:
        raise ConfigurationError(
            f"Found commit {commit} in {command.run}. Expected a run, since a server follows its versions. Publish the "
            f"commit: podembed publish {command.run}."
        )
    store = open_published(url)
    if offer := published_now(store, url, folder=current_folder()):
        print(f"{offer.version.name} is offered as number {offer.number}", flush=True)
    config = ServerConfig(
        host=command.host,
        port=command.port,
        name=command.name,
        token=_token(command.token_file),
        certificate=command.certificate,
        key=command.key,
        poll_s=command.poll_seconds,
        drain_s=command.drain_seconds,
        limits=Limits(timeout_s=command.timeout_seconds),
        record=command.record,
        record_share=command.record_share,
        shard=ShardPlace.of(command.shard) if command.shard is not None else None,
        shards=command.shards,
        recommend=command.recommend,
        items=command.items,
        workers=command.workers,
    )
    serve(store, config, run=url, told=lambda line: print(line, flush=True))
    return 0


def _replay(command: Replay) -> int:
    from podembed.serving.server.replay import render, replay

    found = replay(command.log, command.target)
    print(render(found))
    return EXIT_REFUSED if found.num_other else 0


def _token(path: str | None) -> str | None:
    from podembed.orchestrator.api.config import ConfigurationError

    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"Found no way to read {path} ({error}). Expected a text file with a token. Create it first."
        ) from error
    if not token:
        raise ConfigurationError(
            f"Found nothing in {path}. Expected a token. Write one, such as of `openssl rand -hex 32`."
        )
    return token
