from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from redrive import Redrive, api
from redrive.api.guard import MAX_BODY, Guard
from redrive.desk import Page
from redrive.errors import ConfigError, MissingExtra
from redrive.letter import Act
from redrive.message import Message
from redrive.serve import listen

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\x1b[31m\x9b\u202e\r\n{{7*7}}"
V1 = "/api/v1"
CHANGES = [
    ("POST", f"{V1}/letters/x/replay"), ("POST", f"{V1}/letters/x/resolve"), ("POST", f"{V1}/letters/x/discard"),
    ("POST", f"{V1}/letters/x/restore"), ("DELETE", f"{V1}/letters/x"), ("POST", f"{V1}/replays"),
    ("POST", f"{V1}/replays/x/pause"), ("POST", f"{V1}/replays/x/resume"), ("POST", f"{V1}/replays/x/cancel"),
]  # fmt: skip


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Redrive]:
    sources = {
        "orders": {"attributes": {"order": "body:id"}},
        "payments": {"attributes": {"card": "body:card"}, "masked": ["card"]},
    }
    app = Redrive(f"embedded://{tmp_path}/broker.db", store=f"sqlite://{tmp_path}/letters.db", sources=sources)
    async with app:
        yield app


@pytest.fixture
async def client(app: Redrive) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(api.create(app.desk(), app.metrics.registry))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8400") as client:
        yield client


async def filed(app: Redrive, body: Any = b'{"id":1}', error: str = "bad", source: str = "orders") -> str:
    return await app.dead_letter(body, ValueError(error), "bill", source, 3, group="billing")


async def ids(client: httpx2.AsyncClient, query: str = "") -> list[str]:
    answer = await client.get(f"{V1}/letters?{query}")
    assert answer.status_code == 200, answer.text
    return [row["id"] for row in answer.json()["rows"]]


# ---- looking


async def test_letters_are_paged_newest_first_and_every_one_is_seen_once(
    app: Redrive, client: httpx2.AsyncClient
) -> None:
    expected = [await filed(app, f'{{"id":{n}}}'.encode()) for n in range(5)][::-1]
    seen: list[str] = []
    cursor = ""
    for _ in range(3):
        page = msgspec.json.decode((await client.get(f"{V1}/letters?limit=2{cursor}")).content, type=Page)
        seen += [row.id for row in page.rows]
        cursor = f"&cursor={page.next}"
    assert (seen, page.next) == (expected, None)


async def test_filters_narrow_the_list_and_the_count(app: Redrive, client: httpx2.AsyncClient) -> None:
    first = await filed(app, b'{"id":1}', "no customer")
    second = await filed(app, b'{"id":2}', "negative amount", source="orders-eu")
    await app.desk().discard(second, Act("me"))
    assert await ids(client, "state=pending") == [first]
    assert await ids(client, "state=pending&state=discarded&source=orders*") == [second, first]
    assert await ids(client, "attribute=order:1&kind=permanent&group=billing&handler=bill") == [first]
    assert await ids(client, "text=customer&error_type=ValueError") == [first]
    assert await ids(client, "since=2000-01-01T00:00:00Z&until=2000-01-02T00:00:00%2B01:00") == []
    assert (await client.get(f"{V1}/letters/count?state=discarded")).json() == {"count": 1, "exact": True}


async def test_a_letter_is_shown_whole_and_its_body_comes_bit_for_bit(app: Redrive, client: httpx2.AsyncClient) -> None:
    body = b"\x00\xff<script>alert(1)</script>\r\n"
    letter = await filed(app, body, "boom")
    shown = (await client.get(f"{V1}/letters/{letter}")).json()
    assert (shown["state"], shown["error_message"], shown["body"]["size"]) == ("pending", "boom", len(body))
    raw = await client.get(f"{V1}/letters/{letter}/body")
    assert raw.content == body
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["content-disposition"] == f'attachment; filename="letter-{letter}.bin"'
    assert raw.headers["content-security-policy"].startswith("sandbox;")


async def test_a_null_body_is_told_from_an_empty_one(app: Redrive, client: httpx2.AsyncClient) -> None:
    null, empty = await filed(app, None), await filed(app, b"")
    assert (await client.get(f"{V1}/letters/{null}/body")).status_code == 204
    answer = await client.get(f"{V1}/letters/{empty}/body")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_nothing_masked_is_ever_seen(app: Redrive, client: httpx2.AsyncClient) -> None:
    letter = await filed(app, b'{"card":"4000-1111","id":7}', source="payments")
    for path in ("letters", f"letters/{letter}", "statistics", "audit"):
        assert "4000-1111" not in (await client.get(f"{V1}/{path}")).text
    refused = await client.get(f"{V1}/letters/{letter}/body")
    assert refused.status_code == 403
    assert b"4000-1111" not in refused.content


