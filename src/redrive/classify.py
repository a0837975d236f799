"""Names a failure: which kind an exception is, and what of it is fit to be kept."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

from msgspec import Struct

from redrive.errors import DeadLetter, HandlerTimeout, PayloadUnreadable, Retry
from redrive.letter import Failure, Kind
from redrive.redact import clip, scrub

MESSAGE_LIMIT = 2_000
STACK_LIMIT = 6_000
_FRAMES = 24
_CAUSES = 16
_PRECEDENCE = (Kind.CRITICAL, Kind.PERMANENT, Kind.TRANSIENT)

Matcher = type[BaseException] | str | Callable[[BaseException], bool]
"""An exception class, its dotted name, or a predicate."""


class Rule(Struct, frozen=True):
    match: Matcher
    kind: Kind


DEFAULT_RULES = (
    Rule(MemoryError, Kind.CRITICAL),
    Rule(RecursionError, Kind.CRITICAL),
    Rule(ValueError, Kind.PERMANENT),
)


def rules(
    *, critical: Iterable[Matcher] = (), permanent: Iterable[Matcher] = (), transient: Iterable[Matcher] = ()
) -> tuple[Rule, ...]:
    """Rules from lists of exception classes, dotted names or predicates."""
    pairs = ((Kind.CRITICAL, critical), (Kind.PERMANENT, permanent), (Kind.TRANSIENT, transient))
    return tuple(Rule(match, kind) for kind, matches in pairs for match in matches)


def kind_of(error: BaseException, own_rules: Iterable[Rule] = ()) -> Kind:
    """The kind of an exception.

    The user's rules come first, then the defaults; among those that match, critical wins over permanent over
    transient. What matches nothing is transient.
    """
    if isinstance(error, PayloadUnreadable):
        return Kind.UNREADABLE
    if isinstance(error, HandlerTimeout):
        return Kind.TIMEOUT
    if isinstance(error, Retry):
        return Kind.TRANSIENT
    for table in (own_rules, DEFAULT_RULES):
        found = {rule.kind for rule in table if _matches(rule.match, error)}
        if found:
            return next(kind for kind in _PRECEDENCE if kind in found)
    return Kind.TRANSIENT


def _matches(match: Matcher, error: BaseException) -> bool:
    if isinstance(match, str):
        return any(
            match in (_dotted(cls), cls.__qualname__ if cls.__module__ == "builtins" else "")
            for cls in type(error).__mro__
        )
    if isinstance(match, type):
        return isinstance(error, match)
    try:
        return bool(match(error))
    except Exception:  # noqa: BLE001 - a user's predicate that fails has not matched
        return False


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else _dotted(cls)


def failure_of(error: BaseException, own_rules: Iterable[Rule] = ()) -> Failure:
    """What is kept of an exception: scrubbed, bounded, and never raising, whatever the exception does."""
    return Failure(
        kind=kind_of(error, own_rules),
        error_type=clip(type_name(error), 200),
        message=_text(error),
        stack=_stack(error),
        root_type=clip(type_name(_root(error)), 200),
        retry_after=error.after if isinstance(error, Retry) else None,
        requested=isinstance(error, DeadLetter),
    )


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - __str__ belongs to a stranger
        return "<the exception's text could not be read>"
    # Cut before scrubbing bounds the time; the second cut keeps the limit exact.
    return clip(scrub(clip(text, MESSAGE_LIMIT * 4)), MESSAGE_LIMIT).encode("utf-8", "replace").decode()


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while len(chain) < _CAUSES:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is seen for seen in chain):
            break
        chain.append(cause)
    return chain


def _root(error: BaseException) -> BaseException:
    root = error
    for _ in range(_CAUSES):
        if root.__cause__ is None:
            return root
        root = root.__cause__
    return root


def _stack(error: BaseException) -> str:
    parts = []
    for link in reversed(_chain(error)):
        frames = traceback.extract_tb(link.__traceback__, limit=-_FRAMES)
        parts.append("".join(traceback.format_list(frames)) + f"{type_name(link)}: {clip(_text(link), 300)}\n")
    joined = "\nwhich led to:\n\n".join(parts)
    return clip(scrub(clip(joined, STACK_LIMIT * 4)), STACK_LIMIT).encode("utf-8", "replace").decode()
