"""Beginning a new run from another run's commit: which table and which dense arrays come from where, decided before any
of them is read.

Every difference between the commit and the job needs a rule that says it is meant. Otherwise the plan is refused, and
the error names all such differences at once. The plan is a pure function; `workers.host.warm_start` carries it out. The
new run begins with step 0 and its own data: only state is taken over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import columns
from podembed.orchestrator.api.vocabulary_totals import totals_of
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.meaning import MeaningRecord, changes_of_dense_input, changes_of_table
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.host.warm_start import TableStart
from podembed.workers.job.job import DENSE_PARTS, JobConfig

DENSE = "@dense"
ACCEPT = "@accept"


class WarmStartRefused(ConfigurationError):
    """The commit's tables are not those of the job, and no rule says that this is meant.

    Attributes:
      differences: one sentence each.
    """

    def __init__(self, differences: Sequence[str], commit: str) -> None:
        super().__init__(
            f"Found differences between the tables of commit {commit} and those of the job:\n"
            + "\n".join(f"  - {difference}" for difference in differences)
            + "\nExpected the same tables, or a rule for each that is not: TABLE=grow, TABLE=reinit, TABLE=rows, "
            f"TABLE=rename=OLD, OLD=drop, {ACCEPT}=TABLE."
        )
        self.differences = tuple(differences)


class RuleKind(Enum):
    """The use of a table of the commit."""

    SAME = "same"  # loaded from the table of the same name
    REINIT = "reinit"  # begins with initial values, whatever the commit has
    DROP = "drop"  # the commit's table is left behind
    RENAME = "rename"  # loaded from a table of another name
    # the table has more rows now: those of the commit are loaded with their slots, the others begin with initial values
    GROW = "grow"
    ROWS = "rows"  # rows are loaded, from a table of the same or another name; slots begin with their initial values


class DenseRule(Enum):
    """The use of the commit's dense model."""

    SAME = "same"  # parameters and the state of the dense optimizer are loaded
    PARAMS = "params"  # parameters and the state of the model are loaded; the optimizer begins anew
    REINIT = "reinit"  # all of it begins anew

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the dense state that are loaded."""
        return {DenseRule.SAME: DENSE_PARTS, DenseRule.PARAMS: DENSE_PARTS[:2], DenseRule.REINIT: ()}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """A rule for one table. `source` is the commit's table to load, for RENAME, and for ROWS if it has another name."""

    kind: RuleKind
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartPlan:
    """The beginning of a run.

    Attributes:
      run_id, commit: where the tables come from.
      tables: in the job's order.
      left_behind: tables of the commit that the new run does not use.
      dense: files of the dense arrays that are loaded.
      dense_parts: parts of the dense state that must be loaded whole; the others keep their first values.
    """

    run_id: str
    commit: str
    tables: tuple[TableStart, ...]
    left_behind: tuple[str, ...]
    dense: tuple[DenseFile, ...]
    dense_parts: tuple[str, ...]

    def describe(self) -> str:
        """The plan as a table, for people."""
        rows = [("table", "from", "buckets")]
        for start in self.tables:
            cut = f"{start.source.num_buckets} -> {start.num_buckets}" if start.source else f"{start.num_buckets}"
            origin = start.source.name if start.source else "initial values"
            if start.source and start.num_rows is not None and start.num_rows > start.source.num_rows:
                origin += f" ({start.source.num_rows:,} rows, {start.num_rows - start.source.num_rows:,} new ones)"
            rows.append((start.table, origin if start.with_slots else f"{origin} (rows alone)", cut))
        rows += [("-", f"{name} (left behind)", "-") for name in self.left_behind]
        rows.append((DENSE, f"{len(self.dense)} arrays" if self.dense else "initial values", "-"))
        return f"Warm start from {self.commit} of run {self.run_id}\n" + columns(rows)


