from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import retry
from redrive.config import (
    BackoffSettings,
    ConsumerSettings,
    backoff_of,
    consumer_settings,
    from_mapping,
    load,
    merge,
)
from redrive.errors import ConfigError

BROKER = 'broker = "embedded://./broker.db"\n'
WHOLE = """
service = "billing"
version = "1.4.2"
environment = "production"
broker = "embedded://./redrive-data/broker.db"
store = "sqlite://./redrive-data/letters.db"
blobs = "file://./redrive-data/blobs"
spool = "./redrive-data/spool"
attempts = "sqlite://./redrive-data/attempts.db"
signing_keys = ["00112233445566778899aabbccddeeff"]

[embedded]
partitions = 4
lease_seconds = 30
max_message_bytes = 1_000_000
retention_seconds = 3600

[serve]
host = "0.0.0.0"
port = 8401

[replay]
window = 50
rate = 10
max_replays = 2
quiet_seconds = 60

[defaults]
attempts = 5

[sources.orders]
attempts = 7
backoff = { shape = "exponential", seconds = 1, factor = 3, cap = 60, jitter = 0.1 }
budget = 600
mode = "inline"
timeout = 30
concurrency = 8
batch = 100
on_exhausted = "block"
enabled = false
route = "direct"
dead_letter = "dlq.{cluster_id}.{source}"
names = { cluster_id = "eu1" }
attributes = { order_id = "body:order.id" }
message_type = "header:x-type"
identity = "order_id"
masked = ["card.number"]
max_replays = 1
rules = { critical = ["MemoryError"], permanent = ["billing.errors.Declined"] }

[profiles.dev]
broker = "embedded://:memory:"
[profiles.dev.serve]
port = 8500
[profiles.dev.sources.orders]
attempts = 1
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "redrive.toml"
        path.write_text(text)
        return path

    return write


def refused(path: Path | None, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, **{"env": {}, **options})
    return caught.value


def test_every_setting_of_the_file_arrives(write: Any) -> None:
    config = load(write(WHOLE), env={})
    assert (config.service, config.version, config.environment) == ("billing", "1.4.2", "production")
    assert config.broker == "embedded://./redrive-data/broker.db"
    assert config.store == "sqlite://./redrive-data/letters.db"
    assert config.blobs == "file://./redrive-data/blobs"
    assert config.spool == "./redrive-data/spool"
    assert config.attempts == "sqlite://./redrive-data/attempts.db"
    assert config.signing_keys == ("00112233445566778899aabbccddeeff",)
    assert (config.embedded.partitions, config.embedded.lease_seconds) == (4, 30.0)
    assert (config.embedded.max_message_bytes, config.embedded.retention_seconds) == (1_000_000, 3600.0)
    assert (config.serve.host, config.serve.port) == ("0.0.0.0", 8401)
    assert (config.replay.window, config.replay.rate) == (50, 10.0)
    assert (config.replay.max_replays, config.replay.quiet_seconds) == (2, 60.0)
    assert config.defaults == ConsumerSettings(attempts=5)
    assert config.sources["orders"] == ConsumerSettings(
        attempts=7,
        backoff=BackoffSettings(shape="exponential", seconds=1.0, factor=3.0, cap=60.0, jitter=0.1),
        budget=600.0,
        mode=retry.Mode.INLINE,
        timeout=30.0,
        concurrency=8,
        batch=100,
        on_exhausted="block",
        enabled=False,
        route="direct",
        dead_letter="dlq.{cluster_id}.{source}",
        names={"cluster_id": "eu1"},
        attributes={"order_id": "body:order.id"},
        message_type="header:x-type",
        identity="order_id",
        masked=("card.number",),
        max_replays=1,
        rules={"critical": ("MemoryError",), "permanent": ("billing.errors.Declined",)},
    )


def test_a_file_that_names_only_its_broker_gets_the_defaults(write: Any) -> None:
    config = load(write(BROKER), env={})
    assert (config.serve.host, config.serve.port, config.replay.window, config.replay.rate) == (
        "127.0.0.1", 8400, 500, None,
    )  # fmt: skip
    assert (config.replay.max_replays, config.replay.quiet_seconds) == (3, 300.0)
    assert config.store is None
    assert config.source("orders") == ConsumerSettings()


def test_the_environment_alone_is_enough() -> None:
    config = load(None, env={"REDRIVE_BROKER": "embedded://:memory:", "REDRIVE_SERVICE": "billing"})
    assert (config.broker, config.service) == ("embedded://:memory:", "billing")


def test_a_process_without_a_broker_is_told_both_ways_to_name_one(write: Any) -> None:
    for path in (None, write("")):
        error = refused(path)
        assert error.key == "broker"
        assert "REDRIVE_BROKER" in error.fix


# Profiles


def test_a_profile_lies_over_the_file_key_by_key(write: Any) -> None:
    config = load(write(WHOLE), profile="dev", env={})
    assert config.broker == "embedded://:memory:"
    assert (config.serve.host, config.serve.port) == ("0.0.0.0", 8500)
    assert (config.sources["orders"].attempts, config.sources["orders"].batch) == (1, 100)


def test_a_profile_replaces_a_backoff_whole(write: Any) -> None:
    text = BROKER + "[defaults]\nbackoff = {factor = 3, cap = 9}\n[profiles.dev.defaults]\nbackoff = {shape='constant'}"
    assert load(write(text), profile="dev", env={}).defaults.backoff == BackoffSettings(shape="constant")


def test_a_profile_may_spell_attempts_its_own_way(write: Any) -> None:
    text = BROKER + "[defaults]\nmax_retries = 3\n[profiles.dev.defaults]\nattempts = 5"
    assert load(write(text), profile="dev", env={}).defaults.attempts == 5


def test_an_unknown_profile_lists_the_known_ones(write: Any) -> None:
    error = refused(write(WHOLE + "[profiles.test]"), profile="prod")
    assert error.key == "profiles.prod"
    assert "dev, test" in error.fix


def test_a_profile_nobody_chose_is_checked_all_the_same(write: Any) -> None:
    error = refused(write(BROKER + "[profiles.dev.serve]\nprot = 1"))
    assert (error.key, error.fix) == ("profiles.dev.serve.prot", "did you mean port?")


def test_profiles_do_not_nest(write: Any) -> None:
    assert refused(write(BROKER + "[profiles.a.profiles.b]")).key == "profiles.a.profiles"


# The environment


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        ("REDRIVE_STORE", "sqlite://other.db", lambda c: c.store == "sqlite://other.db"),
        ("REDRIVE_VERSION", "12", lambda c: c.version == "12"),
        ("REDRIVE_VERSION", "true", lambda c: c.version == "true"),
        ("REDRIVE_VERSION", '"quoted"', lambda c: c.version == "quoted"),
        ("REDRIVE_VERSION", '"a"\nbroker = "evil"', lambda c: c.broker != "evil"),
        ("REDRIVE_SERVE__PORT", "8402", lambda c: c.serve.port == 8402),
        ("REDRIVE_REPLAY__RATE", "2", lambda c: c.replay.rate == 2.0),
        ("REDRIVE_EMBEDDED__PARTITIONS", "9", lambda c: c.embedded.partitions == 9),
        ("REDRIVE_DEFAULTS__ENABLED", "false", lambda c: c.defaults.enabled is False),
        ("REDRIVE_DEFAULTS__BACKOFF", "[1, 2, 4]", lambda c: c.defaults.backoff == (1.0, 2.0, 4.0)),
        ("REDRIVE_DEFAULTS__BACKOFF", "7", lambda c: c.defaults.backoff == 7.0),
        ("REDRIVE_DEFAULTS__MASKED", '["a"]', lambda c: c.defaults.masked == ("a",)),
        ("REDRIVE_DEFAULTS__MAX_RETRIES", "4", lambda c: c.defaults.attempts == 4),
        ("REDRIVE_DEFAULTS__MAXRETRIESBEFOREDLQ", "4", lambda c: c.defaults.attempts == 4),
        ("REDRIVE_DEFAULTS", "{max_retries = 4}", lambda c: c.defaults.attempts == 4),
        ("REDRIVE_SOURCES__ORDERS__ATTEMPTS", "2", lambda c: c.sources["orders"].attempts == 2),
        ("REDRIVE_SOURCES__ORDERS__MODE", "redeliver", lambda c: c.sources["orders"].mode == "redeliver"),
        ("REDRIVE_SOURCES__ORDERS__BACKOFF__CAP", "5", lambda c: c.sources["orders"].backoff.cap == 5.0),
        ("REDRIVE_SOURCES__ORDERS__NAMES__NODE", "n1", lambda c: c.sources["orders"].names["node"] == "n1"),
        ("REDRIVE_SOURCES__ORDERS__RULES__TRANSIENT", '["OSError"]',
         lambda c: c.sources["orders"].rules["transient"] == ("OSError",)),
        ("REDRIVE_SIGNING_KEYS", f'["{"ab" * 16}"]', lambda c: c.signing_keys == ("ab" * 16,)),
    ],
)  # fmt: skip
def test_every_key_can_be_set_from_the_environment(write: Any, variable: str, text: str, read: Any) -> None:
    assert read(load(write(WHOLE), env={variable: text}))


def test_the_environment_wins_over_the_profile(write: Any) -> None:
    assert load(write(WHOLE), profile="dev", env={"REDRIVE_SERVE__PORT": "1"}).serve.port == 1


@pytest.mark.parametrize("name", ["Order-Events", "order.events", "ORDER_EVENTS", "order__events"])
def test_a_source_is_found_however_its_name_is_written(write: Any, name: str) -> None:
    env = {f"REDRIVE_SOURCES__{name.upper().replace('-', '_').replace('.', '_')}__ATTEMPTS": "2"}
    config = load(write(BROKER + f'[sources."{name}"]\nbatch = 5'), env=env)
    assert config.sources == {name: ConsumerSettings(attempts=2, batch=5)}


def test_a_source_that_only_the_environment_names_is_found_by_its_real_name(write: Any) -> None:
    config = load(write(BROKER), env={"REDRIVE_SOURCES__ORDER_EVENTS__ATTEMPTS": "2"})
    assert config.source("Order-Events").attempts == config.source("order.events").attempts == 2


def test_a_variable_that_could_mean_two_sources_is_refused(write: Any) -> None:
    path = write(BROKER + '[sources."a.b"]\n[sources.a-b]')
    assert "a.b or a-b" in refused(path, env={"REDRIVE_SOURCES__A_B__ATTEMPTS": "2"}).problem


@pytest.mark.parametrize(
    ("variable", "text", "hint"),
    [
        ("REDRIVE_SERVE__PROT", "1", "port"),
        ("REDRIVE_SERVE__PORT__X", "1", "port"),
        ("REDRIVE_SERVE_PORT", "1", "REDRIVE_SERVE__"),
        ("REDRIVE_SOURCES__ORDERS__ATEMPTS", "1", ""),
        ("REDRIVE_STROE", "sqlite://x", "store"),
        ("REDRIVE_SERVE__PORT", "many", "whole number"),
        ("REDRIVE_SERVE__PORT", "70000", "65,535"),
        ("REDRIVE_DEFAULTS__MASKED", "a, b", "list"),
        ("REDRIVE_DEFAULTS__BACKOFF__CAP", "5", "whole"),
    ],
)
def test_a_variable_that_says_nothing_is_refused_by_its_name(write: Any, variable: str, text: str, hint: str) -> None:
    error = refused(write(BROKER + "[defaults]\nbackoff = 1"), env={variable: text})
    assert variable in error.where
    assert hint in error.fix


def test_variables_that_only_share_our_prefix_are_left_alone(write: Any) -> None:
    env = {
        "REDRIVE_FAULTS": "x", "REDRIVE_LAB_KAFKA": "x", "REDRIVE_CONFIG": "x", "REDRIVE_PROFILE": "x",
        "REDRIVE_LOGHUB": "x", "REDRIVE_HOME": "x", "REDRIVE_PORT": "tcp://10.0.0.1:8400",
        "REDRIVE_SERVE_PORT": "tcp://10.0.0.1:8400", "REDRIVE_SERVE_SERVICE_HOST": "10.0.0.1", "PATH": "/bin",
    }  # fmt: skip
    assert load(write(BROKER), env=env) == load(write(BROKER), env={})


def test_what_only_the_sum_of_the_layers_refuses_is_refused(write: Any) -> None:
    path = write(BROKER + "[defaults]\nbackoff = {shape = 'constant'}")
    assert refused(path, env={"REDRIVE_DEFAULTS__BACKOFF__CAP": "5"}).key == "defaults.backoff.cap"


# Bad input


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("servce = 'x'", "servce", "service"),
        ("sink = 1", "sink", "known here"),
        ("service = 1", "service", "quotes"),
        ("serve = 1", "serve", "table"),
        ("profiles = 1", "profiles", "table"),
        ("sources = 1", "sources", "table"),
        ("store = ''", "store", "quotes"),
        ("signing_keys = ['secret']", "signing_keys[0]", "redrive keygen"),
        ("serve.port = 70000", "serve.port", "0 to 65,535"),
        ("serve.port = '8400'", "serve.port", "whole number"),
        ("serve.port = true", "serve.port", "whole number"),
        ("replay.window = 0", "replay.window", "from 1"),
        ("replay.rate = -1", "replay.rate", "above 0"),
        ("replay.rate = inf", "replay.rate", "above 0"),
        ("embedded.lease_seconds = 0", "embedded.lease_seconds", "above 0"),
        ("defaults.concurrency = 0", "defaults.concurrency", "from 1"),
        ("defaults.timeout = 0", "defaults.timeout", "above 0"),
        ("defaults.timeout = nan", "defaults.timeout", "above 0"),
        ("defaults.timeout = 1979-05-27", "defaults.timeout", "number"),
        ("defaults.attempts = 0", "defaults.attempts", "from 1"),
        ("defaults.max_retries = 0", "defaults.max_retries", "from 1"),
        ("defaults.maxRetriesBeforeDLQ = '3'", "defaults.maxRetriesBeforeDLQ", "whole number"),
        ("defaults.maxretriesbeforedlq = 3", "defaults.maxretriesbeforedlq", "maxRetriesBeforeDLQ"),
        ("defaults.attempts = 99999999999999999999999", "defaults.attempts", "from 1"),
        ("defaults.mode = 'delay'", "defaults.mode", "'delayed' or 'redeliver' or 'inline'"),
        ("defaults.on_exhausted = 'drop'", "defaults.on_exhausted", "'dead_letter' or 'block'"),
        ("defaults.backoff = 'fast'", "defaults.backoff", "number"),
        ("defaults.backoff = []", "defaults.backoff", "list"),
        ("defaults.backoff = [1, 'x']", "defaults.backoff[1]", "number"),
        ("defaults.backoff = [1, -1]", "defaults.backoff[1]", "number"),
        ("defaults.backoff = {jitter = 2}", "defaults.backoff.jitter", "from 0 to 1"),
        ("defaults.backoff = {shape = 'linear', factor = 2}", "defaults.backoff.factor", "delete"),
        ("defaults.backoff = {shpe = 'linear'}", "defaults.backoff.shpe", "shape"),
        ("defaults.dead_letter = '{source.__class__}'", "defaults.dead_letter", "{source}"),
        ("defaults.dead_letter = '{source'", "defaults.dead_letter", "{source}"),
        ("defaults.attributes = {id = 'bdy:id'}", "defaults.attributes.id", "body:"),
        ("defaults.message_type = 'x'", "defaults.message_type", "header:"),
        ("defaults.names = {id = 1}", "defaults.names.id", "quotes"),
        ("defaults.rules = {critcal = []}", "defaults.rules.critcal", "critical"),
        ("defaults.rules = {critical = ['Declined']}", "defaults.rules.critical", "package.module.Declined"),
        ("sources.orders.atempts = 1", "sources.orders.atempts", "attempts"),
        ("sources.orders.eu.attempts = 1", "sources.orders.eu", '[sources."orders.eu"]'),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_key_file_and_fix(
    write: Any, text: str, key: str, fix: str
) -> None:
    path = write(BROKER + text)
    error = refused(path)
    assert error.key == key
    assert error.where == str(path)
    assert fix in error.fix


def test_two_spellings_of_attempts_at_once_are_refused(write: Any) -> None:
    error = refused(write(BROKER + "[sources.orders]\nmax_retries = 3\nMaxRetryAttempts = 3"))
    assert error.key == "sources.orders"
    assert "max_retries and MaxRetryAttempts" in error.problem


@pytest.mark.parametrize("spelling", ["attempts", "maxRetriesBeforeDLQ", "max_retries", "MaxRetryAttempts"])
def test_imported_spellings_mean_runs(write: Any, spelling: str) -> None:
    assert load(write(BROKER + f"[defaults]\n{spelling} = 3"), env={}).defaults.attempts == 3


def test_bad_toml_is_told_by_line_and_column(write: Any) -> None:
    error = refused(write(BROKER + "port = = 1"))
    assert "line 2, column 8" in error.problem


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 10_000])
def test_toml_that_hurts_the_parser_is_refused_like_any_other(write: Any, text: str) -> None:
    assert refused(write(text)).where.endswith("redrive.toml")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "redrive.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BROKER.replace("\n", "\r\n").encode())
    assert load(path, env={}).broker == "embedded://./broker.db"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "missing.toml").problem
    assert refused(tmp_path).where == str(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"service = '\xe9'")
    assert "byte 11" in refused(tmp_path / "latin.toml").problem


def test_neither_errors_nor_a_repr_show_a_signing_key(write: Any) -> None:
    assert "hunter2" not in str(refused(write(BROKER + "signing_keys = ['hunter2']")))
    assert "00112233" not in repr(load(write(WHOLE), env={}))


@given(st.text(max_size=200))
def test_any_text_is_a_config_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(text.encode("utf-8", "replace"))
    with pytest.raises(ConfigError):
        load(path, env={})


@given(st.sampled_from(["BROKER", "SERVE__PORT", "DEFAULTS__BACKOFF", "SOURCES__A__ATTRIBUTES", "SERVE", "SOURCES"]),
       st.text(max_size=50))  # fmt: skip
def test_any_value_of_a_variable_is_a_setting_or_a_config_error(name: str, text: str) -> None:
    with contextlib.suppress(ConfigError):
        load(None, env={"REDRIVE_BROKER": "embedded://:memory:", f"REDRIVE_{name}": text})


# Layers and what is made of them


def test_later_layers_win_and_unset_keys_show_what_is_below() -> None:
    merged = merge(
        ConsumerSettings(attempts=3, timeout=5.0, attributes={"a": "key", "b": "key"}, enabled=True),
        ConsumerSettings(attempts=4, masked=("x",)),
        ConsumerSettings(attributes={"b": "const:2"}, enabled=False, rules={"critical": ("OSError",)}),
    )
    assert merged == ConsumerSettings(
        attempts=4, timeout=5.0, masked=("x",), attributes={"a": "key", "b": "const:2"}, enabled=False,
        rules={"critical": ("OSError",)},
    )  # fmt: skip
    assert merge() == ConsumerSettings()


def test_merging_changes_none_of_its_layers() -> None:
    below = ConsumerSettings(attributes={"a": "key"})
    merge(below, ConsumerSettings(attributes={"b": "key"}))
    assert below.attributes == {"a": "key"}


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        (2.0, [2, 2, 2]),
        ((1.0, 2.0, 4.0), [1, 2, 4, 4]),
        (BackoffSettings(shape="constant", seconds=3), [3, 3]),
        (BackoffSettings(shape="linear", seconds=1, cap=2), [1, 2, 2]),
        (BackoffSettings(seconds=5, cap=300), [5, 10, 20, 40, 80, 160, 300, 300]),
        (BackoffSettings(seconds=1, factor=3), [1, 3, 9]),
    ],
)
def test_backoff_settings_become_delays(settings: Any, waits: list[float]) -> None:
    assert [backoff_of(settings).delay(run) for run in range(1, len(waits) + 1)] == waits


def test_jitter_reaches_the_backoff() -> None:
    for shape in ("constant", "linear", "exponential"):
        assert backoff_of(BackoffSettings(shape=shape, jitter=0.5)).jitter == 0.5


def test_settings_that_code_gives_are_checked_like_a_file() -> None:
    config = from_mapping({"broker": "embedded://:memory:", "serve": {"port": 1}}, "Redrive(...)")
    assert (config.broker, config.serve.port) == ("embedded://:memory:", 1)
    with pytest.raises(ConfigError) as caught:
        from_mapping({"broker": "embedded://:memory:", "stroe": "x"}, "Redrive(...)")
    assert (caught.value.where, caught.value.key, caught.value.fix) == ("Redrive(...)", "stroe", "did you mean store?")


def test_a_consumers_own_settings_are_checked_like_a_file() -> None:
    given = {"max_retries": 3, "backoff": [1, 2], "timeout": None}
    assert consumer_settings(given, "@consumer") == ConsumerSettings(attempts=3, backoff=(1.0, 2.0))
    with pytest.raises(ConfigError) as caught:
        consumer_settings({"concurrency": 0}, "@consumer")
    assert (caught.value.where, caught.value.key) == ("@consumer", "concurrency")
