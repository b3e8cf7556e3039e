"""`FailureDomain`: machines that fail, leave and rest as one.

A machine is a domain of its own, and the hosts on it share its fate. Where a run uses TPU slices, the machines of a
slice are one domain, since a device gang is useless without one of its members. Decisions are made
over domains; only what places processes (`orchestrator.cluster`) deals with single machines.

A domain says nothing of rows. A host process outlives a fault with its rows if its own machine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FailureDomain:
    """See the module.

    Attributes:
      name: tells domains apart; one that comes back to the cluster has another.
      label: for messages.
    """

    name: str
    label: str = field(default="", compare=False)

    @staticmethod
    def of_machine(machine: str, address: str = "") -> FailureDomain:
        """The domain of a machine that fails alone.

        Args:
          machine: id of the machine's life in the cluster.
        """
        return FailureDomain(machine, f"{address or 'machine'} ({machine[:8]})")
