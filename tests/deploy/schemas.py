"""JSON schemas of what the files in `deploy/kuberay` use of the custom resources, written by hand from public sources.

Sources: `rayjob_types.go` and `raycluster_types.go` of ray-project/kuberay (ray.io/v1), the pod template of Kubernetes
(core/v1), and Kueue's `ResourceFlavor`, `ClusterQueue` and `LocalQueue` (kueue.x-k8s.io/v1beta2). The published schemas
are on no package registry. These know the fields that the files use, and refuse all others: a slip of the pen is found,
and a new field needs a line here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def record(required: Schema, **optional: Schema) -> Schema:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": [*required],
        "additionalProperties": False,
    }


def many(items: Schema, *, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def resource(version: str, kind: str, spec: Schema | None, *, needs_spec: bool = True) -> Schema:
    metadata = record({"name": NAME}, namespace=NAME, labels=TEXTS, annotations=TEXTS)
    required: Schema = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata}
    if spec is None:
        return record(required)
    return record({**required, "spec": spec}) if needs_spec else record(required, spec=spec)


CONTAINER = record(
    {"name": NAME, "image": TEXT, "resources": record({}, requests=QUANTITIES, limits=QUANTITIES)},
    env=many(record({"name": TEXT, "value": {"type": "string"}})),
    volumeMounts=many(record({"name": NAME, "mountPath": TEXT}, readOnly=FLAG)),
)
VOLUME = record(
    {"name": NAME}, configMap=record({"name": NAME}), persistentVolumeClaim=record({"claimName": NAME}, readOnly=FLAG)
)
TOLERATION = record(
    {"key": TEXT, "operator": {"enum": ["Equal", "Exists"]}},
    value=TEXT,
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
)
POD = record(
    {
        "spec": record(
            {"containers": many(CONTAINER)},
            restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
            terminationGracePeriodSeconds=COUNT,
            nodeSelector=TEXTS,
            tolerations=many(TOLERATION),
            volumes=many(VOLUME),
        )
    }
)
HEAD = record({"rayStartParams": TEXTS, "template": POD})
WORKERS = record(
    {"groupName": TEXT, "minReplicas": COUNT, "maxReplicas": COUNT, "rayStartParams": TEXTS, "template": POD},
    replicas=COUNT,
    numOfHosts={"type": "integer", "minimum": 1},
)
CLUSTER = record(
    {"headGroupSpec": HEAD},
    workerGroupSpecs=many(WORKERS),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record({}, version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
)
RAY_JOB = resource(
    "ray.io/v1",
    "RayJob",
    record(
        {"entrypoint": TEXT, "rayClusterSpec": CLUSTER},
        runtimeEnvYAML=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    ),
)
_KUEUE = "kueue.x-k8s.io/v1beta2"
_FLAVOR = record({"name": NAME, "resources": many(record({"name": TEXT, "nominalQuota": QUANTITY}))})
SCHEMAS: dict[str, Schema] = {
    "RayJob": RAY_JOB,
    "ResourceFlavor": resource(
        _KUEUE, "ResourceFlavor", record({}, nodeLabels=TEXTS, tolerations=many(TOLERATION)), needs_spec=False
    ),
    "ClusterQueue": resource(
        _KUEUE,
        "ClusterQueue",
        record(
            {
                "namespaceSelector": {"type": "object"},
                "resourceGroups": many(record({"coveredResources": many(TEXT), "flavors": many(_FLAVOR)})),
            }
        ),
    ),
    "LocalQueue": resource(_KUEUE, "LocalQueue", record({"clusterQueue": NAME})),
}
