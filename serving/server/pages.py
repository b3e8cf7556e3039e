"""What a person or a tool reads of a server: its front page, and its OpenAPI description."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from podembed.serving.publish.versions import Version
from podembed.serving.server.retrieval import MOST_ITEMS, ItemIndex
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
    items: str | None,
) -> str:
    """The page at `/`: what is served, and a request to copy.

    Args:
      items: what it says of the items that it recommends among, or None.
    """
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
    among = f"<p>It {html.escape(items)}. <a href=/openapi.json>POST /recommend</a> asks it.</p>" if items else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(name)}</h1>{warning}"
        f"<p>Version <b>{html.escape(version.name)}</b>: step {step:,}, {html.escape(metrics)}. {promise}</p>{among}"
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
    manifest: Mapping[str, Any],
    *,
    name: str,
    inputs: Sequence[Mapping[str, Any]],
    example: Mapping[str, Any],
    items: ItemIndex | None,
) -> dict[str, Any]:
    """The OpenAPI 3.1 description of all requests."""
    columns = {one["name"]: {"type": "array", "items": _item(one)} for one in inputs}
    filled = set() if items is None else {*items.names} - {items.items.key}
    scores = {key: {"type": "array", "items": {"type": "number"}} for key in manifest["outputs"]}
    score = _post(
        "Scores of some samples, given as columns",
        {"type": "object", "properties": columns, "required": [name for name in columns if name not in filled]},
        {"type": "object", "properties": {**scores, "model_version": _TEXT}},
        example=dict(example),
    )
    infer = _post(
        "The Open Inference Protocol, also with binary tensors",
        {"type": "object", "properties": {"inputs": _TENSORS}},
        {"type": "object", "properties": {"model_version": _TEXT, "outputs": _TENSORS}},
    )
    recommend = {} if items is None else {"/recommend": _recommend(columns, example, items.names)}
    return {
        "openapi": "3.1.0",
        "info": {"title": name, "version": str(own_version()), "description": "Scores of one version of a model."},
        "paths": {
            "/score": score,
            **recommend,
            f"/v2/models/{name}/infer": infer,
            f"/v2/models/{name}": _get("Columns, outputs and version of the model"),
            "/v2/health/live": _get("The process answers"),
            "/v2/health/ready": _get("A version is loaded, warm and proven"),
            "/example": _get("A body for /score"),
            "/metrics": _get("Series for Prometheus"),
        },
    }


_TEXT = {"type": "string"}
_TENSORS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": _TEXT,
            "datatype": _TEXT,
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {"type": "array", "items": {}},
            "parameters": {"type": "object"},
        },
    },
}
_ASKED = [
    {"name": "timeout", "in": "query", "schema": {"type": "number"}, "description": "Seconds until it is given up"},
    {
        "name": "min_version",
        "in": "query",
        "schema": _TEXT,
        "description": "The oldest version that may answer: its name, or its step",
    },
]


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}


def _post(summary: str, body: Mapping[str, Any], answer: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    error = _content({"type": "object", "properties": {"error": _TEXT}}, "What was found and expected")
    return {
        "post": {
            "summary": summary,
            "parameters": _ASKED,
            "requestBody": {"required": True, "content": {"application/json": {"schema": dict(body), **more}}},
            "responses": {
                "200": _content(answer, "One score a sample"),
                **dict.fromkeys(("400", "401", "408", "409", "413", "503", "504"), error),
            },
        }
    }


def _recommend(columns: Mapping[str, Any], example: Mapping[str, Any], item_columns: Sequence[str]) -> dict[str, Any]:
    context = {one: schema for one, schema in columns.items() if one not in item_columns}
    value = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]}
    key = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    body = {
        "type": "object",
        "properties": {
            "context": {"type": "object", "properties": context, "required": list(context)},
            "k": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": 10},
            "without": {"type": "array", "items": key},
            "filter": {
                "type": "object",
                "additionalProperties": {"anyOf": [value, {"type": "array", "items": value}]},
            },
        },
        "required": ["context"],
        "additionalProperties": False,
    }
    answer = {
        "items": {"type": "array", "items": key},
        "score": {"type": "array", "items": {"type": "number"}},
        "model_version": _TEXT,
        "index_version": {"anyOf": [_TEXT, {"type": "null"}]},
    }
    return _post(
        "The best items of all for a context, the best first",
        body,
        {"type": "object", "properties": answer},
        example={"context": {one: values for one, values in example.items() if one in context}, "k": 10},
    )


def _item(tensor: Mapping[str, Any]) -> dict[str, Any]:
    one = _TYPES[tensor["datatype"]]
    return one if len(tensor["shape"]) == 1 else {"type": "array", "items": one}


def _content(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": dict(schema)}}}
