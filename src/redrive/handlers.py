"""Turns a user's function into a handler: what it takes, how it is called, what its answers mean."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from redrive.errors import ConfigError, Discard, PayloadUnreadable, ReportedFailure
from redrive.message import Message


class Handled(Struct, frozen=True):
    pass


class Failed(Struct, frozen=True):
    """Retried or filed like an exception, unless it asks to be discarded."""

    error: BaseException

    @property
    def discards(self) -> bool:
        return isinstance(self.error, Discard)


class Recorded(Struct, frozen=True):
    """Counted and kept in the message's history, and the message goes on."""

    note: str


Answer = Handled | Failed | Recorded
HANDLED = Handled()
Result = Callable[[Any], Any]
Decode = Callable[[Message], Any]


class Handler(Struct, frozen=True):
    """A function and how to feed it. `takes` builds its arguments from a message; `batch` hands it lists."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    batch: bool
    decode: Decode
    wants_message: bool
    result: Result | None = None

    def arguments(self, message: Message) -> tuple[Any, ...]:
        """Raises PayloadUnreadable when the body is not what the handler asked for."""
        body = self.decode(message)
        return (body, message) if self.wants_message else (body,)

    def answer(self, value: Any) -> Answer:
        """What a returned value means. Without `result=`, returning at all means handled."""
        if value is None and self.result is None:
            return HANDLED
        if isinstance(value, (Handled, Failed, Recorded)):
            return value
        if isinstance(value, BaseException):
            return Failed(value)
        if self.result is None:
            return HANDLED
        mapped = self.result(value)
        if isinstance(mapped, (Handled, Failed, Recorded)):
            return mapped
        raise ConfigError(
            f"result= returned {mapped!r}", key=self.name, fix="return handled(), failed(why) or recorded(note)"
        )

    def answers(self, value: Any, expected: int) -> list[Answer]:
        """One answer per message of a batch; None means all handled; any other count fails the whole batch."""
        if value is None:
            return [HANDLED] * expected
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == expected:
            return [self.answer(one) for one in value]
        count = len(value) if isinstance(value, Sequence) else type(value).__name__
        wrong = ReportedFailure(f"{self.name} returned {count} outcomes for {expected} messages")
        return [Failed(wrong)] * expected


def handled() -> Handled:
    return HANDLED


def failed(why: str | BaseException) -> Failed:
    return Failed(why if isinstance(why, BaseException) else ReportedFailure(why))


def recorded(note: str) -> Recorded:
    return Recorded(note)


def handler_for(
    function: Any, *, name: str | None = None, batch: bool = False, result: Result | None = None
) -> Handler:
    """Look at a function once, at registration, so that nothing is guessed while messages flow."""
    if not callable(function):
        raise ConfigError(f"{function!r} is not callable", key="handler", fix="give a function: async def or def")
    label: str = name or getattr(function, "__qualname__", "") or type(function).__qualname__
    body_type, wants_message = _parameters(function, label)
    if batch:
        body_type = _item_type(body_type, label)
    call = function if inspect.isroutine(function) else function.__call__
    return Handler(
        name=label,
        call=function,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        batch=batch,
        decode=decoder_for(body_type, label),
        wants_message=wants_message,
        result=result,
    )


def _parameters(function: Any, label: str) -> tuple[Any, bool]:
    try:
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except NameError as error:
        raise ConfigError(
            f"the annotation of {label} cannot be read: {error}",
            key="handler",
            fix="define the type at module level, or drop `from __future__ import annotations`",
        ) from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in positional]
    if not 1 <= len(names) <= 2 or (len(names) == 2 and hints.get(names[1]) is not Message):
        raise ConfigError(
            f"{label} takes {len(names)} arguments",
            key="handler",
            fix="take a Message, a typed body, or a typed body and a Message",
        )
    return hints.get(names[0], Message), len(names) == 2


def _item_type(annotation: Any, label: str) -> Any:
    if annotation is Message:
        return Message
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (list, Sequence) and arguments:
        return arguments[0]
    raise ConfigError(
        f"the batch handler {label} takes {annotation!r}", key="handler", fix="take list[Message] or list[T]"
    )


def decoder_for(body_type: Any, label: str) -> Decode:
    """A function from message to body; it raises PayloadUnreadable and nothing else."""
    if body_type in (Message, Any, inspect.Parameter.empty):
        return lambda message: message
    if body_type is bytes:
        return _present
    if body_type is str:
        return lambda message: _readable(lambda: _present(message).decode())
    if hasattr(body_type, "model_validate_json"):
        return lambda message: _readable(lambda: body_type.model_validate_json(_present(message)))
    try:
        decode = msgspec.json.Decoder(body_type).decode
    except TypeError as error:
        raise ConfigError(
            f"{label} takes {body_type!r}, which cannot be decoded: {error}",
            key="handler",
            fix="annotate with Message, bytes, str, or a msgspec or pydantic type",
        ) from error
    return lambda message: _readable(lambda: decode(_present(message)))


def _present(message: Message) -> bytes:
    if message.body is None:
        raise PayloadUnreadable("the body is null")
    return message.body


def _readable(decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except PayloadUnreadable:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError) as error:
        raise PayloadUnreadable(f"{type(error).__name__}: {error}") from error
