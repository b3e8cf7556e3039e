"""`Quarantine`: failure domains in which hosts failed again and again, and until when they are not used. A value; it
knows no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from podembed.orchestrator.decisions.failure_domain import FailureDomain

EARLY_FAULTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """See the module.

    Attributes:
      after: faults within `period_s` after which a domain rests.
      first_s: how long at first; each further fault doubles it, up to `period_s`.
      faults: by domain, when its hosts failed, rising.
      early: by domain, when a device process there failed soon after its start, rising.
    """

    after: int
    first_s: float
    period_s: float
    faults: Mapping[FailureDomain, tuple[float, ...]] = field(default_factory=dict)
    early: Mapping[FailureDomain, tuple[float, ...]] = field(default_factory=dict)

    def noted(self, domain: FailureDomain, now_s: float, *, is_early: bool = False) -> Quarantine:
        """The same with one more fault; those older than the period are forgotten.

        Args:
          is_early: a device process failed soon after its start. A second one makes the domain rest for the whole
            period: what a machine lacks does not come back by itself.
        """
        recent = tuple(at for at in self.faults.get(domain, ()) if now_s - at < self.period_s)
        found = replace(self, faults={**self.faults, domain: (*recent, now_s)})
        if not is_early:
            return found
        before = tuple(at for at in self.early.get(domain, ()) if now_s - at < self.period_s)
        return replace(found, early={**self.early, domain: (*before, now_s)})

    def fails_early(self, domain: FailureDomain) -> bool:
        """Whether device processes there fail again and again soon after their start."""
        return len(self.early.get(domain, ())) >= EARLY_FAULTS

    def resting(self, now_s: float) -> dict[FailureDomain, float]:
        """Domains that are not to be used, and for how many seconds yet."""
        left = {domain: self._until_s(domain, times) - now_s for domain, times in self.faults.items()}
        return {domain: seconds for domain, seconds in left.items() if seconds > 0}

    def _until_s(self, domain: FailureDomain, times: tuple[float, ...]) -> float:
        if self.fails_early(domain):
            return self.early[domain][-1] + self.period_s
        if len(times) < self.after:
            return times[-1]
        return times[-1] + min(self.first_s * 2 ** (len(times) - self.after), self.period_s)
