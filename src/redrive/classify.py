"""Names a failure: which kind an exception is, and what of it is fit to be kept."""

from __future__ import annotations

import linecache
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any

from msgspec import Struct

from redrive.errors import DeadLetter, HandlerTimeout, PayloadUnreadable, ProcessDied, Retry
from redrive.letter import Failure, Kind
from redrive.redact import clip, scrub, scrub_and_clip

MESSAGE_LIMIT = 2_000
STACK_LIMIT = 6_000
_FRAMES = 24
_OURS = os.path.join(os.path.dirname(__file__), "runtime", "")
_CAUSES = 16
_LEAVES = 64
_SHOWN_LEAVES = 5
_PRECEDENCE = (Kind.CRITICAL, Kind.PERMANENT, Kind.UNREADABLE, Kind.TIMEOUT, Kind.TRANSIENT)

Matcher = type[BaseException] | str | Callable[[BaseException], bool]
"""An exception class, its dotted name, or a predicate."""


class Rule(Struct, frozen=True):
    match: Matcher
    kind: Kind


DEFAULT_RULES = (
    Rule(MemoryError, Kind.CRITICAL),
    Rule(RecursionError, Kind.CRITICAL),
    Rule(ValueError, Kind.PERMANENT),
    Rule(DeadLetter, Kind.PERMANENT),
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
    transient. A group that matches nothing itself is what the gravest of its exceptions is. What matches nothing
    is transient.
    """
    own_rules = tuple(own_rules)
    kind = _kind_alone(error, own_rules)
    if kind is None and isinstance(error, BaseExceptionGroup):
        found = {_kind_alone(leaf, own_rules) for leaf in _leaves(error)}
        kind = next((k for k in _PRECEDENCE if k in found), None)
    return kind or Kind.TRANSIENT


def _kind_alone(error: BaseException, own_rules: tuple[Rule, ...]) -> Kind | None:
    if isinstance(error, PayloadUnreadable):
        return Kind.UNREADABLE
    if isinstance(error, HandlerTimeout):
        return Kind.TIMEOUT
    if isinstance(error, ProcessDied):
        return Kind.CRASH
    if isinstance(error, Retry):
        return Kind.TRANSIENT
    for table in (own_rules, DEFAULT_RULES):
        found = {rule.kind for rule in table if _matches(rule.match, error)}
        if found:
            return next(kind for kind in _PRECEDENCE if kind in found)
    return None


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The exceptions in a group that are no groups themselves, the first ones of very many."""
    waiting: deque[BaseException] = deque([group])
    for _ in range(_LEAVES):
        if not waiting:
            return
        error = waiting.popleft()
        if isinstance(error, BaseExceptionGroup):
            waiting.extendleft(reversed(error.exceptions[:_LEAVES]))
        else:
            yield error


def _matches(match: Matcher, error: BaseException) -> bool:
    if isinstance(match, str):
        return any(match in (_dotted(cls), type_name(cls)) for cls in type(error).__mro__)
    try:
        return isinstance(error, match) if isinstance(match, type) else bool(match(error))
    except Exception:  # noqa: BLE001 - a user's predicate that fails has not matched
        return False


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def type_name(error: BaseException | type) -> str:
    cls = error if isinstance(error, type) else type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else _dotted(cls)


def failure_of(error: BaseException, own_rules: Iterable[Rule] = ()) -> Failure:
    """What is kept of an exception: scrubbed, bounded, and never raising, whatever the exception does."""
    message = _text(error)
    return Failure(
        kind=kind_of(error, own_rules),
        error_type=_name(error),
        message=message,
        stack=_stack(error, message),
        root_type=_name(_root(error)),
        retry_after=_asked(error),
        requested=isinstance(error, DeadLetter),
    )


def _asked(error: BaseException) -> float | None:
    """The wait a handler asked for, unless it makes no sense; then the policy's own delay is as good."""
    after = getattr(error, "after", None) if isinstance(error, Retry) else None
    try:
        seconds = math.nan if after is None else float(after)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


def _name(error: BaseException) -> str:
    return _plain(clip(type_name(error), 200))


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - __str__ belongs to a stranger
        return "<the exception's text could not be read>"
    return _plain(scrub_and_clip(text, MESSAGE_LIMIT))


def _plain(text: str) -> str:
    """Text that every store can hold: no lone surrogates, which are not UTF-8, and no NUL, which ends a text."""
    return text if text.isascii() and "\0" not in text else text.encode("utf-8", "replace").decode().replace("\0", "?")


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while len(chain) < _CAUSES:
        last = chain[-1]
        cause = last.__cause__
        if cause is None and not last.__suppress_context__:
            cause = last.__context__
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


def _stack(error: BaseException, message: str) -> str:
    parts = [_link(link, message if link is error else _text(link)) for link in reversed(_chain(error))]
    return clip("\nwhich led to:\n\n".join(parts), STACK_LIMIT)


def _link(error: BaseException, message: str) -> str:
    lines = [*_frames(error.__traceback__), f"{_name(error)}: {clip(message, 300)}\n"]
    if isinstance(error, BaseExceptionGroup):
        leaves = list(_leaves(error))
        lines += [f"  with {_name(leaf)}: {clip(_text(leaf), 300)}\n" for leaf in leaves[:_SHOWN_LEAVES]]
    return "".join(lines)


def _frames(trace: TracebackType | None) -> Iterator[str]:
    """The innermost frames, where errors happen; our own slots, through which every error passes, say nothing."""
    nearest: deque[TracebackType] = deque(maxlen=_FRAMES)
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            nearest.append(trace)
        trace = trace.tb_next
    for step in nearest:
        code = step.tb_frame.f_code
        yield _frame(code.co_filename, step.tb_lineno or 0, code.co_name)


@lru_cache(4096)
def _frame(file: str, line: int, function: str) -> str:
    # The same handler fails at the same lines again and again; formatting and scrubbing them is the costly part.
    source = linecache.getline(file, line).strip()
    text = f'  File "{file}", line {line}, in {function}\n' + (f"    {source}\n" if source else "")
    return _plain(clip(scrub(text), 500))
