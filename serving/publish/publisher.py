"""`publish`: makes a version of a commit, and the version that counts of it.

The order is what makes it safe: the commit is pinned, the version is written and judged, then the pointer names it.
Killed anywhere, the newest pointer names a whole version. `copies.py` has what is other where the version is offered in
another store.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from podembed.embedding.initializers import Constant, RandomNormal, TruncatedNormal, Uniform
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.checkpoint import load
from podembed.orchestrator.commit.manifest import Manifest, commit_file, to_json
from podembed.orchestrator.commit.published import (
    COPY_VERSION,
    CopyRecord,
    add_pointer,
    hold,
    newest_pointer,
    remove_ended,
    version_name,
)
from podembed.orchestrator.commit.verification import size_damages
from podembed.orchestrator.run.history_record import read_history
from podembed.serving.artifact.export_files import ExportFiles
from podembed.serving.artifact.export_model import PROGRAM, describe_model
from podembed.serving.artifact.exported_columns import ExportedVocabulary
from podembed.serving.artifact.exported_model import LoadedModel, program_of
from podembed.serving.predict.committed_model import CommittedModel, CommittedRows, with_commit
from podembed.serving.predict.evaluate import figures_of
from podembed.serving.publish.copies import Copied, clean_copy, copy_files, open_copy, put
from podembed.serving.publish.gate import Gate
from podembed.serving.publish.probe import encode_probe, probe_columns
from podembed.serving.publish.rewriting import rewrite_tables
from podembed.serving.publish.tidying import TIDY_EVERY, tidy
from podembed.serving.publish.versions import (
    PROBE,
    SCHEMA,
    VERSION_FORMAT,
    NamedFile,
    RefusedVersion,
    Version,
    content_digest,
    manifest_digest,
    read_file,
    read_manifest,
    read_version,
    write_file,
    write_refusal,
    write_version,
)
from podembed.serving.row_form import RowForm
from podembed.serving.served_files import SCORED_PARTS, served_files
from podembed.workers.data.input_errors import InputError
from podembed.workers.declared_types import several
from podembed.workers.job.job import JobConfig
from podembed.workers.job.quality import QualityError
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store, place
from podembed.workers.storage.strict_json import canonical_bytes

KEEP = 2
_HELD_S = 3600.0
_PROBE_KEYS = 64
_logger = logging.getLogger(__name__)
_DESCRIBED = (Constant, RandomNormal, TruncatedNormal, Uniform)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The result of `publish`.

    Attributes:
      version: the version.
      number: of the pointer that offers it; None where a gate refused it.
      refused: why it is not offered, or None.
      is_new: whether another version counted before.
      copied: what was copied to another store; None where the run itself offers it.
    """

    version: Version
    number: int | None
    refused: str | None
    is_new: bool
    copied: Copied | None = None


def publish(
    run: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str] | None = None,
    commit: str | None = None,
    require: str | Sequence[str] = (),
    max_drop: float | None = None,
    keep: int = KEEP,
    outputs: str | Sequence[str] = (),
    rows: str = "float32",
    min_count: int = 0,
    measures: bool = True,
    job: JobConfig | None = None,
    folder: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> Offer:
    """Offers a commit to servers.

    Args:
      run: folder or URL of a run, for its newest commit, or `RUN@COMMIT`.
      to: folder or URL of a copy for servers, which offers the version in place of the run. What it needs of the commit
        is copied.
      commit: name of the commit, or its step.
      require: bounds of metrics of the commit's evaluation, such as `auc>=0.7`.
      max_drop: how much worse than in the version before these metrics may be.
      keep: number of the newest versions whose commits the run, or the copy, keeps.
      outputs: names of those that servers answer with; by default all. Features that none depends on are not asked
        for.
      rows: form of all rows of a copy: `float32`, `bfloat16`, or `int8` with a scale for each row.
      min_count: keys that were seen less often are left out of a copy. They are answered as keys without a row.
      measures: whether rows of another form are evaluated, if the job has evaluation data.
      job: job of a run that was started with a job as a value.
      folder: where the job's module may lie if it is not installed.
      clock: of the machine.

    Raises:
      ConfigurationError: no run, no commit, no job, or a model that cannot be exported.
      ChunkDamaged, StorageError: the commit is damaged, or went meanwhile.
    """
    if keep < 1:
        raise ConfigurationError(f"Found keep={keep}. Expected at least 1, the version that counts. Keep 1 or more.")
    gate, form = Gate.of(several(require), max_drop), RowForm(rows=rows, min_count=min_count)
    if to is None and not form.is_plain:
        raise ConfigurationError(
            "Found --rows or --min-count without --to. Expected a copy, since a run has its rows as they were trained. "
            "Pass --to URL."
        )

    def make(model: CommittedModel) -> Offer:
        store, name = model.state.store, model.state.manifest.name
        with held(store, name, clock=clock):
            if to is not None:
                return _Copy(model, form, measures, clock).offered(place(to), several(outputs), gate, keep)
            digest = manifest_digest(store, name)
            offer = _offered(store, _version_of(model, store, digest, several(outputs), clock), gate, keep, clock)
        _tidied(store, offer, clock)
        return offer

    return with_commit(run, make, commit=commit, job=job, folder=folder)