def parse_rules(texts: Iterable[str]) -> dict[str, TableRule]:
    """Rules for tables as people type them: `users=same`, `users=reinit`, `users=rows`, `users=rows=members`,
    `users=rename=members`, `users=grow`, `ads=drop`. The one for the dense model is left out; see `parse_dense_rule`.

    Raises:
      ConfigurationError: another form, or two rules for one table.
    """
    rules: dict[str, TableRule] = {}
    for text in texts:
        table, _, rest = text.partition("=")
        if table in (DENSE, ACCEPT):
            continue
        kind, separator, source = rest.partition("=")
        is_whole = {
            RuleKind.RENAME.value: bool(source),
            RuleKind.ROWS.value: bool(source) or not separator,
        }.get(kind, not separator)
        if not table or kind not in {known.value for known in RuleKind} or not is_whole:
            raise ConfigurationError(
                f"Found rule '{text}'. Expected TABLE=same, TABLE=grow, TABLE=reinit, TABLE=rows, TABLE=rows=OLD, "
                f"TABLE=rename=OLD, OLD=drop {ACCEPT}=TABLE or {DENSE}=... Write it in one of these forms."
            )
        if table in rules:
            raise ConfigurationError(f"Found two rules for table '{table}'. Expected one. Leave one out.")
        rules[table] = TableRule(kind=RuleKind(kind), source=source or None)
    return rules


def parse_accepted(texts: Iterable[str]) -> frozenset[str]:
    """The tables of the job, or `@dense`, whose rows or numbers are taken although they mean something else:
    `@accept=users`, `@accept=@dense`.
    """
    parts = [text.partition("=") for text in texts]
    return frozenset(name for key, _, name in parts if key == ACCEPT)


def parse_dense_rule(texts: Iterable[str]) -> DenseRule:
    """The rule for the dense model, `@dense=same|params|reinit`; SAME if there is none.

    Raises:
      ConfigurationError: another word, or two rules.
    """
    words = [text.partition("=")[2] for text in texts if text.partition("=")[0] == DENSE]
    if len(words) > 1 or any(word not in {known.value for known in DenseRule} for word in words):
        raise ConfigurationError(
            f"Found {', '.join(f'{DENSE}={word}' for word in words)}. Expected one of {DENSE}=same, {DENSE}=params, "
            f"{DENSE}=reinit. Write it in one of these forms."
        )
    return DenseRule(words[0]) if words else DenseRule.SAME


