"""`Gate`: what the evaluation of a commit must say before it is offered."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError

_RULE = re.compile(r"\s*([\w@/.-]+?)\s*(>=|<=|>|<)\s*([-+0-9.eE]+)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_USUAL = "auc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bounds of metrics.

    Attributes:
      rules: name of a metric, how it is compared, and with what.
      max_drop: how much worse than in the version before the metrics of the rules may be, without rules `auc`; None
        for any.
    """

    rules: tuple[tuple[str, str, float], ...] = ()
    max_drop: float | None = None

    @staticmethod
    def of(require: Sequence[str], max_drop: float | None) -> Gate:
        """Args:
          require: such as `auc>=0.7`.

        Raises:
          ConfigurationError: one is no such rule.
        """
        rules = []
        for text in require:
            match = _RULE.fullmatch(text)
            try:
                rules.append((match[1], match[2], float(match[3])) if match else ("", "", float("x")))
            except ValueError as error:
                raise ConfigurationError(
                    f"Found --require {text!r}. Expected a metric, >=, <=, > or <, and a number. Pass it in quotes: "
                    "--require 'auc>=0.7'."
                ) from error
        if max_drop is not None and not max_drop >= 0:
            raise ConfigurationError(f"Found --max-drop {max_drop}. Expected at least 0. Leave it out for any drop.")
        return Gate(rules=tuple(rules), max_drop=max_drop)

    def refusal(self, metrics: Mapping[str, float], before: Mapping[str, float]) -> str | None:
        """Why a commit is not offered, or None.

        Args:
          metrics: of its evaluation.
          before: of the version that counts.
        """
        drops = self.max_drop is not None
        rules = self.rules or (((_USUAL, ">=", float("-inf")),) if drops else ())
        for name, how, bound in rules:
            if name not in metrics:
                found = ", ".join(sorted(metrics)) or "no metric"
                return f"found {found} in the commit; {name} is required: let the job evaluate it at every commit"
            value = metrics[name]
            if not _COMPARE[how](value, bound):
                return f"found {name}={value:.6g}; required {name}{how}{bound:g}"
            worse = (before.get(name, value) - value) * (1 if how[0] == ">" else -1)
            if self.max_drop is not None and not worse <= self.max_drop:
                return f"found {name}={value:.6g} after {before[name]:.6g}; allowed is a drop of {self.max_drop:g}"
        return None