@contextmanager
def held(store: Store, commit: str, *, clock: Clock) -> Iterator[None]:
    """Keeps a commit while it is offered."""
    remove_ended(store, now_unix_s=clock.wall_s())
    file = hold(store, commit, reason="is being published", unix_s=clock.wall_s(), seconds=_HELD_S)
    try:
        yield
    finally:
        store.delete(file)


def _tidied(store: Store, offer: Offer, clock: Clock) -> None:
    """Tidies up from time to time. The version is offered, whether that works or not."""
    if not offer.is_new or offer.number is None or offer.number % TIDY_EVERY:
        return
    try:
        tidy(store, now_unix_s=clock.wall_s())
    except StorageError as error:
        _logger.warning("nothing is tidied up in %s: %s", store.location, error)


def _offered(store: Store, version: Version, gate: Gate, keep: int, clock: Clock) -> Offer:
    pointer = newest_pointer(store)
    counts = pointer is not None and pointer.version == version.name
    refused = _refusal(store, version.metrics, gate)
    if counts and refused is None and pointer is not None and pointer.keep == keep:
        return Offer(version=version, number=pointer.number, refused=None, is_new=False)
    if refused is not None:
        write_refusal(store, RefusedVersion(version=version.name, reason=refused, unix_s=clock.wall_s()))
        return Offer(version=version, number=None, refused=refused, is_new=False)
    require_whole(store, version)
    made = add_pointer(store, version=version.name, action="publish", keep=keep, unix_s=clock.wall_s())
    is_new = pointer is None or pointer.version != version.name
    return Offer(version=version, number=made.number, refused=None, is_new=is_new)


def _refusal(store: Store, metrics: Mapping[str, float], gate: Gate) -> str | None:
    """Why a version with these metrics is not offered, or None."""
    pointer = newest_pointer(store)
    # A version that counts is no drop from itself, but it must keep the rules.
    return gate.refusal(metrics, read_version(store, pointer.version).metrics if pointer is not None else {})