async def test_text_from_messages_stays_text(app: Redrive, client: httpx2.AsyncClient) -> None:
    headers = ((HOSTILE, HOSTILE.encode()),)
    message = Message("embedded", HOSTILE, 0, HOSTILE, 1, HOSTILE.encode(), HOSTILE.encode(), headers)
    letter = await app.dead_letter(message, ValueError(HOSTILE), HOSTILE, HOSTILE, 1, group=HOSTILE)
    [row] = (await client.get(f"{V1}/letters")).json()["rows"]
    assert {row[name] for name in ("source", "group", "handler", "error_message")} == {HOSTILE}
    answer = await client.get(f"{V1}/letters/{letter}")
    shown = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert (shown["headers"][0]["name"], shown["body"]["text"]) == (HOSTILE, HOSTILE)
    assert (await client.get(f"{V1}/letters", params={"source": HOSTILE})).json()["rows"][0]["id"] == letter


async def test_names_that_are_not_unicode_do_not_break_the_page(app: Redrive, client: httpx2.AsyncClient) -> None:
    message = Message("embedded", "orders", 0, "a\udcff", 1, None, b"{}", (("x\udcff", b"1"),))
    letter = await app.dead_letter(message, ValueError("\udcff"), "bill", "orders", 1)
    answer = await client.get(f"{V1}/letters/{letter}")
    assert answer.status_code == 200
    assert answer.json()["headers"][0]["name"] in ("x\ufffd", "x?")


# ---- acting


async def test_a_letter_is_replayed_by_a_job_that_can_be_followed(app: Redrive, client: httpx2.AsyncClient) -> None:
    letter = await filed(app)
    started = await client.post(f"{V1}/letters/{letter}/replay", json={"who": "ann", "why": "fixed"})
    assert started.status_code == 202
    job = started.json()["id"]
    await app.replayer().finish(job)
    followed = (await client.get(f"{V1}/replays/{job}")).json()
    assert (followed["job"]["state"], followed["job"]["sent"], followed["refusals"]) == ("done", 1, [])
    assert [row["id"] for row in (await client.get(f"{V1}/replays")).json()["rows"]] == [job]
    again = await client.post(f"{V1}/letters/{letter}/replay")
    assert again.status_code == 409
    assert (again.json()["expected"], again.json()["actual"]) == ("pending", "replaying")


async def test_what_a_replay_could_not_send_is_told_with_its_reason(app: Redrive, client: httpx2.AsyncClient) -> None:
    good, gone = await filed(app), await filed(app, b"2")
    await client.delete(f"{V1}/letters/{gone}")
    job = (await client.post(f"{V1}/replays", json={"ids": [good, gone, "x"], "rate": 100, "why": "all"})).json()
    assert (job["total"], job["rate"], job["act"]) == (3, 100.0, {"who": "api", "why": "all"})
    await app.replayer().finish(job["id"])
    refusals = (await client.get(f"{V1}/replays/{job['id']}")).json()["refusals"]
    assert [one["letter"] for one in refusals] == [gone, "x"]


async def test_a_replay_is_paused_resumed_and_cancelled(app: Redrive, client: httpx2.AsyncClient) -> None:
    job = (await client.post(f"{V1}/replays", json={"ids": [await filed(app)]})).json()["id"]
    for verb, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        assert (await client.post(f"{V1}/replays/{job}/{verb}")).json()["state"] == state
    late = await client.post(f"{V1}/replays/{job}/resume")
    assert (late.status_code, late.json()["expected"], late.json()["actual"]) == (409, "paused", "cancelled")
    assert (await client.post(f"{V1}/replays/nope/pause")).status_code == 404
    assert (await client.get(f"{V1}/replays/nope")).status_code == 404


async def test_every_change_is_audited_with_who_and_why(app: Redrive, client: httpx2.AsyncClient) -> None:
    letter = await filed(app)
    for verb, state in (("discard", "discarded"), ("restore", "pending"), ("resolve", "resolved")):
        moved = await client.post(f"{V1}/letters/{letter}/{verb}", json={"who": "ann", "why": verb})
        assert (moved.status_code, moved.json()["state"]) == (200, state)
    assert (await client.request("DELETE", f"{V1}/letters/{letter}", json={"who": "bob"})).status_code == 204
    assert (await client.get(f"{V1}/letters/{letter}")).status_code == 404
    rows = (await client.get(f"{V1}/audit")).json()["rows"]
    assert [(row["who"], row["why"]) for row in rows] == [
        ("bob", ""), ("ann", "resolve"), ("ann", "restore"), ("ann", "discard"),
    ]  # fmt: skip


