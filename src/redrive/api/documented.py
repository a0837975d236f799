"""The OpenAPI description of routes that encode their answers with msgspec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from redrive.api.problems import Problem
from redrive.letter import Kind, State
from redrive.query import MAX_PAGE

_REF = "#/components/schemas/{name}"
_kinds: list[Any] = []


def documented(
    returns: Any = None,
    *,
    status: int = 200,
    parameters: Sequence[dict[str, Any]] = (),
    body: Any = None,
    media: str = "application/json",
    nothing: str = "",
) -> dict[str, Any]:
    """What a route tells OpenAPI: what it returns, takes and refuses. Pass it as keywords to the route."""
    schema = {"type": "string"} if returns is str else _schema(returns)
    success: dict[str, Any] = {"description": "Done"}
    if returns is not None:
        success["content"] = {media: {"schema": schema}}
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"content": {"application/json": {"schema": _schema(body)}}}
    answers: dict[int | str, Any] = {status: success, "4XX": _refused("Refused"), "5XX": _refused("Failed")}
    if nothing:
        answers[204] = {"description": nothing}
    return {
        "status_code": status,
        "response_class": Response,
        "responses": answers,
        "openapi_extra": extra,
    }


def parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


_TEXT = {"type": "string"}
LIMIT = parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 50}, "How many at most")
CURSOR = parameter("cursor", _TEXT, "`next` of the page before")
FILTERS = (
    parameter("state", {"type": "array", "items": {"enum": [*State]}}, "In one of these states"),
    parameter("source", _TEXT, "Of this source; * stands for anything"),
    parameter("group", _TEXT, "Of this consumer group"),
    parameter("kind", {"enum": [*Kind]}, "With this kind of failure"),
    parameter("error_type", _TEXT, "With this type of error"),
    parameter("handler", _TEXT, "Failed in this handler"),
    parameter("message_type", _TEXT, "Of this type of message"),
    parameter("attribute", {"type": "array", "items": _TEXT}, "With this attribute, as name:value"),
    parameter("text", _TEXT, "With these words in their error or attributes"),
    parameter("since", _TEXT, "Filed at this time or later: RFC 3339, or milliseconds since the epoch"),
    parameter("until", _TEXT, "Filed before this time"),
)


def complete(app: FastAPI) -> None:
    """Put the schemas that `documented` refers to into the description."""
    description = app.openapi()
    _, schemas = msgspec.json.schema_components(_kinds, ref_template=_REF)
    description.setdefault("components", {}).setdefault("schemas", {}).update(schemas)


def _schema(kind: Any) -> dict[str, Any]:
    """A reference into the components; the kind is noted so that `complete` can put it there."""
    _kinds.append(kind)
    [schema], _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _refused(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/problem+json": {"schema": _schema(Problem)}}}
