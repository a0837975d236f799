"""What a request asks for. Everything it may not say is refused by name."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from redrive import query
from redrive.errors import BadParameter, BadRequest
from redrive.letter import Act
from redrive.query import MAX_PAGE, Filter

DEFAULT_PAGE = 50
MAX_REPLAY = 10_000
Who = Annotated[str, Meta(min_length=1, max_length=200)]
Why = Annotated[str, Meta(max_length=2000)]
T = TypeVar("T")


class ActBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Who does it, and why; both go into the audit trail."""

    who: Who = "api"
    why: Why = ""


class ReplayBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Which letters to send back. `rate` is letters a second."""

    ids: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=1, max_length=MAX_REPLAY)]
    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    who: Who = "api"
    why: Why = ""


class Asked:
    """The query parameters of a request, which may have these names and no others."""

    def __init__(self, request: Request, *names: str, filters: bool = False) -> None:
        self._pairs = request.query_params.multi_items()
        allowed = (*names, *(query.NAMES if filters else ()))
        seen: set[str] = set()
        for name, _ in self._pairs:
            if name not in allowed:
                raise BadParameter(name, f"is not asked for here; known: {', '.join(allowed) or 'none'}")
            if name in names and name in seen:
                raise BadParameter(name, "is given twice")
            seen.add(name)

    def filter(self) -> Filter:
        return query.parse((name, text) for name, text in self._pairs if name in query.NAMES)

    def limit(self) -> int:
        text = self.one("limit") or str(DEFAULT_PAGE)
        if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_PAGE:
            raise BadParameter("limit", f"must be a whole number from 1 to {MAX_PAGE}")
        return int(text)

    def one(self, name: str) -> str | None:
        return next((text for given, text in self._pairs if given == name), None)


async def body_of(request: Request, kind: type[T]) -> T:
    """The JSON body as this type; an empty one is an empty object."""
    Asked(request)
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise BadParameter(path.strip("`.") or "body", problem) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def act_of(request: Request) -> Act:
    body = await body_of(request, ActBody)
    return Act(body.who, body.why)
