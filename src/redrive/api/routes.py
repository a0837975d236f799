"""The routes. Each asks the desk one thing and encodes what it says."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, FastAPI
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from redrive import __version__
from redrive.api import problems
from redrive.api.asked import ActBody, Asked, ReplayBody, act_of, body_of
from redrive.api.documented import CURSOR, FILTERS, LIMIT, complete, documented
from redrive.api.guard import Guard
from redrive.desk import AuditEntry, Count, Desk, Job, LetterView, Page, Refusal, Statistics
from redrive.errors import BadParameter, BadRequest, JobNotFound
from redrive.letter import Act

PREFIX = "/api/v1"
MAX_REFUSALS = 500
_UNSAFE_NAME = re.compile(r"[^0-9A-Za-z_-]")

office = APIRouter(tags=["office"])
operations = APIRouter(tags=["operations"])


class Jobs(Struct, frozen=True):
    rows: list[Job]


class Replay(Struct, frozen=True):
    """A replay and the letters it refused to send, the first 500 of them; `job.refused` counts all."""

    job: Job
    refusals: list[Refusal]


class Audit(Struct, frozen=True):
    """Newest first."""

    rows: list[AuditEntry]


class Health(Struct, frozen=True):
    status: str


def build(desk: Desk, registry: CollectorRegistry) -> ASGIApp:
    app = FastAPI(title="redrive", version=__version__, docs_url=None, redoc_url=None)
    app.state.desk, app.state.registry = desk, registry
    app.include_router(office, prefix=PREFIX)
    app.include_router(operations, prefix=PREFIX)
    # Probes and scrapers look for these at the root.
    app.include_router(operations, include_in_schema=False)
    for kind in problems.STATUS:
        app.add_exception_handler(kind, problems.of_error)
    app.add_exception_handler(HTTPException, problems.of_http)
    app.add_exception_handler(Exception, problems.of_defect)
    complete(app)
    return Guard(app)


def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def answer(value: Any, status: int = 200) -> Response:
    return Response(problems.as_json(value), status, media_type="application/json")


# ---- letters


@office.get("/letters", **documented(Page, parameters=(*FILTERS, LIMIT, CURSOR)))
async def list_letters(request: Request) -> Response:
    """Letters that match all filters, newest first."""
    asked = Asked(request, "limit", "cursor", filters=True)
    wanted, limit = asked.filter(), asked.limit()
    try:
        return answer(await desk_of(request).page(wanted, limit, asked.one("cursor")))
    except BadRequest as error:
        raise BadParameter("cursor", error.problem) from error


@office.get("/letters/count", **documented(Count, parameters=FILTERS))
async def count_letters(request: Request) -> Response:
    """How many letters match; `exact` is false where counting was given up."""
    return answer(await desk_of(request).count(Asked(request, filters=True).filter()))


@office.get("/letters/{letter_id}", **documented(LetterView))
async def read_letter(request: Request, letter_id: str) -> Response:
    """Everything about one letter, masked where it must be."""
    Asked(request)
    return answer(await desk_of(request).read(letter_id))


@office.get(
    "/letters/{letter_id}/body", **documented(str, media="application/octet-stream", nothing="The body is null")
)
async def download_body(request: Request, letter_id: str) -> Response:
    """The raw bytes of the body, unless something of the letter is masked."""
    Asked(request)
    body = await desk_of(request).body(letter_id)
    if body is None:
        return Response(status_code=204)
    name = _UNSAFE_NAME.sub("", letter_id)[:64]
    headers = {
        "Content-Disposition": f'attachment; filename="letter-{name}.bin"',
        "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    }
    return Response(body, headers=headers, media_type="application/octet-stream")


@office.post("/letters/{letter_id}/replay", **documented(Job, status=202, body=ActBody))
async def replay_letter(request: Request, letter_id: str) -> Response:
    """Send it back to where it came from."""
    return answer(await desk_of(request).replay_one(letter_id, await act_of(request)), 202)


@office.post("/letters/{letter_id}/resolve", **documented(LetterView, body=ActBody))
async def resolve_letter(request: Request, letter_id: str) -> Response:
    """It was mended by hand."""
    desk, act = desk_of(request), await act_of(request)
    await desk.resolve(letter_id, act)
    return answer(await desk.read(letter_id))


@office.post("/letters/{letter_id}/discard", **documented(LetterView, body=ActBody))
async def discard_letter(request: Request, letter_id: str) -> Response:
    """It need not be sent again."""
    desk, act = desk_of(request), await act_of(request)
    await desk.discard(letter_id, act)
    return answer(await desk.read(letter_id))


@office.post("/letters/{letter_id}/restore", **documented(LetterView, body=ActBody))
async def restore_letter(request: Request, letter_id: str) -> Response:
    """Back to pending, from whatever end it had."""
    desk, act = desk_of(request), await act_of(request)
    await desk.restore(letter_id, act)
    return answer(await desk.read(letter_id))


@office.delete("/letters/{letter_id}", **documented(status=204, body=ActBody))
async def purge_letter(request: Request, letter_id: str) -> Response:
    """Delete it for good."""
    await desk_of(request).purge(letter_id, await act_of(request))
    return Response(status_code=204)


# ---- replays


@office.post("/replays", **documented(Job, status=202, body=ReplayBody))
async def create_replay(request: Request) -> Response:
    """Freeze a selection of letters and send it back. A letter that is not pending is refused, with a row."""
    body = await body_of(request, ReplayBody)
    return answer(await desk_of(request).replay(body.ids, Act(body.who, body.why), rate=body.rate), 202)


@office.get("/replays", **documented(Jobs, parameters=(LIMIT,)))
async def list_replays(request: Request) -> Response:
    """Newest first."""
    return answer(Jobs(await desk_of(request).jobs(Asked(request, "limit").limit())))


@office.get("/replays/{job_id}", **documented(Replay))
async def read_replay(request: Request, job_id: str) -> Response:
    Asked(request)
    found = await desk_of(request).job(job_id)
    if found is None:
        raise JobNotFound(job_id)
    job, refusals = found
    return answer(Replay(job, refusals[:MAX_REFUSALS]))


@office.post("/replays/{job_id}/pause", **documented(Job, body=ActBody))
async def pause_replay(request: Request, job_id: str) -> Response:
    """Send nothing more of it until it is resumed."""
    return answer(await desk_of(request).pause(job_id, await act_of(request)))


@office.post("/replays/{job_id}/resume", **documented(Job, body=ActBody))
async def resume_replay(request: Request, job_id: str) -> Response:
    return answer(await desk_of(request).resume(job_id, await act_of(request)))


@office.post("/replays/{job_id}/cancel", **documented(Job, body=ActBody))
async def cancel_replay(request: Request, job_id: str) -> Response:
    """Never send the rest of it; its letters stay pending."""
    return answer(await desk_of(request).cancel(job_id, await act_of(request)))


# ---- the whole


@office.get("/statistics", **documented(Statistics))
async def statistics(request: Request) -> Response:
    Asked(request)
    return answer(await desk_of(request).statistics())


@office.get("/audit", **documented(Audit, parameters=(LIMIT,)))
async def audit(request: Request) -> Response:
    """Who did what and why, newest first."""
    return answer(Audit(await desk_of(request).audit(Asked(request, "limit").limit())))


@operations.get("/health", **documented(Health))
async def health(request: Request) -> Response:
    """The process answers."""
    Asked(request)
    return answer(Health("live"))


@operations.get("/ready", **documented(Health))
async def ready(request: Request) -> Response:
    """The store answers too; 503 while it does not."""
    Asked(request)
    await desk_of(request).jobs(1)
    return answer(Health("ready"))


@operations.get("/metrics", **documented(str, media="text/plain"))
async def metrics(request: Request) -> Response:
    """Counters of this process for Prometheus."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
