from __future__ import annotations

import random
import string
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.redact import LONGEST_SECRET, MASK, clip, scrub, scrub_and_clip

ALPHABET = string.ascii_letters + string.digits
SHAPES: list[Callable[[str], str]] = [
    lambda s: f"cannot connect to postgresql://app:{s}@db.internal:5432/letters",
    lambda s: f"redis://:{s}@cache/0 is down",
    lambda s: f"amqp://guest:p@{s}@mq/vhost refused",
    lambda s: f"mongodb+srv://root:{s}/x@c0.example.net/?w=1",
    lambda s: f"git clone https://{s}@example.com/repo.git failed",
    lambda s: f"Authorization: Bearer {s}",
    lambda s: f"authorization=Basic {s}",
    lambda s: f"sent header 'Authorization': 'token {s}'",
    lambda s: f"Basic {s}a1",
    lambda s: f"BEARER {s}.{s}",
    lambda s: f"{{'Authorization': b'Bearer {s}'}}",
    lambda s: f"[(b'x-api-key', b'{s}'), (b'host', b'x')]",
    lambda s: f"('Cookie', 'session={s}')",
    lambda s: f"Set-Cookie: sid={s}; Path=/",
    lambda s: f"aws_access_key_id = AKIA{s[:16].upper()}",
    lambda s: f"aws_secret_access_key = {s}/{s}",
    lambda s: f"AWS_SESSION_TOKEN={s}",
    lambda s: f"InvalidAccessKeyId ASIA{s[:16].upper()} unknown",
    lambda s: f"jwt eyJhbGciOiJIUzI1NiJ9.{s}.{s} expired",
    lambda s: f"id=eyJ{s}",
    lambda s: f"Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={s}=;EntityPath=q",
    lambda s: f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={s}==;EndpointSuffix=x",
    lambda s: f"https://a.blob.core.windows.net/c?sv=2020&sig={s}%3D&se=1",
    lambda s: f"SharedAccessSignature={s}",
    lambda s: f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{s}\n{s}\n-----END RSA PRIVATE KEY-----",
    lambda s: f"-----BEGIN PRIVATE KEY-----\\n{s}",
    lambda s: f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{s}\n=ab\n-----END",
    lambda s: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{s}",
    lambda s: f'{{"user": "a", "password": "{s}", "x": 1}}',
    lambda s: f'{{"password":"two words, {s}"}}',
    lambda s: f'{{"password": "with \\" quote {s}"}}',
    lambda s: f'"{{\\"client_secret\\": \\"a {s}\\"}}"',
    lambda s: f"{{'db_password': 'it is {s}'}}",
    lambda s: f"Settings(api_key='{s}', debug=True)",
    lambda s: f'privateKey: "{s}"',
    lambda s: f"DB_PASSWORD={s}",
    lambda s: f"PGPASSWORD={s} psql",
    lambda s: f"export API_KEY={s}",
    lambda s: f"DB_PASS={s}",
    lambda s: f"MY_SECRET: {s}",
    lambda s: f"passphrase => {s}",
    lambda s: f"pwd={s};uid=sa",
    lambda s: f"password=a,{s}",
    lambda s: f"password = '{s}'",
    lambda s: f"host=x password='a {s}' user=y",
    lambda s: f"GET https://api.example.com/v1?token={s}&page=2",
    lambda s: f"GET /cb?access_token={s}",
    lambda s: f"/x?next=a&api-key={s}",
    lambda s: f"redirect=%2Fx%3Ftoken%3D{s}",
    lambda s: f"X-Amz-Signature={s}&X-Amz-Date=1",
    lambda s: f"X-Amz-Credential={s}/20260101/eu",
    lambda s: f"mysql --user root --password {s} db",
    lambda s: f"<soap:Password>{s}</soap:Password>",
    lambda s: f"ghp_{s}",
    lambda s: f"github_pat_{s}",
    lambda s: f"glpat-{s}",
    lambda s: f"slack xoxb-{s}",
    lambda s: f"sk_live_{s}",
    lambda s: f"key sk-{s}",
    lambda s: f"AIza{s}",
    lambda s: f"vault hvs.{s}",
    lambda s: f"SESSION_ID={s}",
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_no_secret_survives(number: int) -> None:
    rng = random.Random(number)
    secret = "".join(rng.choices(ALPHABET, k=24))
    text = SHAPES[number](secret)
    for shown in (scrub(text), scrub(f"before {text} after"), scrub(text.replace("Bearer", "bearer"))):
        assert MASK in shown
        assert not any(secret[i : i + 6].lower() in shown.lower() for i in range(len(secret) - 6))


def test_there_are_sixty_shapes_at_least() -> None:
    assert len(SHAPES) >= 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "connection to db-7.internal:5432 refused after 3 tries",
        "KeyError: 'order_id'",
        "the token expired at 12:00",
        "password must not be empty",
        "Basic authentication failed for user a",
        "could not negotiate a protocol version",
        "GET https://api.example.com:8443/v1/orders?page=2 answered 503",
        "partition_key=42 routing_key=orders offset=17",
        "bypass the gate; passing on",
        "assigned: 4, signal: 9, design: new",
        "mail from a@example.com to b@example.com",
        "https://example.com/@someone",
        'File "/srv/app/tokens.py", line 12, in authorize',
        "--dry-run --verbose -----",
        "übergröße 訂單 İstanbul",
    ],
)
def test_ordinary_text_survives(text: str) -> None:
    assert scrub(text) == text