class _Copy:
    """Offers a commit in a copy."""

    def __init__(self, model: CommittedModel, form: RowForm, measures: bool, clock: Clock) -> None:
        self._model, self._form, self._measures, self._clock = model, form, measures, clock
        self._source, self._manifest = model.state.store, model.state.manifest

    def offered(self, url: str, outputs: Sequence[str], gate: Gate, keep: int) -> Offer:
        """As `_offered`, in the copy at a URL."""
        manifest, clock = self._manifest, self._clock
        if self._form.min_count and not any(table.is_dynamic for table in manifest.tables):
            raise ConfigurationError(
                f"Found --min-count {self._form.min_count} and no table with a capacity in {self._source.location}. "
                "Expected one, since others do not count their ids. Leave --min-count out."
            )
        record = CopyRecord(
            format_version=COPY_VERSION,
            run_id=manifest.run_id,
            source=self._source.location,
            rows=self._form.rows,
            min_count=self._form.min_count,
            created_unix_s=clock.wall_s(),
        )
        target = open_copy(url, record)
        with held(target, manifest.name, clock=clock):
            digest, copied = manifest_digest(self._source, manifest.name), Copied()
            # Nothing is copied of what is not offered.
            if _refusal(target, _metrics_of(self._source, manifest), gate) is None:
                digest, copied = self._copied(target)
            version = _version_of(self._model, target, digest, outputs, clock, self._form)
            offer = _offered(target, version, gate, keep, clock)
        try:
            clean_copy(target, now_unix_s=clock.wall_s())
        except StorageError as error:
            # The version is offered all the same.
            _logger.warning("nothing is deleted in %s: %s", target.location, error)
        _tidied(target, offer, clock)
        return replace(offer, copied=copied)

    def _copied(self, target: Store) -> tuple[str, Copied]:
        """Copies the commit. Returns the digest of its manifest there, and what was copied."""
        source, manifest = self._source, self._manifest
        if self._form.is_plain:
            copied = copy_files(source, target, manifest)
            data = read_manifest(source, manifest.name)
        else:
            made, error, num_files, num_bytes = rewrite_tables(source, target, manifest, self._form)
            dense = copy_files(source, target, replace(manifest, tables=()))
            figures, unmeasured = self._figures()
            copied = Copied(
                num_files=num_files + dense.num_files,
                num_bytes=num_bytes + dense.num_bytes,
                error=error,
                figures=figures,
                unmeasured=unmeasured,
            )
            data = to_json(made)
        put(target, commit_file(manifest.name), data)
        return hashlib.sha256(data).hexdigest(), copied

    def _figures(self) -> tuple[dict[str, tuple[float, float]], str]:
        """Figures of the run's rows and of those in the copy, or why there are none."""
        if not self._measures:
            return {}, "it was not asked for"
        if not self._model.job.data.eval_paths:
            return {}, "the job has no evaluation data"
        try:
            before, after = (figures_of(self._model, form=form).evaluation.figures for form in (None, self._form))
        except (ConfigurationError, InputError, QualityError) as error:
            return {}, str(error)
        return {name: (before[name], after[name]) for name in before if name in after}, ""


def require_whole(store: Store, version: Version) -> None:
    """Reads the files of a version, and looks whether those of its commit that servers read are there.

    Raises:
      ConfigurationError: the commit, or a file of it, is not there any more.
      DocumentRefused: a file of the version, or the manifest of its commit, is damaged.
    """
    for name in version.files:
        read_file(store, version, name)
    try:
        damage = next(iter(size_damages(store, served_files(load(store, version.commit)))), None)
        found = f"{damage.found} in {damage.name}" if damage is not None else None
        if not store.exists(commit_file(version.commit)):
            found = "no manifest"
    except NameNotFound:
        found = "no manifest"
    if found is not None:
        raise ConfigurationError(
            f"Found {found} of commit {version.commit} in {store.location}. Expected a whole commit, since servers "
            "read its rows. Publish another one; `podembed fsck` names all damage."
        )


def _version_of(
    model: CommittedModel,
    store: Store,
    digest: str,
    wanted: Sequence[str],
    clock: Clock,
    form: RowForm | None = None,
) -> Version:
    """Writes the files and the record of a version.

    Args:
      store: where it is offered.
      digest: SHA-256 of the manifest there.
      form: form of the rows there; None for that of the run.
    """
    manifest = model.state.manifest
    kept = _content_of(model, wanted, form)
    files: dict[str, NamedFile] = {name: write_file(store, data) for name, data in kept.items()}
    named = version_name(
        step=manifest.step, generation=manifest.generation, digest=content_digest(manifest.name, digest, files)
    )
    parent = newest_pointer(store)
    version = Version(
        name=named,
        format_version=VERSION_FORMAT,
        run_id=manifest.run_id,
        commit=manifest.name,
        manifest_sha256=digest,
        files=files,
        metrics=_metrics_of(model.state.store, manifest),
        parent=parent.version if parent is not None else None,
        created_unix_s=clock.wall_s(),
    )
    write_version(store, version)
    return version