# ---- refusing


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("letters?colour=red", "colour"), ("letters?state=gone", "state"), ("letters?since=soon", "since"),
        ("letters?limit=0", "limit"), ("letters?limit=501", "limit"), ("letters?limit=1e3", "limit"),
        ("letters?limit=1&limit=2", "limit"), ("letters?cursor=%00", "cursor"), ("letters?source=a&source=b", "source"),
        ("letters/count?limit=5", "limit"), ("letters/x?verbose=1", "verbose"), ("statistics?days=1000000000", "days"),
        ("audit?limit=-1", "limit"), ("replays?limit=٣", "limit"), ("health?x=1", "x"),
    ],
)  # fmt: skip
async def test_a_parameter_that_cannot_be_understood_is_named(
    client: httpx2.AsyncClient, path: str, parameter: str
) -> None:
    answer = await client.get(f"{V1}/{path}")
    assert (answer.status_code, answer.json()["parameter"]) == (400, parameter)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "body"), ({"ids": []}, "ids"), ({"ids": ["a"], "rate": 0}, "rate"), ({"ids": ["a"], "state": "x"}, "body"),
        ({"ids": "a"}, "ids"), ({"ids": [1]}, "ids[0]"), ({"ids": ["a"] * 10_001}, "ids"), ([], "body"),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_understood_is_refused(
    client: httpx2.AsyncClient, body: Any, parameter: str
) -> None:
    answer = await client.post(f"{V1}/replays", json=body)
    assert (answer.status_code, answer.json()["parameter"]) == (400, parameter)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"who": "\\ud800"}'])
async def test_what_is_not_json_is_refused(client: httpx2.AsyncClient, body: bytes) -> None:
    answer = await client.post(f"{V1}/replays", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_no_page_of_another_site_can_change_anything(client: httpx2.AsyncClient, method: str, path: str) -> None:
    json = {"json": {"ids": ["x"]}}
    for headers in (
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "http://evil.example"},
        {"origin": "null"}, {"origin": "http://localhost:9999"},
    ):  # fmt: skip
        assert (await client.request(method, path, headers=headers, **json)).status_code == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        refused = await client.request(method, path, content=b"{}", headers={"content-type": kind})
        assert refused.status_code == 415
        assert (await client.request(method, path, headers={"content-type": kind})).status_code == 415
    assert (await client.request(method, path, content=b"{}")).status_code == 415
    await client.get(path)
    assert (await client.get(f"{V1}/audit")).json()["rows"] == []
    own = {"origin": "http://localhost:8400", "sec-fetch-site": "same-origin"}
    assert (await client.request(method, path, headers=own, **json)).status_code in (202, 400, 404)


async def test_a_name_that_leads_here_by_dns_is_refused(client: httpx2.AsyncClient) -> None:
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.4", "", "[::1", "::1"):
        assert (await client.get(f"{V1}/letters", headers={"host": host})).status_code == 421, host
    for host in ("localhost", "LOCALHOST:8400", "127.0.0.1:8400", "[::1]:8400", "[::1]"):
        assert (await client.get(f"{V1}/letters", headers={"host": host})).status_code == 200, host


async def test_a_large_body_is_refused_even_when_it_does_not_say_so(client: httpx2.AsyncClient) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 65536 + 1):
            yield b" " * 65536

    kind = {"content-type": "application/json"}
    assert (await client.post(f"{V1}/replays", content=stream(), headers=kind)).status_code == 413
    assert (await client.post(f"{V1}/replays", content=b" " * (MAX_BODY + 1), headers=kind)).status_code == 413


async def test_every_answer_is_hardened(app: Redrive, client: httpx2.AsyncClient) -> None:
    letter = await filed(app)
    description = (await client.get("/openapi.json")).json()
    paths = [path.replace("{letter_id}", letter).replace("{job_id}", "x") for path in description["paths"]]
    for path in (*paths, "/openapi.json", "/metrics", "/nope", f"{V1}/letters?x=1"):
        answer = await client.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["cache-control"] == "no-store", path
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path
        assert "access-control-allow-origin" not in answer.headers, path