def test_what_surrounds_a_secret_stays() -> None:
    assert scrub("postgres://app:x1@db/a failed") == "postgres://app:***@db/a failed"
    assert scrub('{"password": "x", "user": "a"}') == '{"password": "***", "user": "a"}'
    assert scrub("İİİ Authorization: Bearer abcdefghij, then") == "İİİ Authorization: Bearer *** then"


def test_scrubbing_twice_changes_nothing_more() -> None:
    for number, shape in enumerate(SHAPES):
        once = scrub(shape(f"{number}" * 20))
        assert scrub(once) == once


EVIL = [
    "a", "a-", "-", " ", "eyJ", "eyJaaaaaaaaaa-", "password", "password=", "password='\\", 'token"', "token: '",
    "x://a:", "://", "://:@", "://a@", "://" + "a" * 30, "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "bearer ",
    "basic a", "basic abcdefgh ", "sig", "\\", "\\\"", "--token ", "--secret-", "ghp_", "api", "api_key", "pass>",
    "session_", "xoxb-aaaa", "passwordx ", "sharedaccess", "İpass", "authauth", "sk-", "token\\\\\\'",
]  # fmt: skip


def seconds_for(text: str) -> float:
    """The better of two, so that a busy machine does not fail a test about growth."""
    spent = []
    for _ in range(2):
        begun = time.process_time()
        scrub(text)
        spent.append(time.process_time() - begun)
    return min(spent)


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_repeated_makes_it_slow(evil: str) -> None:
    assert seconds_for(evil * (200_000 // len(evil))) < 0.5


@pytest.mark.parametrize("evil", ["x://a:", "-----BEGIN ", "--secret-", "password", "".join(EVIL)])
def test_no_megabyte_makes_it_slow(evil: str) -> None:
    assert seconds_for(evil * (1_000_000 // len(evil))) < 1


@given(st.text(), st.sampled_from(EVIL), st.text())
def test_it_is_total(before: str, evil: str, after: str) -> None:
    assert isinstance(scrub(before + evil + after), str)


@given(st.text(max_size=300), st.integers(0, 200))
def test_a_clipped_text_keeps_its_limit(text: str, limit: int) -> None:
    assert len(clip(text, limit)) <= limit
    assert clip(text, len(text)) == text


@pytest.mark.parametrize("shift", range(0, 60, 7))
def test_a_cut_through_a_secret_does_not_uncover_the_rest_of_it(shift: int) -> None:
    secret = "hunter2" * 8
    for size in (40_000, 60_000, 100_000):
        line = f"password={secret} "
        text = ("x" * shift + line * (size // len(line)))[: size + shift]
        shown = scrub_and_clip(text, 2000)
        assert "hunter2" not in shown
        assert len(shown) <= 2000


def test_a_long_text_is_scrubbed_in_bounded_time() -> None:
    text = "password=x y " * 5_000_000
    begun = time.process_time()
    scrub_and_clip(text, 2000)
    assert time.process_time() - begun < 0.3


def test_a_private_key_across_the_cut_is_gone() -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + ("Zm9vYmFy" * 8 + "\n") * 100 + "-----END PRIVATE KEY-----"
    for after in range(0, 40_000, 1111):
        shown = scrub_and_clip("x" * 100_000 + key + "." * after, 6000)
        assert "Zm9v" not in shown
    assert len(key) < LONGEST_SECRET
