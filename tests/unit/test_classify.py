from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from redrive.classify import MESSAGE_LIMIT, STACK_LIMIT, Rule, failure_of, kind_of, rules, type_name
from redrive.errors import DeadLetter, HandlerTimeout, PayloadUnreadable, Retry
from redrive.letter import Failure, Kind


class Declined(Exception):
    pass


class Fraud(Declined):
    pass


DECLINED = f"{__name__}.Declined"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def is_sound(failure: Failure) -> bool:
    """Within its limits and fit for any store."""
    msgspec.json.encode(failure)
    assert len(failure.message) <= MESSAGE_LIMIT
    assert len(failure.stack) <= STACK_LIMIT
    assert len(failure.error_type) <= 200
    return "\0" not in failure.message + failure.stack + failure.error_type + failure.root_type


# Kinds


def test_what_matches_nothing_is_transient() -> None:
    assert kind_of(RuntimeError()) is kind_of(OSError()) is kind_of(TimeoutError()) is Kind.TRANSIENT


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError(), Kind.PERMANENT),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), Kind.PERMANENT),
        (MemoryError(), Kind.CRITICAL),
        (RecursionError(), Kind.CRITICAL),
        (PayloadUnreadable("x"), Kind.UNREADABLE),
        (HandlerTimeout("bill", 1), Kind.TIMEOUT),
        (Retry(), Kind.TRANSIENT),
        (DeadLetter("x"), Kind.PERMANENT),
    ],
)
def test_some_kinds_need_no_rule(error: BaseException, kind: Kind) -> None:
    assert kind_of(error) is kind


def test_critical_wins_over_permanent_over_transient_in_any_order() -> None:
    both = rules(transient=[Declined], permanent=[Declined], critical=[Declined])
    assert kind_of(Declined(), both) is kind_of(Declined(), reversed(both)) is Kind.CRITICAL
    assert kind_of(Declined(), rules(transient=[Declined], permanent=[Fraud])) is Kind.TRANSIENT
    assert kind_of(Fraud(), rules(transient=[Declined], permanent=[Fraud])) is Kind.PERMANENT


def test_the_users_rules_win_over_the_defaults() -> None:
    assert kind_of(ValueError(), rules(transient=[ValueError])) is Kind.TRANSIENT


@pytest.mark.parametrize("name", [DECLINED, "Exception", "builtins.Exception"])
def test_a_dotted_name_matches_subclasses_too(name: str) -> None:
    assert kind_of(Fraud(), rules(critical=[name])) is Kind.CRITICAL


@pytest.mark.parametrize("name", ["Declined", "", "Fraud", f"{__name__}.Frau", "other.Declined"])
def test_half_a_name_matches_nothing(name: str) -> None:
    assert kind_of(Declined(), rules(critical=[name])) is Kind.TRANSIENT


def test_a_predicate_decides_and_one_that_fails_has_not_matched() -> None:
    assert kind_of(Declined("51"), rules(permanent=[lambda e: e.args == ("51",)])) is Kind.PERMANENT
    assert kind_of(Declined(), rules(permanent=[lambda e: e.args[0] == "51"])) is Kind.TRANSIENT


def test_a_type_whose_isinstance_fails_has_not_matched() -> None:
    class Broken(type):
        def __instancecheck__(cls, _: object) -> bool:
            raise RuntimeError("no")

    class Odd(Exception, metaclass=Broken):
        pass

    assert kind_of(Declined(), (Rule(Odd, Kind.CRITICAL),)) is Kind.TRANSIENT


async def test_a_task_group_is_as_grave_as_the_gravest_of_its_tasks() -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def handle() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(TimeoutError("slow")))
            group.create_task(fails(ValueError("no such currency")))

    with pytest.raises(ExceptionGroup) as caught:
        await handle()
    failure = failure_of(caught.value)
    assert failure.kind is Kind.PERMANENT
    assert "with TimeoutError: slow" in failure.stack
    assert "with ValueError: no such currency" in failure.stack
    assert kind_of(ExceptionGroup("x", [OSError()])) is Kind.TRANSIENT


def test_a_rule_for_the_group_itself_wins_over_its_members() -> None:
    group = ExceptionGroup("x", [ValueError()])
    assert kind_of(group, rules(transient=[ExceptionGroup])) is Kind.TRANSIENT


# What is kept


def test_a_failure_says_what_happened_and_where() -> None:
    failure = failure_of(raised(Declined("card 4 was declined")))
    assert failure.error_type == failure.root_type == DECLINED
    assert failure.message == "card 4 was declined"
    assert "in raised" in failure.stack
    assert "raise error from cause" in failure.stack
    assert failure.stack.endswith(f"{DECLINED}: card 4 was declined\n")


