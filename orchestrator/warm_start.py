"""Beginning a new run from the tables of another run's commit: which table comes from where, decided before anything is read.

Every difference between the commit and the job needs a rule that says it is meant; without one the plan is refused with all of them at once.
The plan is a pure function. Reading follows it bucket by bucket, also where the new run cuts a table into another number of buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from embedding.table_spec import TableSpec
from orchestrator.bucket_overlap import Cut, overlap, partners
from orchestrator.config import ConfigurationError
from orchestrator.manifest import Manifest
from orchestrator.text_tables import columns
from workers.checkpoint_files import TableFiles, read_bucket
from workers.storage import Store


class WarmStartRefused(ConfigurationError):
    """The commit's tables are not those of the job, and no rule says that this is meant.

    Attributes:
      differences: one sentence each.
    """

    def __init__(self, differences: Sequence[str], commit: str) -> None:
        super().__init__(
            f"Found differences between the tables of commit {commit} and those of the job:\n"
            + "\n".join(f"  - {difference}" for difference in differences)
            + "\nExpected the same tables, or a rule for each that is not: TABLE=reinit, TABLE=rename=OLD, OLD=drop."
        )
        self.differences = tuple(differences)


class RuleKind(Enum):
    """What becomes of a table."""

    SAME = "same"  # loaded from the table of the same name
    REINIT = "reinit"  # begins with initial values, whatever the commit has
    DROP = "drop"  # the commit's table is left behind
    RENAME = "rename"  # loaded from a table of another name


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """A rule for one table. `source` is the commit's table to load, for RENAME alone."""

    kind: RuleKind
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStart:
    """How one table of the new run begins. `source` is None for initial values."""

    table: str
    num_buckets: int
    source: TableFiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartPlan:
    """The beginning of a run.

    Attributes:
      run_id, commit: where the tables come from.
      tables: in the job's order.
      left_behind: tables of the commit that the new run does not use.
    """

    run_id: str
    commit: str
    tables: tuple[TableStart, ...]
    left_behind: tuple[str, ...]

    def describe(self) -> str:
        """The plan as a table, for people."""
        rows = [("table", "from", "buckets")]
        for start in self.tables:
            cut = f"{start.source.num_buckets} -> {start.num_buckets}" if start.source else f"{start.num_buckets}"
            rows.append((start.table, start.source.name if start.source else "initial values", cut))
        rows += [("-", f"{name} (left behind)", "-") for name in self.left_behind]
        return f"Warm start from {self.commit} of run {self.run_id}\n" + columns(rows)


def parse_rules(texts: Iterable[str]) -> dict[str, TableRule]:
    """Rules as people type them: `users=same`, `users=reinit`, `ads=drop`, `users=rename=members`.

    Raises:
      ConfigurationError: another form, or two rules for one table.
    """
    rules: dict[str, TableRule] = {}
    for text in texts:
        table, _, rest = text.partition("=")
        kind, separator, source = rest.partition("=")
        is_rename = kind == RuleKind.RENAME.value
        is_whole = bool(source) if is_rename else not separator
        if not table or kind not in {known.value for known in RuleKind} or not is_whole:
            raise ConfigurationError(
                f"Found rule '{text}'. Expected TABLE=same, TABLE=reinit, TABLE=rename=OLD or OLD=drop. Write it in one of these forms."
            )
        if table in rules:
            raise ConfigurationError(f"Found two rules for table '{table}'. Expected one. Leave one out.")
        rules[table] = TableRule(kind=RuleKind(kind), source=source if is_rename else None)
    return rules


