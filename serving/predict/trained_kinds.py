"""What kind of values each column had when a run was trained, and that what is read now has the same.

Integers, text and times of one meaning have other hashes and are other numbers. So a model would give wrong scores and
say nothing. Lists and single values are no kinds of their own here: their values become the same rows.
"""

from __future__ import annotations

from podembed.orchestrator.events.reporter import print_sentence
from podembed.orchestrator.events.run import InputRecordDamaged
from podembed.orchestrator.run.input_record import read_input
from podembed.orchestrator.run.meaning import kinds_held
from podembed.serving.predict.committed_model import CommittedModel
from podembed.workers.columns.decode import kinds_of
from podembed.workers.columns.id_columns import NULLS
from podembed.workers.data.config import InputData
from podembed.workers.data.extra_columns import VectorColumn
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.times import TimeScale
from podembed.workers.formats.registry import declared_content
from podembed.workers.input.index import InputIndex, build_index

NUMBERS = "numbers"


def trained_kinds(model: CommittedModel) -> dict[str, str]:
    """By column integers, numbers, text, times or durations, for the id columns, dense columns and extra columns of the
    job. Empty where the run did not record it, as the first versions did not.
    """
    known = read_input(model.state.store)
    for damage in known.damaged:
        print_sentence(InputRecordDamaged(file=damage.name, found=damage.found))
    record = known.at(model.state.manifest.step)
    if record is None or not record.training:
        return {}
    data = model.job.resolved_data
    kinds: dict[str, str] = {}
    for file in record.training:
        # One without a value of a column does not say its kind.
        found = _kinds(file.content, file.extra_content)
        kinds |= {column: kind for column, kind in found.items() if kinds.get(column, NULLS) == NULLS}
    # Of sources whose files do not say it, the declaration then, or that of today if it was not recorded.
    declared = _kinds(declared_content(data), "")
    declared |= kinds_held(record.meaning, data.id_columns) if record.meaning else {}
    kinds = declared | {column: kind for column, kind in kinds.items() if kind != NULLS}
    # Of dense columns only times are recorded. Where a unit or an origin is declared, they hold nothing else.
    plain = [one.name for one in data.dense_columns if isinstance(one, VectorColumn) or one.scale == TimeScale()]
    return kinds and dict.fromkeys(plain, NUMBERS) | kinds


def index_as_trained(model: CommittedModel, data: InputData) -> InputIndex:
    """The files of some data, of which the columns have the kinds of values that the run was trained with.

    Raises:
      InputError: as `build_index`, or a column has another kind in a file.
    """
    index, trained = build_index(data), trained_kinds(model)
    dense = dict.fromkeys((column.name for column in data.dense_columns), NUMBERS)
    by_text = _read_as_text(data)
    for file in index.files:
        kinds = _kinds(file.content or declared_content(data), file.extra_content)
        for column, found in (kinds and dense | kinds).items():
            expected = trained.get(column, found)
            if NULLS in (expected, found):
                continue
            if _alike(expected, in_text=column in by_text) != _alike(found, in_text=column in by_text):
                raise InputError(
                    f"Found column {column!r} with {found} in {file.path}. Expected {expected}, as the run in "
                    f"{model.state.store.location} was trained with, since equal values of another kind become other "
                    f"rows or numbers. Write the column as {expected}."
                )
    return index


def _kinds(content: str, extra: str) -> dict[str, str]:
    """By column. What one holds as ids says more than what it holds as numbers."""
    kinds = kinds_of(extra) | kinds_of(content)
    return {column: kind.removeprefix("lists of ") for column, kind in kinds.items()}


def _alike(kind: str, *, in_text: bool) -> str:
    """One word for kinds that need no difference: where integers are meant, a schema with other numbers is refused."""
    kind = "integers" if kind == NUMBERS else kind
    return "integers" if in_text and kind == "text" else kind


def _read_as_text(data: InputData) -> frozenset[str]:
    """Columns of vocabularies alone, whose lines are integers and text alike."""
    modes: dict[str, set[str]] = {}
    for source in data.id_columns.values():
        for part in source.parts:
            modes.setdefault(part.column, set()).add(part.mode)
    return frozenset(column for column, found in modes.items() if found == {"vocabulary"})