def _content_of(model: CommittedModel, wanted: Sequence[str], form: RowForm | None) -> dict[str, bytes]:
    """The files of a version, by what they are: its program, its schema, vocabularies and a probe."""
    kept: dict[str, bytes] = {}

    @contextmanager
    def open_file(name: str) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        kept[name] = file.getvalue()

    dense = model.dense(SCORED_PARTS)
    document, _ = describe_model(model, ExportFiles(open_file), dense, wanted)
    for table, spec in zip(document["tables"], model.specs, strict=True):
        table["keys"] = _keys_of(spec)
    kept[PROBE] = _probe(CommittedRows(model, form=form), model, document, kept, dense)
    kept[SCHEMA] = canonical_bytes(document)
    return kept


def _metrics_of(store: Store, manifest: Manifest) -> dict[str, float]:
    """Metrics of the commit's evaluation, or of one of this state that was made after it."""
    if manifest.metrics:
        return dict(manifest.metrics)
    made = reversed(read_history(store).evaluations)
    own = (one.metrics for one in made if (one.step, one.generation) == (manifest.step, manifest.generation))
    return dict(next(own, {}))


def _keys_of(spec: Any) -> dict[str, Any] | None:
    """How a table whose keys come and go answers for keys without a row.

    Raises:
      ConfigurationError: with values of an initializer that is not one of ours.
    """
    if not isinstance(spec.keys, DynamicKeys):
        return None
    described: dict[str, Any] = {"default": spec.keys.default, "initializer": None}
    if spec.keys.default == "first":
        initializer = spec.initializer
        if not (isinstance(initializer, _DESCRIBED) and is_dataclass(initializer)):
            raise ConfigurationError(
                f"Found initializer {initializer!r} of table '{spec.name}', whose keys without a row have their first "
                f"value. Expected one of {', '.join(kind.__name__ for kind in _DESCRIBED)}, which a server knows. "
                "Declare one of these, or default='zeros' or 'shared'."
            )
        described["initializer"] = {
            "name": type(initializer).__name__,
            "arguments": asdict(initializer),
            "seed": spec.seed,
        }
    return described


class _CommittedTable:
    """Rows of a table of the commit by number or key, as exported models look them up."""

    def __init__(self, rows: CommittedRows, at: int, shape: tuple[int, int]) -> None:
        self._rows, self._at, self.shape = rows, at, shape

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(ids, return_inverse=True)
        return self._rows.rows(self._at, distinct)[inverse]


def _probe(
    rows: CommittedRows,
    model: CommittedModel,
    document: Mapping[str, Any],
    kept: Mapping[str, bytes],
    dense: Mapping[str, np.ndarray],
) -> bytes:
    """The probe, with the outputs that an exported model has for it."""
    keys = {at: rows.keys(at)[:_PROBE_KEYS] for at, table in enumerate(document["tables"]) if table["keys"] is not None}
    vocabularies = {name: data for name, data in kept.items() if name.startswith("vocabularies/")}
    reader = LoadedModel(
        document,
        program=program_of(kept[PROGRAM], document, model.state.location),
        dense=dense,
        tables=[_CommittedTable(rows, at, (one.num_rows, one.dim)) for at, one in enumerate(model.specs)],
        vocabularies={name: ExportedVocabulary(data.decode()) for name, data in vocabularies.items()},
    )
    columns = probe_columns(document, vocabularies=vocabularies, keys=keys)
    # As a server gets them.
    columns = json.loads(json.dumps(columns))
    outputs = reader.outputs(columns)
    wrong = [name for name, values in outputs.items() if values.dtype.kind == "f" and not np.isfinite(values).all()]
    if wrong:
        raise ConfigurationError(
            f"Found numbers that are not finite in output {wrong[0]!r} of {model.state.location}. Expected finite "
            "ones. Publish an older commit; `podembed fsck --values` looks for such numbers in the tables."
        )
    return encode_probe(columns, outputs)
