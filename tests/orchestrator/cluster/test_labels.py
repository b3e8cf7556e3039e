"""What Ray shows of a run: its processes by run and rank, and the room that is reserved for them."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_calls import of_ray

pytestmark = pytest.mark.ray


def shown() -> tuple[list[str], list[str]]:
    """What `ray list actors --detail` has as repr_name, and the names of placement groups, of all that is alive."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    accessor: Any = state._connect_and_get_accessor()
    actors = [gcs_pb2.ActorTableData.FromString(data) for data in accessor.get_actor_table(None, None)]
    alive = [actor.repr_name for actor in actors if actor.state == gcs_pb2.ActorTableData.ALIVE]
    groups = ray.util.placement_group_table().values()
    return alive, [group["name"] for group in groups if group["state"] == "CREATED"]


def test_processes_are_shown_by_run_and_rank_and_a_second_run_of_that_name_as_well(ray_cluster: None) -> None:
    import ray

    scaling = ScalingConfig(num_hosts=1, resources_per_host={"CPU": 0.2})
    backends = [RayBackend(scaling, lambda event: None, run="clicks") for _ in range(2)]
    launched = [backend.launch(1, lambda: None) for backend in backends]
    try:
        workers = [of_ray(worker).actor for (pair,) in launched for worker in (pair.host, pair.device)]
        ray.get([worker.identity.remote() for worker in workers])
        actors, groups = shown()
    finally:
        for backend, handles in zip(backends, launched, strict=True):
            backend.stop(handles)
    ours = sorted(name for name in actors if name.endswith(" of clicks"))
    assert ours == ["device 0 of clicks"] * 2 + ["host 0 of clicks"] * 2
    assert len({name for name in groups if name.startswith("hosts of clicks ")}) == 2