def test_the_cause_is_told_before_what_it_led_to() -> None:
    failure = failure_of(raised(Declined("not booked"), cause=OSError("disk full")))
    cause, between, effect = map(failure.stack.index, ("OSError: disk full", "which led to", "not booked"))
    assert cause < between < effect
    assert failure.root_type == "OSError"


def test_a_suppressed_context_is_not_told() -> None:
    error = Declined("public")
    error.__context__ = OSError("private")
    assert "private" in failure_of(error).stack
    error.__suppress_context__ = True
    assert "private" not in failure_of(error).stack


def test_secrets_are_scrubbed_from_message_stack_and_causes() -> None:
    cause = OSError("cannot reach postgres://app:hunter2@db/x")
    failure = failure_of(raised(Declined("password=hunter2"), cause))
    assert "hunter2" not in failure.message + failure.stack
    assert "db/x" in failure.stack


def test_a_secret_written_in_the_source_does_not_leave_with_the_stack() -> None:
    with pytest.raises(TypeError) as caught:
        print(password="hunter2")  # type: ignore[call-overload]
    stack = failure_of(caught.value).stack
    assert "print(password=" in stack
    assert "hunter2" not in stack


def test_handler_verdicts_are_kept_as_facts() -> None:
    assert failure_of(Retry(after=5)).retry_after == 5.0
    assert failure_of(DeadLetter("fraud")).requested
    assert not failure_of(Declined()).requested


def test_a_verdict_that_forgot_its_constructor_is_still_a_verdict() -> None:
    class Later(Retry):
        def __init__(self) -> None:
            pass

    assert failure_of(Later()).retry_after is None


# Hostile exceptions


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Falsy(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")


def nested(depth: int) -> BaseException:
    error: BaseException = ValueError("first")
    for number in range(depth):
        outer = RuntimeError(str(number))
        outer.__cause__ = error
        error = outer
    return error


def cyclic() -> BaseException:
    a, b = RuntimeError("a"), RuntimeError("b")
    a.__cause__, b.__cause__ = b, a
    return a


def with_falsy_cause() -> BaseException:
    error = RuntimeError()
    error.__cause__ = Falsy("the cause")
    return error


def deep_group(depth: int) -> BaseException:
    group: ExceptionGroup[Any] = ExceptionGroup("x", [OSError()])
    for _ in range(depth):
        group = ExceptionGroup("x", [group])
    return group


def badly_named() -> BaseException:
    odd = type("Odd", (Exception,), {"__module__": "\ud800"})
    odd.__qualname__ = "O\0dd\udfff" * 1000
    return odd("x")


def recursing() -> BaseException:
    def again() -> None:
        again()

    try:
        again()
    except RecursionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        Unreadable,
        Falsy,
        with_falsy_cause,
        lambda: ValueError("x" * 10_000_000),
        lambda: ValueError("password=" * 1_000_000),
        lambda: ValueError("\ud800\udfff lone \0"),
        lambda: ValueError(b"\xff" * 1000),
        lambda: nested(3000),
        cyclic,
        lambda: deep_group(3000),
        lambda: ExceptionGroup("x", [ValueError("y" * 10_000)] * 5000),
        badly_named,
        recursing,
        KeyboardInterrupt,
    ],
)
def test_no_exception_breaks_the_diagnosis_or_makes_it_large_or_slow(make: Any) -> None:
    error = raised(make())
    begun = time.perf_counter()
    failure = failure_of(error)
    assert time.perf_counter() - begun < 0.5
    assert is_sound(failure)


def test_a_cause_that_is_falsy_is_still_the_cause() -> None:
    failure = failure_of(with_falsy_cause())
    assert "the cause" in failure.stack
    assert failure.root_type.endswith("Falsy")


def test_an_unreadable_text_is_said_to_be_so() -> None:
    assert failure_of(Unreadable()).message == "<the exception's text could not be read>"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    message = failure_of(RuntimeError("begin" + "x" * 10_000_000 + "end")).message
    assert message.startswith("begin")
    assert message.endswith("end")
    assert "cut]" in message


def test_an_ordinary_failure_is_diagnosed_quickly() -> None:
    """Each failed message pays for this. The figure is 15 microseconds; the limit leaves room for a busy machine."""
    error = raised(ConnectionError("connection to db-7:5432 refused after 3 tries"))
    failure_of(error)
    best = min(_seconds(lambda: failure_of(error)) for _ in range(20))
    assert best / 100 < 60e-6


def _seconds(work: Any) -> float:
    begun = time.perf_counter()
    for _ in range(100):
        work()
    return time.perf_counter() - begun


def test_builtin_exceptions_are_named_briefly() -> None:
    assert (type_name(OSError()), type_name(Declined())) == ("OSError", DECLINED)
