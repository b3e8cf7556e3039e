"""`Hold`: what a run holds of one TPU slice on a Ray cluster, and how it gets it.

It is two placement groups. The head group has the resource that Ray gives the first machine of a slice. Whoever has
that has the slice: other programs that reserve slices as Ray's libraries do wait for it. The other group has a bundle
for each host, by the number of its machine. Both last until they are given back, and Ray removes them with the driver
that made them. A bundle of a lost machine waits for one with the same labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.cluster.places import nodes_of
from podembed.orchestrator.cluster.slices.labels import POD_TYPE, selectors
from podembed.orchestrator.decisions.membership import Slice

LOOK_S = 0.1


@dataclass(slots=True, eq=False)
class Hold:
    """See the module.

    Attributes:
      head: None for a slice that is one machine, whose chips are all in the other group.
    """

    name: str
    head: Any | None
    group: Any

    @property
    def machines(self) -> tuple[str, ...]:
        """The node of each host's bundle; empty while it has none."""
        return tuple(nodes_of(self.group))


def hold(
    chosen: Slice,
    topology: Topology,
    bundle: Mapping[str, float],
    *,
    give_back: Callable[[Any], None],
    check: Callable[[], None],
) -> Hold:
    """Reserves a slice, its head first.

    Args:
      bundle: Ray resources of a host.
      give_back: removes a placement group.
      check: called often meanwhile; what it raises ends the wait, and nothing stays reserved.
    """
    made: list[Any] = []
    try:
        head = _head(chosen, topology)
        if head is not None:
            made.append(head)
            _await(head, check)
        group = _hosts(chosen, topology, bundle)
        made.append(group)
        _await(group, check)
    except BaseException:
        for one in made:
            give_back(one)
        raise
    return Hold(chosen.name, head, group)


def _head(chosen: Slice, topology: Topology) -> Any | None:
    from ray.util.placement_group import placement_group

    if topology.hosts == 1:
        return None
    selector = {**selectors(chosen, topology)[0], POD_TYPE: topology.pod_type}
    return placement_group([{f"TPU-{topology.pod_type}-head": 1}], bundle_label_selector=[selector])


def _hosts(chosen: Slice, topology: Topology, bundle: Mapping[str, float]) -> Any:
    from ray.util.tpu import slice_placement_group

    reserved = slice_placement_group(
        topology=topology.shape,
        accelerator_version=topology.generation,
        resources_per_bundle=dict(bundle),
        num_slices=1,
        pg_per_slice=True,
        strategy="STRICT_SPREAD",
        # With a name in it, Ray reserves this slice and no other one.
        bundle_label_selector=selectors(chosen, topology),
    )
    (group,) = reserved.slice_placement_groups
    return group


def _await(group: Any, check: Callable[[], None]) -> None:
    import ray

    ready = group.ready()
    while not ray.wait([ready], timeout=LOOK_S)[0]:
        check()
    ray.get(ready)


def await_machines(
    holds: Sequence[Hold], wanted: Sequence[Slice], check: Callable[[], None], pause: Callable[[float], None]
) -> None:
    """Waits until the bundles of slices are on the machines that were chosen: those of lost machines move to what came
    in their place.
    """
    while any(found.machines != chosen.machines for found, chosen in zip(holds, wanted, strict=True)):
        check()
        pause(LOOK_S)


def demand_group(topology: Topology, num_slices: int, bundle: Mapping[str, float]) -> Any:
    """A placement group for so many slices, whichever they are. Ray's autoscaler starts what it waits for."""
    from ray.util.placement_group import placement_group

    bundles, labels = demanded(topology, num_slices, bundle)
    return placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)


def demanded(
    topology: Topology, num_slices: int, bundle: Mapping[str, float]
) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
    """Bundles of the hosts of so many slices, and the labels that their machines have."""
    count = num_slices * topology.hosts
    return [dict(bundle)] * count, [{POD_TYPE: topology.pod_type}] * count