def plan_warm_start(
    manifest: Manifest,
    specs: Sequence[TableSpec],
    rules: Mapping[str, TableRule] | None = None,
    *,
    dense: DenseRule = DenseRule.SAME,
    meanings: tuple[MeaningRecord, MeaningRecord] | None = None,
    accepted: Collection[str] = (),
) -> WarmStartPlan:
    """Decides where each table of a new run begins.

    The optimizer is compared by the names and widths of its slots, since a commit says nothing of the rule's constants.
    `meanings` do, but for the learning rate, which may differ.

    Args:
      manifest: manifest of the commit to start from.
      specs: the tables of the new run.
      rules: rules by table of the new run; DROP by table of the commit. Tables without a rule are SAME.
      dense: for the dense model. Whether its arrays fit is found by the device processes, which alone know its shapes.
      meanings: meanings of the commit's run and of the job; None where that is not to be compared.
      accepted: answers of `parse_accepted`.

    Raises:
      WarmStartRefused: with every table that was added, removed or changed without a rule, every one whose rows mean
        something else, and every rule that fits nothing.
    """
    rules = rules or {}
    sources = {table.name: table for table in manifest.tables}
    wanted = {spec.name for spec in specs}
    dropped = {name for name, rule in rules.items() if rule.kind is RuleKind.DROP}
    differences: list[str] = []
    starts: list[TableStart] = []
    used: set[str] = set()
    for spec in specs:
        rule = rules.get(spec.name, TableRule(kind=RuleKind.SAME))
        source_name = None if rule.kind in (RuleKind.REINIT, RuleKind.DROP) else rule.source or spec.name
        found = _differences(spec, rule, source_name, sources, dropped, manifest.counters)
        source_table = sources.get(source_name or "")
        if meanings is not None and source_table is not None and not found and spec.name not in accepted:
            found += _other_meanings(spec.name, source_table.name, rules.get(spec.name), meanings)
        differences += found
        used |= {source_name} if source_name in sources else set()
        source = sources[source_name] if source_name and not found else None
        starts.append(
            TableStart(
                table=spec.name,
                num_buckets=spec.layout.num_buckets,
                num_rows=None if spec.keys.columns else spec.num_rows,
                source=source,
                with_slots=rule.kind is not RuleKind.ROWS,
                num_steps=manifest.step,
            )
        )
    differences += [
        f"table '{name}' of the commit is not in the job ({name}=drop leaves it behind, TABLE=rename={name} loads it)"
        for name in sources
        if name not in used | dropped | wanted
    ]
    differences += _rule_differences(rules, wanted, sources)
    differences += [
        f"the rule {ACCEPT}={name} names no table of the job (it has {', '.join(sorted(wanted))}, and {DENSE})"
        for name in sorted(accepted)
        if name not in wanted | {DENSE}
    ]
    if meanings is not None and dense is not DenseRule.REINIT and DENSE not in accepted:
        differences += [
            f"{phrase} ({DENSE}=reinit begins the dense model anew, {ACCEPT}={DENSE} takes it all the same)"
            for phrase in changes_of_dense_input(*meanings)
        ]
    if differences:
        raise WarmStartRefused(differences, manifest.name)
    loaded = {start.source.name for start in starts if start.source}
    return WarmStartPlan(
        run_id=manifest.run_id,
        commit=manifest.name,
        tables=tuple(starts),
        left_behind=tuple(name for name in sources if name not in loaded),
        dense=tuple(leaf for leaf in manifest.dense if leaf.key.split("/", 1)[0] in dense.parts),
        dense_parts=dense.parts,
    )


def _differences(
    spec: TableSpec,
    rule: TableRule,
    source_name: str | None,
    sources: Mapping[str, TableFiles],
    dropped: set[str],
    counters: Mapping[str, int],
) -> list[str]:
    """Why a table of the job cannot begin as its rule says.

    Args:
      counters: of the commit.
    """
    name = spec.name
    if rule.kind is RuleKind.DROP:
        return [f"table '{name}' is in the job, but its rule is drop ({name}=reinit begins it anew)"]
    if source_name is None:
        return []
    if source_name in dropped:
        return [f"table '{name}' is to be loaded from '{source_name}', whose rule is drop (take one of the two away)"]
    if source_name not in sources:
        if rule.source is not None:
            return [f"table '{name}' is to be loaded from '{source_name}', which the commit does not have"]
        return [f"table '{name}' is not in the commit ({name}=reinit begins it anew, {name}=rename=OLD loads another)"]
    source = sources[source_name]
    found = {array.name: array.width for array in (source.arrays[0], *source.slots)}
    hint = f"({name}=reinit begins it anew)"
    totals = totals_of(counters, source.name)
    # A commit of keys that says nothing of them is of no driver's making.
    num_keys = source.num_rows if not source.is_dynamic else totals.num_keys if totals else 0
    is_dynamic, own = bool(spec.keys.columns), spec.keys.columns
    widths = {slot: width for slot, width in spec.widths.items() if slot not in own}
    differences = []
    if source.is_dynamic and not is_dynamic:
        return [
            f"table '{name}' has row numbers for keys, in the commit keys that come and go (podembed export writes "
            f"them with their rows, for a vocabulary and initial_rows; {name}=reinit begins it anew)"
        ]
    if isinstance(spec.keys, DynamicKeys):
        # Keys are placed anew. Whether a bucket has room for its share is seen when they are read.
        room = spec.num_rows - spec.layout.num_buckets * spec.keys.num_reserved
        if num_keys > room:
            differences.append(
                f"table '{name}' has room for {room:,} keys, in the commit {num_keys:,} have a row "
                f"(capacity={num_keys} takes them, {name}=reinit begins it anew)"
            )
    elif source.num_rows > spec.num_rows and rule.kind is RuleKind.GROW:
        differences.append(
            f"table '{name}' has {spec.num_rows} rows, fewer than the {source.num_rows} in the commit: it cannot grow "
            f"{hint}"
        )
    elif source.num_rows < spec.num_rows and rule.kind is not RuleKind.GROW:
        grows = f"({name}=grow keeps the rows of the commit and adds new ones, {name}=reinit begins it anew)"
        differences.append(f"table '{name}' has {spec.num_rows} rows, in the commit {source.num_rows} {grows}")
    elif source.num_rows > spec.num_rows:
        differences.append(f"table '{name}' has {spec.num_rows} rows, in the commit {source.num_rows} {hint}")
    if source.dim != spec.dim:
        differences.append(f"table '{name}' has dimension {spec.dim}, in the commit {source.dim} {hint}")
    elif rule.kind is not RuleKind.ROWS and (found != widths or [*found] != [*widths]):
        differences.append(
            f"table '{name}' has an optimizer with slots {_slots(widths)}, in the commit {_slots(found)} "
            f"({name}=rows loads the rows alone, {name}=reinit begins it anew)"
        )
    types = {array.dtype for array in (source.arrays[0], *source.slots)} - {"float32"}
    if types:
        differences.append(f"table '{name}' is float32, in the commit partly {', '.join(sorted(types))} {hint}")
    return differences


