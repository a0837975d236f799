"""Errors as the API tells them: application/problem+json with the facts of the error as members."""

from __future__ import annotations

import http
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from redrive import errors

RETRY_AFTER = "2"
_FACTS = ("parameter", "letter_id", "job_id", "expected", "actual")

STATUS: dict[type[Exception], int] = {
    errors.BadRequest: 400,
    errors.LetterNotFound: 404,
    errors.JobNotFound: 404,
    errors.BodyMissing: 404,
    errors.BodyWithheld: 403,
    errors.StateConflict: 409,
    errors.JobConflict: 409,
    errors.StoreUnavailable: 503,
    errors.BlobsUnavailable: 503,
}


class Problem(Struct, frozen=True, omit_defaults=True):
    """RFC 9457. Which of the members below `detail` are there depends on the problem."""

    title: str
    status: int
    detail: str = ""
    parameter: str = ""
    letter_id: str = ""
    job_id: str = ""
    expected: str = ""
    actual: str = ""


def problem(status: int, detail: str = "", **facts: str) -> Response:
    body = Problem(title=http.HTTPStatus(status).phrase, status=status, detail=detail, **facts)
    headers = {"Retry-After": RETRY_AFTER} if status == 503 else None
    return Response(as_json(body), status, headers, "application/problem+json")


def of_error(_: Request, error: Exception) -> Response:
    """The answer to an error that is in STATUS."""
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    return problem(status, str(error), **{name: str(getattr(error, name)) for name in _FACTS if hasattr(error, name)})


def of_http(_: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    status = getattr(error, "status_code", 500)
    answer = problem(status)
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


def of_defect(_: Request, error: Exception) -> Response:
    """Nobody expected it: the log has the details, a stranger gets none."""
    return problem(500, "something went wrong; the log of redrive says what")


def as_json(value: Any) -> bytes:
    """JSON, whatever text a broker put in there: what is not Unicode is shown as U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_cleaned(msgspec.to_builtins(value)))


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_cleaned(name): _cleaned(one) for name, one in value.items()}
        case list() | tuple():
            return [_cleaned(one) for one in value]
        case _:
            return value
