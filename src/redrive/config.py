"""One TOML file, profiles over it, the environment over both. What cannot work is refused here, by name."""

from __future__ import annotations

import builtins
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field

from redrive import attributes, retry
from redrive.errors import ConfigError
from redrive.keyring import MIN_KEY_BYTES
from redrive.letter import Kind

PREFIX = "REDRIVE_"
SYNONYMS = ("maxRetriesBeforeDLQ", "max_retries", "MaxRetryAttempts")
"""What other frameworks call `attempts`. They count runs here too: 3 is three runs."""
_RESERVED = re.compile(r"(FAULTS|CONFIG|PROFILE|LOGHUB)$|LAB_")

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Delay = Annotated[float, Meta(ge=0, lt=1e9)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Text = Annotated[str, Meta(min_length=1)]
SigningKey = Annotated[str, Meta(pattern=rf"^([0-9a-fA-F]{{2}}){{{MIN_KEY_BYTES},}}$")]
RuleName = Literal["critical", "permanent", "transient"]


class BackoffSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A back-off written as a table. `factor` belongs to exponential, `cap` to what grows."""

    shape: Literal["constant", "linear", "exponential"] = "exponential"
    seconds: Delay = 1.0
    factor: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    cap: Delay | None = None
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0


class BreakerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a source pauses because its dependency is down; what is None keeps the breaker's own default."""

    failures: Count | None = None
    window: Count | None = None
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    cooldown: Seconds | None = None
    longest_cooldown: Seconds | None = None
    dead_ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    dead_window: Count | None = None
    counted: tuple[Kind, ...] | None = None


class ConsumerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one source is consumed. None is unset, so that layers can be laid over each other."""

    attempts: Count | None = None
    backoff: BackoffSettings | Annotated[tuple[Delay, ...], Meta(min_length=1)] | Delay | None = None
    budget: Seconds | None = None
    mode: retry.Mode | None = None
    timeout: Seconds | None = None
    concurrency: Count | None = None
    batch: Count | None = None
    on_exhausted: Literal["dead_letter", "block"] | None = None
    enabled: bool | None = None
    route: Literal["broker", "direct"] | None = None
    dead_letter: Text | None = None
    names: dict[str, Text] | None = None
    attributes: dict[str, Text] | None = None
    message_type: Text | None = None
    identity: Text | None = None
    masked: tuple[Text, ...] | None = None
    labels: tuple[Text, ...] | None = None
    attempts_key: Text | None = None
    max_replays: Count | None = None
    ordering: Literal["key"] | None = None
    breaker: BreakerSettings | None = None
    rules: dict[RuleName, tuple[Text, ...]] | None = None


class EmbeddedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded broker; what is None is left to its own default."""

    partitions: Count | None = None
    lease_seconds: Seconds | None = None
    max_message_bytes: Count | None = None
    retention_seconds: Seconds | None = None


KafkaProperty = Literal[
    "security.protocol", "sasl.mechanism", "sasl.username", "sasl.password",
    "sasl.kerberos.service.name", "sasl.kerberos.principal", "sasl.kerberos.keytab",
    "sasl.oauthbearer.method", "sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope", "sasl.oauthbearer.extensions", "sasl.oauthbearer.token.endpoint.url",
    "ssl.ca.location", "ssl.ca.pem", "ssl.certificate.location", "ssl.certificate.pem",
    "ssl.key.location", "ssl.key.pem", "ssl.key.password", "ssl.keystore.location", "ssl.keystore.password",
    "ssl.crl.location", "ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification",
]  # fmt: skip
"""How to be let in. Any other property of librdkafka could take a promise away, so none can be set."""


class KafkaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kafka; what is None is left to its own default. The first block is for topics that redrive creates."""

    partitions: Count | None = None
    replicas: Annotated[int, Meta(ge=1, le=32767)] | None = None
    retention_seconds: Seconds | None = None
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] | None = None
    max_message_bytes: Annotated[int, Meta(ge=1000, le=100 << 20)] | None = None
    create_topics: bool | None = None
    retry_seconds: Annotated[tuple[Annotated[int, Meta(ge=1, le=2_000_000)], ...], Meta(min_length=1)] | None = None
    group_protocol: Literal["classic", "consumer"] | None = None
    session_seconds: Annotated[float, Meta(ge=1, le=3600)] | None = None
    client: dict[KafkaProperty, Text] | None = None


class ServeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Text = "127.0.0.1"
    port: Port = 8400


class ReplaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Count = 500
    rate: Seconds | None = None
    max_replays: Count = 3
    quiet_seconds: Seconds = 300.0


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a process is told from outside."""

    service: str = ""
    version: str = ""
    environment: str = ""
    broker: str = ""
    store: Text | None = None
    blobs: Text | None = None
    spool: Text | None = None
    attempts: Text | None = None
    signing_keys: tuple[SigningKey, ...] = ()
    embedded: EmbeddedSettings = EmbeddedSettings()
    kafka: KafkaSettings = KafkaSettings()
    serve: ServeSettings = ServeSettings()
    replay: ReplaySettings = ReplaySettings()
    defaults: ConsumerSettings = ConsumerSettings()
    sources: dict[str, ConsumerSettings] = field(default_factory=dict)

    def source(self, name: str) -> ConsumerSettings:
        """The settings of this source alone, also where only an environment variable names it."""
        return self.sources.get(name) or self.sources.get(_spelled(name)) or ConsumerSettings()

    def __repr__(self) -> str:
        # Signing keys and the passwords in addresses must not reach a log through a repr.
        return f"Config(service={self.service!r}, environment={self.environment!r}, sources={list(self.sources)})"


def load(path: Path | None, *, profile: str | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """The file, the profile over it, and the environment over both. Raises ConfigError, and nothing else."""
    raw = {} if path is None else _parse(path)
    file = _Place(str(path or "the environment"))
    profiles = _profiles(raw.pop("profiles", {}), file)
    tree = _checked(raw, Config, file)
    if profile is not None:
        tree = _overlay(tree, _chosen(profile, profiles, file), Config)
    for variable in sorted(env):
        if variable.startswith(PREFIX) and not _RESERVED.match(variable, len(PREFIX)):
            tree = _overridden(tree, variable, env[variable])
    # Each layer was checked alone; this finds what only their sum refuses.
    whole = _checked(tree, Config, _Place(f"{file.where}, with its profile and the environment"))
    return _complete(msgspec.convert(whole, Config), file)


def from_mapping(given: Mapping[str, Any], where: str) -> Config:
    """Settings that code gives instead of a file, checked the same way."""
    place = _Place(where)
    return _complete(msgspec.convert(_checked(dict(given), Config, place), Config), place)


def consumer_settings(given: Mapping[str, Any], where: str) -> ConsumerSettings:
    """One consumer's settings as code gives them; None is unset."""
    known = {name: value for name, value in given.items() if value is not None}
    return msgspec.convert(_checked(known, ConsumerSettings, _Place(where)), ConsumerSettings)


def merge(*layers: ConsumerSettings) -> ConsumerSettings:
    """Later layers win, key by key; the tables `names`, `attributes` and `rules` are joined."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name in ConsumerSettings.__struct_fields__:
            value = getattr(layer, name)
            if isinstance(value, dict):
                merged[name] = {**merged.get(name, {}), **value}
            elif value is not None:
                merged[name] = value
    return ConsumerSettings(**merged)


def backoff_of(settings: BackoffSettings | tuple[float, ...] | float) -> retry.Backoff:
    """A table as it says, a list as explicit delays, a bare number as a constant delay."""
    if isinstance(settings, tuple):
        return retry.delays(settings)
    if not isinstance(settings, BackoffSettings):
        return retry.constant(settings)
    match settings.shape:
        case "constant":
            return retry.constant(settings.seconds, jitter=settings.jitter)
        case "linear":
            return retry.linear(settings.seconds, cap=settings.cap, jitter=settings.jitter)
        case "exponential":
            factor = 2.0 if settings.factor is None else settings.factor
            return retry.exponential(settings.seconds, factor=factor, cap=settings.cap, jitter=settings.jitter)


class _Place(Struct, frozen=True):
    """Where a value was read, for the person who has to mend it."""

    where: str
    key: str = ""

    def inside(self, name: str) -> _Place:
        return _Place(self.where, f"{self.key}.{name}" if self.key else name)

    def error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(problem, key=self.key, where=self.where, fix=fix)


def _parse(path: Path) -> dict[str, Any]:
    place = _Place(str(path))
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise place.error("there is no such file", "create it, or give the right path") from error
    except OSError as error:
        raise place.error(f"cannot be read: {error.strerror}", "make it a readable file") from error
    except UnicodeDecodeError as error:
        raise place.error(f"byte {error.start} is not UTF-8", "save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"not TOML: {error}", "mend that line; text needs quotes") from error


def _profiles(raw: Any, file: _Place) -> dict[str, dict[str, Any]]:
    """All profiles, checked, so that a typing error shows before the day its profile is needed."""
    checked: dict[str, dict[str, Any]] = _checked(raw, dict[str, Config], file.inside("profiles"))
    return checked


def _chosen(profile: str, profiles: Mapping[str, dict[str, Any]], file: _Place) -> dict[str, Any]:
    if profile in profiles:
        return profiles[profile]
    known = f"use one of: {', '.join(profiles)}" if profiles else f"add a table [profiles.{profile}]"
    raise file.inside(f"profiles.{profile}").error("there is no such profile", known)


def _complete(config: Config, file: _Place) -> Config:
    if not config.broker:
        raise file.inside("broker").error("no broker is set", f"set broker, or the variable {PREFIX}BROKER")
    return config


def _arms(wanted: Any) -> tuple[Any, ...]:
    """The alternatives of a type, their constraints taken off."""
    arms = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    return tuple(get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in arms)


def _table(wanted: Any) -> tuple[dict[str, Any], Any]:
    """The keys that a table of this type may have with their types, and the type of all others, None for no others."""
    for arm in _arms(wanted):
        if isinstance(arm, type) and issubclass(arm, Struct):
            synonyms = dict.fromkeys(SYNONYMS, Count) if arm is ConsumerSettings else {}
            return {f.name: f.type for f in msgspec.structs.fields(arm)} | synonyms, None
        if get_origin(arm) is dict:
            names, value = get_args(arm)
            return ({}, value) if names is str else (dict.fromkeys(get_args(names), value), None)
    return {}, None


def _checked(raw: Any, wanted: Any, place: _Place) -> Any:
    """The same tree, every key known and every value of its type, with one spelling for each setting."""
    named, other = _table(wanted)
    if not isinstance(raw, dict) or not (named or other):
        return _value(raw, wanted, place)
    tree = {}
    for name, value in raw.items():
        kind = named.get(name, other)
        if kind is None:
            raise _unknown(name, value, named, place)
        tree[name] = _checked(value, kind, place.inside(name))
    return _consumer(tree, place) if wanted is ConsumerSettings else tree


def _value(raw: Any, wanted: Any, place: _Place) -> Any:
    try:
        msgspec.convert(raw, wanted)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).replace("`", "").replace(" | null", "").partition(" - at $")
        problem = problem.replace("object", "table").replace("array", "list")
        raise _Place(place.where, place.key + path).error(problem, _fix(wanted)) from None
    return raw


_WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false", tuple: "a list in []"}


def _fix(wanted: Any) -> str:
    if SigningKey in get_args(wanted):
        return "run: redrive keygen"
    words: list[str] = []
    for arm in _arms(wanted):
        if isinstance(arm, EnumType) or get_origin(arm) is Literal:
            words += [repr(str(choice)) for choice in (arm if isinstance(arm, EnumType) else get_args(arm))]
        elif arm is not type(None):
            words.append(_WORDS.get(get_origin(arm) or arm, "a table"))
    return "write " + " or ".join(words) + _bounds(wanted)


def _bounds(wanted: Any) -> str:
    """The limits a number must keep, in words."""
    arms = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    limits = next((limit for arm in arms for limit in getattr(arm, "__metadata__", ())), Meta())
    pairs = ((" above", limits.gt), (" from", limits.ge), (" to", limits.le), (" below", limits.lt))
    return "".join(f"{word} {limit:,.12g}" for word, limit in pairs if limit is not None)


def _unknown(name: str, value: Any, known: Iterable[str], place: _Place) -> ConfigError:
    fix = _suggestion(name, known) or f"known here: {', '.join(known)}"
    if isinstance(value, dict) and place.key.startswith("sources."):
        source = place.key.removeprefix("sources.")
        fix += f'; a name with dots needs quotes: [sources."{source}.{name}"]'
    return place.inside(name).error("no such setting", fix)


def _suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return f"did you mean {by_lower[close[0]]}?" if close else ""


def _consumer(table: dict[str, Any], place: _Place) -> dict[str, Any]:
    """What one source's settings must satisfy beyond their types."""
    spellings = [name for name in ("attempts", *SYNONYMS) if name in table]
    if len(spellings) > 1:
        raise place.error(f"{' and '.join(spellings)} are one setting", "keep attempts, delete the other")
    for name in spellings:
        table["attempts"] = table.pop(name)
    for name, spec in table.get("attributes", {}).items():
        _check_spec(name, spec, place.inside("attributes"))
    if "message_type" in table:
        _check_spec("message_type", table["message_type"], place)
    _check_backoff(table.get("backoff"), place.inside("backoff"))
    _check_pattern(table.get("dead_letter", ""), place.inside("dead_letter"))
    for kind, errors in table.get("rules", {}).items():
        _check_rules(errors, place.inside(f"rules.{kind}"))
    return table


def _check_spec(name: str, spec: str, place: _Place) -> None:
    try:
        attributes.parse(name, spec)
    except ConfigError as error:
        raise place.inside(name).error(error.problem, error.fix) from None


def _check_backoff(backoff: Any, place: _Place) -> None:
    if not isinstance(backoff, dict):
        return
    shape = backoff.get("shape", "exponential")
    unused = {"linear": ("factor",), "constant": ("factor", "cap"), "exponential": ()}[shape]
    for name in unused:
        if name in backoff:
            raise place.inside(name).error(f"means nothing for {shape}", "delete it, or use shape = 'exponential'")


def _check_pattern(pattern: str, place: _Place) -> None:
    if not re.fullmatch(r"([^{}]|\{\w+\})*", pattern):
        raise place.error(f"cannot read {pattern!r}", "write placeholders as {source}, {group} or {a_name}")


def _check_rules(errors: list[str], place: _Place) -> None:
    for name in errors:
        if "." not in name and not hasattr(builtins, name):
            raise place.error(f"{name} is no built-in exception", f"give its dotted name, e.g. package.module.{name}")


def _overlay(under: dict[str, Any], over: Mapping[str, Any], wanted: Any) -> dict[str, Any]:
    """Tables are joined key by key; a back-off is one value, because its keys mean nothing alone."""
    named, other = _table(wanted)
    joined = dict(under)
    for name, value in over.items():
        kind, known = named.get(name, other), under.get(name)
        whole = BackoffSettings in _arms(kind) or not (isinstance(value, dict) and isinstance(known, dict))
        joined[name] = value if whole else _overlay(known or {}, value, kind)
    return joined


def _overridden(tree: dict[str, Any], variable: str, text: str) -> dict[str, Any]:
    """The tree with what this variable sets, or as it was when the variable is none of ours."""
    where = f"environment variable {variable}"
    rest = variable.removeprefix(PREFIX).lower()
    found = _located(rest, Config, tree, _Place(where))
    if found is None:
        _refuse_near_miss(rest, text, tree, _Place(where, rest.replace("__", ".")))
        return tree
    steps, wanted = found
    value = _from_text(text, wanted, _Place(where, ".".join(steps)))
    if steps[-1] in SYNONYMS:
        steps[-1] = "attempts"
    return _placed(tree, steps, value, _Place(where))


def _located(rest: str, wanted: Any, tree: Any, place: _Place) -> tuple[list[str], Any] | None:
    """The path and the type of the setting that a variable's name spells; None when it spells none."""
    if not rest:
        return [], wanted
    named, other = _table(wanted)
    inside = tree if isinstance(tree, dict) else {}
    known = [*named, *(inside if other else ())]
    matching = [name for name in known if f"{rest}__".startswith(f"{_spelled(name)}__")]
    if len({_spelled(name) for name in matching}) < len(matching):
        raise place.error(f"can mean {' or '.join(matching)}", "set it in the file instead")
    name = max(matching, key=len, default=rest.partition("__")[0] if other else "")
    if not name:
        return None
    found = _located(rest[len(_spelled(name)) + 2 :], named.get(name, other), inside.get(name), place)
    return found and ([name, *found[0]], found[1])


def _spelled(name: str) -> str:
    """A name as a variable can spell it, which has only letters, digits and underscores."""
    return re.sub(r"\W", "_", name.lower())


def _refuse_near_miss(rest: str, text: str, tree: dict[str, Any], place: _Place) -> None:
    """Refuse what was meant for us and says nothing; leave alone what merely shares our prefix.

    Kubernetes, for one, sets REDRIVE_SERVE_PORT=tcp://… beside a service called redrive-serve.
    """
    named, _ = _table(Config)
    sections = {name: kind for name, kind in named.items() if _table(kind) != ({}, None)}
    section, _, key = rest.partition("__")
    if section in sections:
        known, _ = _table(sections[section])
        raise place.error("no such setting", _suggestion(key, known) or f"known here: {', '.join(known)}")
    section, _, key = rest.partition("_")
    if section in sections and "://" not in text and _located(f"{section}__{key}", Config, tree, place):
        raise place.error("no such setting", f"two underscores part section and key: {PREFIX}{section.upper()}__…")
    if close := _suggestion(rest, named, cutoff=0.8):
        raise place.error("no such setting", close)


def _from_text(text: str, wanted: Any, place: _Place) -> Any:
    """The text as TOML where that is of the wanted type, else as it stands."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _checked(text, wanted, place)
    if parsed.keys() != {"value"} or _takes_text_only(wanted, parsed["value"]):
        return _checked(text, wanted, place)
    return _checked(parsed["value"], wanted, place)


def _takes_text_only(wanted: Any, value: Any) -> bool:
    return str in _arms(wanted) and not isinstance(value, str)


def _placed(tree: dict[str, Any], steps: list[str], value: Any, place: _Place) -> dict[str, Any]:
    name, *deeper = steps
    if not deeper:
        return {**tree, name: value}
    inside = tree.get(name, {})
    if not isinstance(inside, dict):
        raise place.inside(name).error("is not a table in the file", "set it whole")
    return {**tree, name: _placed(inside, deeper, value, place.inside(name))}