def plan_warm_start(
    manifest: Manifest, specs: Sequence[TableSpec], rules: Mapping[str, TableRule] | None = None
) -> WarmStartPlan:
    """Decides where each table of a new run begins.

    The optimizer is compared by the names and widths of its slots: a commit says nothing of the rule's constants, such as the learning rate,
    which may differ.

    Args:
      manifest: of the commit to start from.
      specs: the tables of the new run.
      rules: by table of the new run; DROP by table of the commit. Tables without a rule are SAME.

    Raises:
      WarmStartRefused: with every table that was added, removed or changed without a rule, and every rule that fits nothing.
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
        found = _differences(spec, rule, source_name, sources, dropped)
        differences += found
        used |= {source_name} if source_name in sources else set()
        source = sources[source_name] if source_name and not found else None
        starts.append(TableStart(table=spec.name, num_buckets=spec.layout.num_buckets, source=source))
    differences += [
        f"table '{name}' of the commit is not in the job ({name}=drop leaves it behind, TABLE=rename={name} loads it)"
        for name in sources
        if name not in used | dropped | wanted
    ]
    differences += _rule_differences(rules, wanted, sources)
    if differences:
        raise WarmStartRefused(differences, manifest.name)
    loaded = {start.source.name for start in starts if start.source}
    return WarmStartPlan(
        run_id=manifest.run_id,
        commit=manifest.name,
        tables=tuple(starts),
        left_behind=tuple(name for name in sources if name not in loaded),
    )


def read_buckets(
    store: Store, source: TableFiles, *, num_buckets: int, out: Mapping[int, Sequence[np.ndarray]]
) -> None:
    """Fills buckets of a table that is cut into `num_buckets` from a commit that cut it into any other number.

    Each file of the commit is read once, verified, and kept only while it is copied. Padding positions are not touched.

    Args:
      source: of the commit; the same rows and arrays as the table that is filled.
      num_buckets: of the table that is filled; a power of two.
      out: bucket → its arrays in the order of `source.arrays`, each `[rows per bucket, width]`.

    Raises:
      ChunkDamaged: a file is not what was committed; buckets may then be partly filled.
      ValueError: an array of `out` has another shape.
    """
    _check_out(source, num_buckets, out)
    wanted: dict[int, list[int]] = {}
    for bucket in sorted(out):
        for source_bucket in partners(Cut(num_buckets, bucket), source.num_buckets):
            wanted.setdefault(source_bucket, []).append(bucket)
    for source_bucket, buckets in sorted(wanted.items()):
        values = read_bucket(store, source, source_bucket)
        for bucket in buckets:
            shared = overlap(Cut(num_buckets, bucket), Cut(source.num_buckets, source_bucket), num_rows=source.num_rows)
            for target, value in zip(out[bucket], values, strict=True):
                target[shared.one] = value[shared.other]


def _differences(
    spec: TableSpec, rule: TableRule, source_name: str | None, sources: Mapping[str, TableFiles], dropped: set[str]
) -> list[str]:
    """Why a table of the job cannot begin as its rule says."""
    name = spec.name
    if rule.kind is RuleKind.DROP:
        return [f"table '{name}' is in the job, but its rule is drop ({name}=reinit begins it anew)"]
    if source_name is None:
        return []
    if source_name in dropped:
        return [f"table '{name}' is to be loaded from '{source_name}', whose rule is drop (take one of the two away)"]
    if source_name not in sources:
        if rule.kind is RuleKind.RENAME:
            return [f"table '{name}' is to be loaded from '{source_name}', which the commit does not have"]
        return [f"table '{name}' is not in the commit ({name}=reinit begins it anew, {name}=rename=OLD loads another)"]
    source = sources[source_name]
    found = {array.name: array.width for array in source.arrays}
    hint = f"({name}=reinit begins it anew)"
    differences = []
    if source.num_rows != spec.num_rows:
        differences.append(f"table '{name}' has {spec.num_rows} rows, in the commit {source.num_rows} {hint}")
    if source.dim != spec.dim:
        differences.append(f"table '{name}' has dimension {spec.dim}, in the commit {source.dim} {hint}")
    elif found != spec.widths or [*found] != [*spec.widths]:
        differences.append(
            f"table '{name}' has an optimizer with slots {_slots(spec.widths)}, in the commit {_slots(found)} {hint}"
        )
    types = {array.dtype for array in source.arrays} - {"float32"}
    if types:
        differences.append(f"table '{name}' is float32, in the commit partly {', '.join(sorted(types))} {hint}")
    return differences


def _rule_differences(rules: Mapping[str, TableRule], wanted: set[str], sources: Mapping[str, TableFiles]) -> list[str]:
    """Rules that name nothing: most likely a slip of the pen."""
    found = []
    for name, rule in rules.items():
        if rule.kind is RuleKind.DROP and name not in sources:
            found.append(f"the rule {name}=drop names no table of the commit (it has {', '.join(sorted(sources))})")
        if rule.kind is not RuleKind.DROP and name not in wanted:
            found.append(f"a rule for '{name}' names no table of the job (it has {', '.join(sorted(wanted))})")
        if (rule.kind is RuleKind.RENAME) != (rule.source is not None):
            found.append(f"the rule for '{name}' is {rule.kind.value} with source {rule.source}")
    return found


def _slots(widths: Mapping[str, int]) -> str:
    slots = [f"{name} ({width})" for name, width in widths.items() if name != "rows"]
    return ", ".join(slots) or "none"


def _check_out(source: TableFiles, num_buckets: int, out: Mapping[int, Sequence[np.ndarray]]) -> None:
    if num_buckets < 1 or num_buckets & (num_buckets - 1):
        raise ValueError(
            f"Found {num_buckets} buckets for table '{source.name}'. Expected a power of two. Take the number of the new run's record."
        )
    expected = [(-(-source.num_rows // num_buckets), array.width) for array in source.arrays]
    for bucket, arrays in out.items():
        shapes = [array.shape for array in arrays]
        if not 0 <= bucket < num_buckets or shapes != expected:
            raise ValueError(
                f"Found bucket {bucket} with arrays {shapes} for table '{source.name}'. Expected a bucket below {num_buckets} with "
                f"{expected}. Pass rows, then the slots, of the buckets held here."
            )
