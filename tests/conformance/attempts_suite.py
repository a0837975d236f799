"""What every record of attempts must do. A backend's test subclasses this and gives two fixtures.

`attempts` is open; `reopened` opens another instance over the same data, as another process would see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from redrive.attempts.base import Attempts, Span

NOW = 1_800_000_000_000
TTL_SECONDS = 60
LATER = NOW + TTL_SECONDS * 1000
SPAN = Span("span-1", "orders", "billing", 3, ("10", "11", "15"))
Reopened = Callable[[], Awaitable[Attempts]]


async def lane(attempts: Attempts) -> list[Span]:
    return await attempts.open_spans("orders", "billing", 3)


class AttemptsSuite:
    backend: ClassVar[Any]

    async def test_a_started_span_is_open_until_it_is_finished(self, attempts: Attempts) -> None:
        await attempts.turn(start=[SPAN])
        assert await lane(attempts) == [SPAN]
        await attempts.turn(finish=[SPAN.id])
        assert await lane(attempts) == []

    async def test_a_span_is_read_by_whoever_takes_the_lane_next(self, attempts: Attempts, reopened: Reopened) -> None:
        alone = replace(SPAN, id="span-2", positions=("11",), alone=True)
        await attempts.turn(start=[SPAN, alone])
        assert await lane(await reopened()) == [SPAN, alone]

    async def test_finishing_and_starting_is_one_step(self, attempts: Attempts) -> None:
        following = replace(SPAN, id="span-2", positions=("16",))
        await attempts.turn(start=[SPAN])
        await attempts.turn(start=[following], finish=[SPAN.id])
        assert await lane(attempts) == [following]

    async def test_finishing_a_span_nobody_started_changes_nothing(self, attempts: Attempts) -> None:
        await attempts.turn(start=[SPAN])
        await attempts.turn(finish=["unknown", "unknown"])
        assert await lane(attempts) == [SPAN]

    async def test_starting_the_same_span_again_leaves_one(self, attempts: Attempts) -> None:
        await attempts.turn(start=[SPAN])
        await attempts.turn(start=[SPAN])
        assert await lane(attempts) == [SPAN]

    async def test_a_turn_of_nothing_is_nothing(self, attempts: Attempts) -> None:
        await attempts.turn()
        assert await lane(attempts) == []

    async def test_a_lane_sees_its_own_spans_only(self, attempts: Attempts) -> None:
        neighbours = [
            replace(SPAN, id="a", source="refunds"),
            replace(SPAN, id="b", group="shipping"),
            replace(SPAN, id="c", partition=4),
        ]
        await attempts.turn(start=[*neighbours, SPAN])
        assert await lane(attempts) == [SPAN]

    async def test_a_batch_of_spans_keeps_its_order(self, attempts: Attempts) -> None:
        spans = [replace(SPAN, id=f"span-{n}", positions=(str(n),)) for n in range(500)]
        await attempts.turn(start=spans)
        assert await lane(attempts) == spans
        await attempts.turn(finish=[span.id for span in spans[:499]])
        assert await lane(attempts) == spans[499:]

    @pytest.mark.parametrize("text", ["", "a/b:c", "naïve ✓", "nul\0nul", "\udcff\ud800", "x" * 5000])
    async def test_names_and_positions_may_hold_anything(self, attempts: Attempts, text: str) -> None:
        span = Span(f"id{text}", text, text, 0, (text, "1"))
        await attempts.turn(start=[span])
        assert await attempts.open_spans(text, text, 0) == [span]
        assert await attempts.increment([text], NOW) == [1]
        assert await attempts.counts([text], NOW) == [1]

    async def test_counts_grow_by_one_each_time(self, attempts: Attempts) -> None:
        assert await attempts.increment(["a", "b"], NOW) == [1, 1]
        assert await attempts.increment(["b", "c"], NOW) == [2, 1]
        assert await attempts.counts(["a", "b", "c", "d"], NOW) == [1, 2, 1, 0]

    async def test_a_key_named_twice_counts_twice(self, attempts: Attempts) -> None:
        assert await attempts.increment(["a", "a"], NOW) == [1, 2]

    async def test_counting_nothing_says_nothing(self, attempts: Attempts) -> None:
        assert await attempts.increment([], NOW) == []
        assert await attempts.counts([], NOW) == []

    async def test_counts_are_seen_by_other_processes(self, attempts: Attempts, reopened: Reopened) -> None:
        await attempts.increment(["a"], NOW)
        other = await reopened()
        assert await other.increment(["a"], NOW) == [2]
        assert await attempts.counts(["a"], NOW) == [2]

    async def test_no_increment_is_lost_between_tasks(self, attempts: Attempts) -> None:
        counted = await asyncio.gather(*(attempts.increment(["a"], NOW) for _ in range(50)))
        assert sorted(counted) == [[n] for n in range(1, 51)]

    async def test_clearing_forgets_only_the_keys_named(self, attempts: Attempts) -> None:
        await attempts.increment(["a", "b"], NOW)
        await attempts.clear(["a", "unknown"])
        assert await attempts.counts(["a", "b"], NOW) == [0, 1]
        assert await attempts.increment(["a"], NOW) == [1]