def _other_meanings(
    name: str, source: str, rule: TableRule | None, meanings: tuple[MeaningRecord, MeaningRecord]
) -> list[str]:
    """Why rows that fit a table would belong to other values there."""
    with_slots = rule is None or rule.kind is not RuleKind.ROWS
    found = changes_of_table(*meanings, source=source, table=name, is_chosen=rule is not None, with_slots=with_slots)
    hint = f"({name}=reinit begins it anew, {ACCEPT}={name} takes its rows all the same)"
    return [f"table '{name}': {phrase} {hint}" for phrase in found]


def _rule_differences(rules: Mapping[str, TableRule], wanted: set[str], sources: Mapping[str, TableFiles]) -> list[str]:
    """Rules that name nothing: most likely a slip of the pen."""
    found = []
    for name, rule in rules.items():
        if rule.kind is RuleKind.DROP and name not in sources:
            found.append(f"the rule {name}=drop names no table of the commit (it has {', '.join(sorted(sources))})")
        if rule.kind is not RuleKind.DROP and name not in wanted:
            found.append(f"a rule for '{name}' names no table of the job (it has {', '.join(sorted(wanted))})")
        needs, may_have = rule.kind is RuleKind.RENAME, rule.kind in (RuleKind.RENAME, RuleKind.ROWS)
        if (needs and rule.source is None) or (not may_have and rule.source is not None):
            found.append(f"the rule for '{name}' is {rule.kind.value} with source {rule.source}")
    return found


def refuse_hashed_growth(job: JobConfig, rules: Mapping[str, TableRule]) -> None:
    """Refuses to grow a table whose rows are chosen by hash. With another size each value has another row, so it would
    meet what another value has learned.

    Raises:
      ConfigurationError: naming the table and the column.
    """
    names = dict(zip(map(id, job.tables), job.table_names, strict=True))
    columns_of = job.resolved_data.features
    for feature, declared in job.features.items():
        rule = rules.get(names[id(declared.table)])
        column = columns_of[feature]
        if rule is not None and rule.kind is RuleKind.GROW and getattr(column, "mode", "") == "hash":
            name = names[id(declared.table)]
            raise ConfigurationError(
                f"Found {name}=grow for a table whose rows feature '{feature}' chooses by hash. Expected ids or a "
                "vocabulary: a hash is taken modulo the rows, so the old ones would belong to other values. Keep its "
                f"size, or begin it anew ({name}=reinit)."
            )


def _slots(widths: Mapping[str, int]) -> str:
    slots = [f"{name} ({width})" for name, width in widths.items() if name != "rows"]
    return ", ".join(slots) or "none"
