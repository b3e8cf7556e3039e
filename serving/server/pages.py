"""What a person or a tool reads of a server: its front page, and its OpenAPI description."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from podembed.serving.publish.versions import Version
from podembed.version import version as own_version

_TYPES = {"INT64": {"type": "integer"}, "BYTES": {"type": "string"}, "FP32": {"type": "number"}}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.15rem 1rem .15rem 0;border-bottom:1px solid #ddd}"
    "pre{background:#f4f4f4;padding:.8rem;overflow-x:auto;white-space:pre-wrap;word-break:break-all}"
    ".warning{background:#fff3cd;padding:.5rem .8rem}"
)


def front_page(
    *,
    name: str,
    version: Version,
    step: int,
    bits: str,
    inputs: Sequence[Mapping[str, Any]],
    example: Mapping[str, Any],
    outputs: Mapping[str, Sequence[int]],
    address: str,
    error: str | None,
) -> str:
    """The page at `/`: what is served, and a request to copy."""
    body = json.dumps(example).replace("'", "'\\''")
    curl = f"curl {address}/score -H 'Content-Type: application/json' -d '{body}'"
    promise = {
        "same": "A score has the same bits at every place of every request, and the bits that were published.",
        "close": "Scores are close to those that were published. Their last bits differ on this machine.",
    }[bits]
    rows = "".join(
        f"<tr><td>{html.escape(one['name'])}</td><td>{one['datatype']}</td><td>{html.escape(str(one['shape']))}</td></tr>"
        for one in inputs
    )
    metrics = ", ".join(f"{one} {value:.4f}" for one, value in version.metrics.items()) or "not evaluated"
    warning = f"<p class=warning>The newest pointer is not followed: {html.escape(error)}</p>" if error else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(name)}</h1>{warning}"
        f"<p>Version <b>{html.escape(version.name)}</b>: step {step:,}, {html.escape(metrics)}. {promise}</p>"
        f"<h2>Ask it</h2><pre>{html.escape(curl)}</pre>"
        "<p>Each column has one value a sample, or one value for all samples of the request. A bag is a list.</p>"
        f"<h2>Columns</h2><table><tr><th>name</th><th>type</th><th>shape</th></tr>{rows}</table>"
        f"<h2>Outputs</h2><p>{html.escape(', '.join(outputs))}</p>"
        "<h2>Also here</h2><p><a href=/openapi.json>/openapi.json</a> describes all requests. "
        f"<a href='/v2/models/{html.escape(name)}'>/v2/models/{html.escape(name)}</a> speaks the Open Inference "
        "Protocol. <a href=/metrics>/metrics</a> is for Prometheus, <a href=/v2/health/ready>/v2/health/ready</a> for "
        "Kubernetes.</p></html>"
    )


def openapi(
    manifest: Mapping[str, Any], *, name: str, inputs: Sequence[Mapping[str, Any]], example: Mapping[str, Any]
) -> dict[str, Any]:
    """The OpenAPI 3.1 description of all requests."""
    columns = {one["name"]: {"type": "array", "items": _item(one)} for one in inputs}
    scores = {"type": "array", "items": {"type": "number"}}
    error = _content({"type": "object", "properties": {"error": {"type": "string"}}}, "What was found and expected")
    errors = {"400": error, "401": error, "409": error, "413": error, "503": error, "504": error}
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {"type": "array", "items": {}},
            "parameters": {"type": "object"},
        },
    }
    tensors = {"type": "array", "items": tensor}
    asked = [
        {"name": "timeout", "in": "query", "schema": {"type": "number"}, "description": "Seconds until it is given up"},
        {
            "name": "min_version",
            "in": "query",
            "schema": {"type": "string"},
            "description": "The oldest version that may answer: its name, or its step",
        },
    ]
    score = {
        "summary": "Scores of some samples, given as columns",
        "parameters": asked,
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": columns, "required": list(columns)},
                    "example": dict(example),
                }
            },
        },
        "responses": {
            "200": _content(
                {
                    "type": "object",
                    "properties": {**dict.fromkeys(manifest["outputs"], scores), "model_version": {"type": "string"}},
                },
                "One score a sample",
            ),
            **errors,
        },
    }
    infer = {
        "summary": "The Open Inference Protocol, also with binary tensors",
        "parameters": asked,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"type": "object", "properties": {"inputs": tensors}}}},
        },
        "responses": {
            "200": _content(
                {"type": "object", "properties": {"model_version": {"type": "string"}, "outputs": tensors}}, "Outputs"
            ),
            **errors,
        },
    }

    def get(summary: str) -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}

    return {
        "openapi": "3.1.0",
        "info": {"title": name, "version": str(own_version()), "description": "Scores of one version of a model."},
        "paths": {
            "/score": {"post": score},
            f"/v2/models/{name}/infer": {"post": infer},
            f"/v2/models/{name}": get("Columns, outputs and version of the model"),
            "/v2/health/live": get("The process answers"),
            "/v2/health/ready": get("A version is loaded, warm and proven"),
            "/example": get("A body for /score"),
            "/metrics": get("Series for Prometheus"),
        },
    }


def _item(tensor: Mapping[str, Any]) -> dict[str, Any]:
    one = _TYPES[tensor["datatype"]]
    return one if len(tensor["shape"]) == 1 else {"type": "array", "items": one}


def _content(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": dict(schema)}}}