async def test_a_store_that_is_down_is_said_and_comes_back(app: Redrive, client: httpx2.AsyncClient) -> None:
    store = app.parts.store
    assert store is not None
    await store.close()
    for path in ("letters", "ready", "statistics"):
        down = await client.get(f"{V1}/{path}")
        assert (down.status_code, "retry-after" in down.headers) == (503, True)
    assert (await client.get("/health")).status_code == 200
    await store.open()
    assert (await client.get("/ready")).status_code == 200


async def test_nobody_waits_for_ever_for_a_look() -> None:
    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    transport = httpx2.ASGITransport(Guard(stuck, read_seconds=0.01))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/")).status_code == 503


async def test_a_slow_reader_still_gets_everything() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"all of it"})

    transport = httpx2.ASGITransport(Guard(slow, read_seconds=0.01))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/")).content == b"all of it"


async def test_a_defect_tells_a_stranger_nothing(app: Redrive, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    desk = app.desk()
    monkeypatch.setattr(desk, "statistics", broken)
    transport = httpx2.ASGITransport(api.create(desk, app.metrics.registry), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get(f"{V1}/statistics")
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (500, "nosniff")
    assert "secret" not in answer.text


# ---- describing itself


async def test_the_description_is_whole_and_true(app: Redrive, client: httpx2.AsyncClient) -> None:
    letter = await filed(app)
    described = await client.get("/openapi.json")
    schemas = described.json()["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', described.text):
        assert name in schemas
    assert "422" not in described.text
    shown = (await client.get(f"{V1}/letters/{letter}")).json()
    assert set(schemas["LetterView"]["properties"]) == set(shown)
    [row] = (await client.get(f"{V1}/letters")).json()["rows"]
    assert set(schemas["Summary"]["properties"]) == set(row)
    problem = (await client.get(f"{V1}/letters/nope")).json()
    assert set(problem) <= set(schemas["Problem"]["properties"])


async def test_metrics_are_for_prometheus(app: Redrive, client: httpx2.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "redrive_collected_total" in answer.text


def test_without_the_extra_the_exact_remedy_is_named(app: Redrive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "redrive.api.routes", raising=False)
    monkeypatch.delitem(sys.modules, "redrive.api.documented", raising=False)
    with pytest.raises(MissingExtra) as missing:
        api.create(app.desk(), app.metrics.registry)
    assert missing.value.fix == "pip install 'redrive[serve]'"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com", "", "127.0.0.1.evil.example"])
def test_only_this_machine_is_listened_to(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listen(host, 0)
    assert refused.value.key == "serve.host"


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError) as refused:
        listen("127.0.0.1", taken.getsockname()[1])
    assert refused.value.key == "serve.port"


# ---- the real thing


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    env = {name: value for name, value in os.environ.items() if not name.startswith("REDRIVE_")}

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redrive.cli", *args]
        running = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        started.append(running)
        return running

    yield start
    for process in started:
        process.kill()
        process.communicate()


def eventually(question: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return answer


ORDERS = """
from pathlib import Path
from redrive import Redrive, delays

app = Redrive.from_config()

@app.consumer("orders", group="billing", attempts=2, backoff=delays([0.01]))
def bill(order: dict) -> None:
    if not Path("mended").exists():
        raise ValueError("no customer")
"""


def test_a_message_dies_is_seen_mended_and_sent_back_over_http(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "orders.py").write_text(ORDERS)
    settings = f'broker = "embedded://{tmp_path}/broker.db"\nstore = "sqlite://{tmp_path}/letters.db"\n'
    (tmp_path / "redrive.toml").write_text(settings + "[serve]\nport = 0\n")
    office, worker = start("serve"), start("work", "orders:app")
    assert office.stdout is not None
    address = office.stdout.readline().split()[-1]
    asyncio.run(Redrive.from_config(tmp_path / "redrive.toml").publish("orders", {"id": 1}))
    with httpx2.Client(base_url=address) as client:
        [letter] = eventually(lambda: client.get("/letters").json()["rows"])
        assert letter["error_message"] == "no customer"
        assert client.get("/letters", headers={"host": "evil.example"}).status_code == 421
        (tmp_path / "mended").touch()
        assert client.post(f"/letters/{letter['id']}/replay", json={"who": "ann"}).status_code == 202
        eventually(lambda: client.get(f"/letters/{letter['id']}").json()["state"] == "resolved")
    for process in (office, worker):
        process.send_signal(signal.SIGTERM)
    assert (office.wait(15), worker.wait(15)) == (0, 0)
    assert office.stdout.read().splitlines()[-1] == "stopped"
