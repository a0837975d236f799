"""What every store promises. A backend is one subclass with a `make_store` fixture.

`make_store` is a function that returns a new store, not opened yet, over a database that is empty.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from redrive.errors import BadRequest, LeaseConflict, StoreUnavailable
from redrive.letter import MOVES, Act, Claim, Kind, Letter, Outcome, Reason, State, identity
from redrive.message import Message
from redrive.query import MAX_PAGE, Filter
from redrive.stores.base import Filing, HandlerRate, JobState, Recorded, Refusal, Report, Store, Summary, Tally

NOW = 1_700_000_000_000
MINUTE = 60_000
ANN = Act("ann", "mended the mapping")
OFFICE = Act("redrive", "replay confirmed")
MakeStore = Callable[[], Store]


def letter(n: int = 0, **changes: Any) -> Letter:
    message = Message("kafka", "orders", 3, str(n), NOW - 5000, b"key-%d" % n, b'{"n": %d}' % n, (("trace", b"t"),))
    message = changes.pop("message", message)
    group = changes.pop("group", "billing")
    return replace(
        Letter(
            id=identity(message, group),
            message=message,
            group=group,
            kind=Kind.TRANSIENT,
            reason=Reason.MAX_RETRIES_EXCEEDED,
            error_type="TimeoutError",
            error_message="the upstream did not answer",
            first_attempt_at=NOW - 4000,
            last_attempt_at=NOW - 1000,
            attempts=4,
            handler="charge",
            message_type="OrderPlaced",
        ),
        **changes,
    )


def many(count: int, **changes: Any) -> list[Letter]:
    return [letter(n, **changes) for n in range(count)]


def again(known: Letter, hop: int, **changes: Any) -> Letter:
    """The same letter, dead again after its replay `hop`."""
    return replace(known, hop=hop, **changes)


def ok(known: Letter, hop: int) -> Outcome:
    return Outcome(known.id, hop, ok=True, at=NOW)


async def state_of(store: Store, known: Letter) -> State | None:
    found = await store.letters.get(known.id)
    return found.state if found else None


async def replay(store: Store, letters: list[Letter], now: int = NOW, *, window: int = 500) -> str:
    """A job that publishes all of these and whose copies are all confirmed."""
    job = await store.jobs.create([one.id for one in letters], ANN, now, window=window)
    leased = await store.jobs.lease("worker", 60, now)
    assert leased
    assert leased.id == job.id
    while await store.jobs.advance(job.id, "worker", now):
        await store.jobs.close_window(job.id, "worker", [], now)
    return job.id


async def put_in(store: Store, known: Letter, state: State) -> None:
    """Bring a new letter into this state by a way that is open to it."""
    if state is State.HELD:
        await store.letters.file([replace(known, reason=Reason.HELD)], NOW)
        return
    await store.letters.file([known], NOW)
    if state is not State.PENDING:
        assert await store.letters.move([known.id], State.PENDING, state, ANN, NOW)


async def ids(store: Store, wanted: Filter) -> set[str]:
    return {row.id for row in (await store.letters.page(wanted, MAX_PAGE)).rows}


class StoreSuite:
    @pytest.fixture
    async def store(self, make_store: MakeStore) -> Any:
        store = make_store()
        await store.open()
        yield store
        await store.close()

    # --- filing: one letter per message and group (P2)

    async def test_a_filed_letter_comes_back_as_it_was(self, store: Store) -> None:
        sent = letter(attributes={"order": "7"}, masked=("order",), detail="why", stack="at line 1", marks=("odd",))
        [filed] = await store.letters.file([sent], NOW)
        assert (filed.id, filed.filing, filed.state) == (sent.id, Filing.NEW, State.PENDING)
        found = await store.letters.get(sent.id)
        assert found
        assert found.letter == sent
        assert (found.state, found.hop, found.occurrences, found.filed_at) == (State.PENDING, 0, 1, NOW)
        assert (found.confirmed_hop, found.job) == (-1, "")

    async def test_an_unknown_letter_is_none(self, store: Store) -> None:
        assert await store.letters.get("nobody") is None
        assert await store.letters.get("\udc80\0") is None
        assert await store.letters.occurrences("nobody") == []

    async def test_filing_the_same_death_again_changes_nothing(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        before = await store.letters.get(letter().id)
        [filed] = await store.letters.file([letter(error_message="told differently")], NOW + 9)
        assert filed.filing is Filing.DUPLICATE
        assert await store.letters.get(letter().id) == before
        assert len(await store.letters.occurrences(letter().id)) == 1

    async def test_a_duplicate_inside_one_batch_is_filed_once(self, store: Store) -> None:
        filed = await store.letters.file([letter(), letter(), again(letter(), 1), again(letter(), 1)], NOW)
        assert [one.filing for one in filed] == [Filing.NEW, Filing.DUPLICATE, Filing.AGAIN, Filing.DUPLICATE]
        found = await store.letters.get(letter().id)
        assert found
        assert (found.occurrences, found.hop, found.letter.hop) == (2, 1, 1)

    async def test_a_new_death_replaces_the_facts_and_keeps_the_original(self, store: Store) -> None:
        first = letter(attributes={"order": "7"})
        await store.letters.file([first], NOW)
        other = replace(first.message, body=b"changed", key=None, headers=())
        second = again(
            first, 1, message=other, error_type="ValueError", first_attempt_at=NOW + 50, attributes={"order": "8"}
        )
        [filed] = await store.letters.file([second], NOW + 100)
        found = await store.letters.get(first.id)
        assert found
        assert filed.filing is Filing.AGAIN
        assert found.letter.message == first.message
        assert found.letter.first_attempt_at == first.first_attempt_at
        assert found.letter.error_type == "ValueError"
        assert (found.occurrences, found.filed_at, found.updated_at) == (2, NOW, NOW + 100)
        assert await ids(store, Filter(attributes={"order": "8"})) == {first.id}
        assert await ids(store, Filter(attributes={"order": "7"})) == set()
        assert await ids(store, Filter(text="ValueError")) == {first.id}
        assert await ids(store, Filter(text="TimeoutError")) == set()

    async def test_every_death_is_an_occurrence_in_order(self, store: Store) -> None:
        deaths = [again(letter(), hop, error_message=f"death {hop}") for hop in range(3)]
        for n, death in enumerate(deaths):
            await store.letters.file([death], NOW + n)
        told = await store.letters.occurrences(letter().id)
        assert [(one.hop, one.filed_at, one.error_message) for one in told] == [
            (0, NOW, "death 0"),
            (1, NOW + 1, "death 1"),
            (2, NOW + 2, "death 2"),
        ]

    async def test_a_late_death_of_an_old_hop_only_adds_an_occurrence(self, store: Store) -> None:
        await store.letters.file([letter(), again(letter(), 2, error_type="Latest")], NOW)
        [filed] = await store.letters.file([again(letter(), 1, error_type="Late")], NOW + 1)
        found = await store.letters.get(letter().id)
        assert found
        assert filed.filing is Filing.AGAIN
        assert (found.hop, found.letter.hop, found.letter.error_type, found.occurrences) == (2, 2, "Latest", 3)

    async def test_a_purged_letter_is_not_resurrected(self, store: Store) -> None:
        await store.letters.file([letter(attributes={"order": "7"})], NOW)
        assert await store.letters.purge([letter().id, "nobody"], ANN, NOW) == [letter().id]
        for hop in (0, 1):
            [filed] = await store.letters.file([again(letter(), hop)], NOW)
            assert filed.filing is Filing.DUPLICATE
        assert await store.letters.get(letter().id) is None
        assert await store.letters.occurrences(letter().id) == []
        for wanted in (Filter(), Filter(text="timeout"), Filter(attributes={"order": "7"})):
            assert await ids(store, wanted) == set()
        assert await store.letters.purge([letter().id], ANN, NOW) == []

    async def test_a_replaying_letter_is_not_purged(self, store: Store) -> None:
        await put_in(store, letter(), State.REPLAYING)
        assert await store.letters.purge([letter().id], ANN, NOW) == []
        assert await state_of(store, letter()) is State.REPLAYING

    async def test_the_same_message_in_another_group_is_another_letter(self, store: Store) -> None:
        filed = await store.letters.file([letter(), letter(group="shipping")], NOW)
        assert [one.filing for one in filed] == [Filing.NEW, Filing.NEW]

    async def test_a_held_message_is_filed_as_held(self, store: Store) -> None:
        [filed] = await store.letters.file([letter(reason=Reason.HELD)], NOW)
        assert filed.state is State.HELD

    async def test_an_empty_batch_is_nothing(self, store: Store) -> None:
        assert await store.letters.file([], NOW) == []
        assert await store.letters.move([], State.PENDING, State.RESOLVED, ANN, NOW) == []

    async def test_a_thousand_letters_in_one_batch(self, store: Store) -> None:
        filed = await store.letters.file(many(1000), NOW)
        assert {one.filing for one in filed} == {Filing.NEW}
        assert (await store.letters.count(Filter())).count == 1000

    # --- loops end (P5)

    async def test_too_many_deaths_quarantine_a_letter(self, store: Store) -> None:
        await store.letters.file([letter(max_replays=2)], NOW)
        for hop, state in ((1, State.PENDING), (2, State.QUARANTINED)):
            await replay(store, [letter()])
            [filed] = await store.letters.file([again(letter(), hop, max_replays=2)], NOW)
            assert filed.state is state
        job = await replay(store, [letter()])
        assert await store.jobs.refusals(job) == [Refusal(letter().id, "is quarantined, not pending")]

    async def test_a_letter_first_seen_after_too_many_replays_is_quarantined(self, store: Store) -> None:
        [filed] = await store.letters.file([letter(hop=3)], NOW)
        assert filed.state is State.QUARANTINED

    # --- bytes are sacred (P8)

    @pytest.mark.parametrize("body", [None, b"", b"\0\xff\xfe", b"\r\n'\";--"])
    @pytest.mark.parametrize("key", [None, b"", b"\0\xff"])
    async def test_bytes_come_back_bit_for_bit(self, store: Store, key: bytes | None, body: bytes | None) -> None:
        headers = (("b", b"\xff\0"), ("a", None), ("b", b""), ("", b"1"), ("n\0ame", b"2"), ("bad\udcff", b"3"))
        sent = letter(message=Message("k\udc80", "or\0ders\udcfe", 0, "7-\udcff", NOW, key, body, headers))
        await store.letters.file([sent], NOW)
        found = await store.letters.get(sent.id)
        assert found
        assert found.letter.message == sent.message

    async def test_a_body_of_ten_megabytes(self, store: Store) -> None:
        body = random.Random(1).randbytes(10_000_000)
        sent = letter(message=replace(letter().message, body=body))
        await store.letters.file([sent], NOW)
        found = await store.letters.get(sent.id)
        assert found
        assert found.letter.message.body == body
        assert (await store.letters.page(Filter())).rows[0].size == 10_000_000

    async def test_a_body_at_its_source_stays_there_whatever_a_later_death_brings(self, store: Store) -> None:
        """Otherwise a replay would take the missing body for a null one."""
        known = letter(marks=("diagnostics_truncated", "body_at_source"))
        known = replace(known, message=replace(known.message, body=None))
        await store.letters.file([known], NOW)
        await store.letters.file([again(known, 1, marks=("tampered",))], NOW)
        found = await store.letters.get(known.id)
        assert found
        assert found.letter.marks == ("tampered", "body_at_source")

    async def test_a_body_in_the_store_is_not_sought_at_the_source_after_a_later_death(self, store: Store) -> None:
        known = letter()
        await store.letters.file([known], NOW)
        await store.letters.file([again(known, 1, marks=("body_at_source",))], NOW)
        found = await store.letters.get(known.id)
        assert found
        assert (found.letter.marks, found.letter.message.body) == ((), known.message.body)

    async def test_a_claim_stays_with_the_body_it_stands_for(self, store: Store) -> None:
        claim = Claim("blob", 99, "ab" * 32)
        sent = letter(message=replace(letter().message, body=None), claim=claim)
        await store.letters.file([sent], NOW)
        await store.letters.file([again(sent, 1, claim=None, message=replace(sent.message, body=b"whole"))], NOW)
        found = await store.letters.get(sent.id)
        assert found
        assert (found.letter.claim, found.letter.message.body) == (claim, None)
        assert (await store.letters.page(Filter())).rows[0].size == 99

    async def test_hostile_text_never_fails_a_filing(self, store: Store) -> None:
        bad = "nul \0 and lone \ud800 surrogate"
        sent = letter(
            error_type=bad,
            error_message=bad + " needle",
            detail=bad,
            stack=bad,
            handler=bad,
            message_id=bad,
            message_type=bad,
            group="billing",
            attributes={bad: bad},
            masked=(bad,),
            claim=Claim(bad, 10**30, bad),
            first_attempt_at=10**30,
            last_attempt_at=2**63,
            attempts=-(10**30),
        )
        [filed] = await store.letters.file([sent], NOW)
        assert filed.filing is Filing.NEW
        found = await store.letters.get(sent.id)
        assert found
        assert found.letter.message == sent.message
        assert "surrogate" in found.letter.error_message
        assert await ids(store, Filter(text="needle")) == {sent.id}
        assert await ids(store, Filter(handler=bad, attributes={bad: bad})) == {sent.id}
        assert "surrogate" in (await store.letters.occurrences(sent.id))[0].detail

    # --- states

    @pytest.mark.parametrize(("before", "to"), list(product(State, State)))
    async def test_only_legal_moves_are_made(self, store: Store, before: State, to: State) -> None:
        await put_in(store, letter(), before)
        if to in MOVES[before]:
            assert await store.letters.move([letter().id], before, to, ANN, NOW) == [letter().id]
            assert await state_of(store, letter()) is to
        else:
            with pytest.raises(BadRequest):
                await store.letters.move([letter().id], before, to, ANN, NOW)
            assert await state_of(store, letter()) is before

    async def test_a_move_takes_only_those_in_the_expected_state(self, store: Store) -> None:
        one, two, three = many(3)
        await store.letters.file([one, two, three], NOW)
        await store.letters.move([two.id], State.PENDING, State.DISCARDED, ANN, NOW)
        asked = [three.id, two.id, "nobody", one.id, three.id]
        assert await store.letters.move(asked, State.PENDING, State.RESOLVED, ANN, NOW + 5) == [three.id, one.id]
        found = await store.letters.get(one.id)
        assert found
        assert (found.version, found.updated_at) == (2, NOW + 5)

    async def test_of_two_racing_moves_one_wins(self, store: Store) -> None:
        await store.letters.file(many(20), NOW)
        every = [one.id for one in many(20)]
        won = await asyncio.gather(
            store.letters.move(every, State.PENDING, State.RESOLVED, ANN, NOW),
            store.letters.move(every, State.PENDING, State.DISCARDED, ANN, NOW),
        )
        assert sorted(map(len, won)) == [0, 20]
        assert len(await store.audit()) == 20

    # --- outcomes

    async def test_success_of_the_current_hop_resolves_once(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        job = await replay(store, [letter()])
        assert await store.jobs.outcomes([ok(letter(), 1), ok(letter(), 1)], NOW) == [letter().id]
        assert await store.jobs.outcomes([ok(letter(), 1)], NOW) == []
        found = await store.letters.get(letter().id)
        done = await store.jobs.get(job)
        assert found
        assert done
        assert (found.state, found.confirmed_hop, done.resolved) == (State.RESOLVED, 1, 1)
        assert replace((await store.audit(1))[0], number=0, hash="", at=0).who == OFFICE.who

    async def test_an_outcome_of_an_old_or_unknown_hop_changes_nothing(self, store: Store) -> None:
        await store.letters.file([letter(), again(letter(), 1)], NOW)
        await replay(store, [letter()])
        before = await store.letters.get(letter().id)
        strays = [ok(letter(), 0), ok(letter(), 1), ok(letter(), 9), ok(letter(5), 1)]
        assert await store.jobs.outcomes([*strays, Outcome(letter().id, 2, ok=False, at=NOW)], NOW) == []
        assert await store.letters.get(letter().id) == before

    async def test_late_success_resolves_from_pending(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await replay(store, [letter()])
        await store.letters.move([letter().id], State.REPLAYING, State.PENDING, Act("redrive", "timed out"), NOW)
        assert await store.jobs.outcomes([ok(letter(), 1)], NOW) == [letter().id]

    async def test_a_second_copy_of_a_success_does_not_undo_a_restore(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await replay(store, [letter()])
        await store.jobs.outcomes([ok(letter(), 1)], NOW)
        await store.letters.move([letter().id], State.RESOLVED, State.PENDING, ANN, NOW)
        assert await store.jobs.outcomes([ok(letter(), 1)], NOW) == []
        assert await state_of(store, letter()) is State.PENDING

    async def test_a_death_of_a_confirmed_hop_only_adds_an_occurrence(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        job = await replay(store, [letter()])
        await store.jobs.outcomes([ok(letter(), 1)], NOW)
        [filed] = await store.letters.file([again(letter(), 1, error_type="Late")], NOW + 1)
        found = await store.letters.get(letter().id)
        done = await store.jobs.get(job)
        assert found
        assert done
        assert (filed.filing, filed.state) == (Filing.AGAIN, State.RESOLVED)
        assert (found.occurrences, found.letter.error_type, done.died) == (2, "TimeoutError", 0)

    async def test_a_death_of_the_current_hop_is_counted_once(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        job = await replay(store, [letter()])
        for _ in range(2):
            await store.letters.file([again(letter(), 1)], NOW)
        done = await store.jobs.get(job)
        assert done
        assert (done.died, done.resolved) == (1, 0)
        assert await state_of(store, letter()) is State.PENDING
        assert (await store.audit(1))[0].letter == letter().id

    async def test_quiet_letters_resolve_after_the_window_and_not_before(self, store: Store) -> None:
        await store.letters.file(many(2), NOW)
        job = await replay(store, many(2), NOW)
        await store.letters.file([again(letter(1), 1)], NOW)
        assert await store.jobs.settle_quiet(NOW, NOW + 1) == []
        assert await store.jobs.settle_quiet(NOW + 1, NOW + 2) == [letter(0).id]
        assert await store.jobs.settle_quiet(NOW + 1, NOW + 2) == []
        done = await store.jobs.get(job)
        assert done
        assert (done.resolved, done.died) == (1, 1)
        assert (await store.audit(1))[0].why == "no death reported"

    async def test_a_letter_replayed_again_is_not_settled_by_its_last_time(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await replay(store, [letter()], NOW)
        await store.letters.file([again(letter(), 1)], NOW + 1)
        second = await store.jobs.create([letter().id], ANN, NOW + 2)
        await store.jobs.lease("worker", 60, NOW + 2)
        assert await store.jobs.advance(second.id, "worker", NOW + 2)
        assert await store.jobs.settle_quiet(NOW + 99, NOW + 99) == []

    async def test_a_late_death_reopens_what_silence_resolved(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await replay(store, [letter()])
        await store.jobs.settle_quiet(NOW + 1, NOW + 1)
        [filed] = await store.letters.file([again(letter(), 1)], NOW + 2)
        assert filed.state is State.PENDING

    # --- jobs

    async def test_a_job_freezes_its_selection_in_order(self, store: Store) -> None:
        letters = many(5)
        await store.letters.file(letters, NOW)
        wanted = [letters[n].id for n in (3, 1, 3, 0)]
        job = await store.jobs.create(wanted, ANN, NOW, window=2, rate=1.5)
        assert (job.total, job.window, job.rate, job.act, job.state) == (3, 2, 1.5, ANN, JobState.RUNNING)
        assert await store.jobs.get(job.id) == job
        await store.jobs.lease("worker", 60, NOW)
        first = await store.jobs.advance(job.id, "worker", NOW)
        assert [(one.id, one.hop, one.state, one.job) for one in first] == [
            (letters[3].id, 1, State.REPLAYING, job.id),
            (letters[1].id, 1, State.REPLAYING, job.id),
        ]
        assert first[0].letter.message == letters[3].message
        await store.jobs.close_window(job.id, "worker", [], NOW)
        assert [one.id for one in await store.jobs.advance(job.id, "worker", NOW)] == [letters[0].id]
        done = await store.jobs.close_window(job.id, "worker", [], NOW)
        assert (done.state, done.sent, done.refused, done.window_start) == (JobState.DONE, 3, 0, 3)
        assert await store.jobs.advance(job.id, "worker", NOW) == []

    async def test_after_a_crash_the_next_owner_gets_the_same_window_and_no_more(self, store: Store) -> None:
        await store.letters.file(many(6), NOW)
        job = await store.jobs.create([one.id for one in many(6)], ANN, NOW, window=3)
        await store.jobs.lease("first", 10, NOW)
        published = await store.jobs.advance(job.id, "first", NOW)
        assert await store.jobs.lease("second", 10, NOW + 9_999) is None
        taken = await store.jobs.lease("second", 10, NOW + 10_000)
        assert taken
        assert (taken.id, taken.owner) == (job.id, "second")
        assert await store.jobs.advance(job.id, "second", NOW + 10_000) == published
        for late in (store.jobs.advance(job.id, "first", NOW), store.jobs.close_window(job.id, "first", [], NOW)):
            with pytest.raises(LeaseConflict):
                await late

    async def test_what_was_reported_on_is_not_published_again(self, store: Store) -> None:
        died, handled, open_, moved = many(4)
        await store.letters.file(many(4), NOW)
        job = await store.jobs.create([one.id for one in many(4)], ANN, NOW)
        await store.jobs.lease("first", 1, NOW)
        await store.jobs.advance(job.id, "first", NOW)
        await store.letters.file([again(died, 1)], NOW)
        await store.jobs.outcomes([ok(handled, 1)], NOW)
        await store.letters.move([moved.id], State.REPLAYING, State.PENDING, ANN, NOW)
        await store.letters.move([moved.id], State.PENDING, State.REPLAYING, ANN, NOW)
        await store.jobs.lease("second", 1, NOW + 2000)
        assert [one.id for one in await store.jobs.advance(job.id, "second", NOW + 2000)] == [open_.id]
        closed = await store.jobs.close_window(job.id, "second", [], NOW + 2000)
        assert (closed.state, closed.sent, closed.died, closed.resolved) == (JobState.DONE, 4, 1, 1)

    async def test_a_window_fully_reported_on_is_left_behind(self, store: Store) -> None:
        await store.letters.file(many(2), NOW)
        job = await store.jobs.create([one.id for one in many(2)], ANN, NOW, window=1)
        await store.jobs.lease("worker", 1, NOW)
        await store.jobs.advance(job.id, "worker", NOW)
        await store.jobs.outcomes([ok(letter(0), 1)], NOW)
        assert [one.id for one in await store.jobs.advance(job.id, "worker", NOW)] == [letter(1).id]

    async def test_letters_that_are_not_pending_are_refused_with_a_row_each(self, store: Store) -> None:
        resolved, purged, fine = many(3)
        await store.letters.file(many(3), NOW)
        await store.letters.move([resolved.id], State.PENDING, State.RESOLVED, ANN, NOW)
        await store.letters.purge([purged.id], ANN, NOW)
        job = await store.jobs.create([resolved.id, purged.id, "nobody", fine.id], ANN, NOW, window=1)
        await store.jobs.lease("worker", 60, NOW)
        assert [one.id for one in await store.jobs.advance(job.id, "worker", NOW)] == [fine.id]
        assert await store.jobs.refusals(job.id) == [
            Refusal(resolved.id, "is resolved, not pending"),
            Refusal(purged.id, "was purged"),
            Refusal("nobody", "is unknown"),
        ]
        done = await store.jobs.close_window(job.id, "worker", [], NOW)
        assert (done.state, done.sent, done.refused) == (JobState.DONE, 1, 3)

    async def test_a_job_with_nothing_to_send_ends(self, store: Store) -> None:
        job = await store.jobs.create(["nobody", "none"], ANN, NOW, window=1)
        await store.jobs.lease("worker", 60, NOW)
        assert await store.jobs.advance(job.id, "worker", NOW) == []
        ended = await store.jobs.get(job.id)
        assert ended
        assert (ended.state, ended.refused) == (JobState.DONE, 2)
        assert (await store.jobs.create([], ANN, NOW)).state is JobState.DONE
        assert await store.jobs.lease("worker", 60, NOW) is None

    async def test_what_the_broker_refused_goes_back_to_pending(self, store: Store) -> None:
        good, bad = many(2)
        await store.letters.file([good, bad], NOW)
        job = await store.jobs.create([good.id, bad.id], ANN, NOW)
        await store.jobs.lease("worker", 60, NOW)
        await store.jobs.advance(job.id, "worker", NOW)
        refusals = [Refusal(bad.id, "too large"), Refusal("nobody", "not in this window")]
        closed = await store.jobs.close_window(job.id, "worker", refusals, NOW)
        assert (closed.sent, closed.refused, closed.state) == (1, 1, JobState.DONE)
        assert await store.jobs.close_window(job.id, "worker", refusals, NOW) == closed
        assert await store.jobs.refusals(job.id) == [Refusal(bad.id, "too large")]
        found = await store.letters.get(bad.id)
        assert found
        assert (found.state, found.hop) == (State.PENDING, 1)
        assert await state_of(store, good) is State.REPLAYING

    async def test_two_jobs_never_send_one_letter_at_once(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        jobs = [await store.jobs.create([letter().id], ANN, NOW) for _ in range(2)]
        owners = [await store.jobs.lease(owner, 60, NOW) for owner in ("one", "two")]
        assert [one.id for one in owners if one] == [job.id for job in jobs]
        first = await store.jobs.advance(jobs[0].id, "one", NOW)
        second = await store.jobs.advance(jobs[1].id, "two", NOW)
        assert (len(first), second) == (1, [])
        assert await store.jobs.refusals(jobs[1].id) == [Refusal(letter().id, "is replaying, not pending")]

    async def test_an_owner_keeps_its_job_before_it_takes_an_older_one(self, store: Store) -> None:
        older, newer = [await store.jobs.create(["x"], ANN, NOW + n) for n in range(2)]
        assert [job and job.id for job in (await store.jobs.lease("a", 1, NOW), await store.jobs.lease("b", 9, NOW))]
        kept = await store.jobs.lease("b", 9, NOW + 5000)
        taken = await store.jobs.lease("c", 9, NOW + 5000)
        assert kept
        assert taken
        assert (kept.id, kept.lease_until, taken.id) == (newer.id, NOW + 14_000, older.id)

    async def test_a_paused_job_hands_out_nothing_and_resumes_where_it_was(self, store: Store) -> None:
        await store.letters.file(many(2), NOW)
        job = await store.jobs.create([one.id for one in many(2)], ANN, NOW, window=1)
        await store.jobs.lease("worker", 60, NOW)
        await store.jobs.advance(job.id, "worker", NOW)
        assert await store.jobs.set_state(job.id, JobState.RUNNING, JobState.PAUSED, ANN, NOW)
        assert not await store.jobs.set_state(job.id, JobState.RUNNING, JobState.PAUSED, ANN, NOW)
        assert await store.jobs.advance(job.id, "worker", NOW) == []
        paused = await store.jobs.close_window(job.id, "worker", [], NOW)
        assert (paused.state, paused.sent) == (JobState.PAUSED, 1)
        assert await store.jobs.lease("worker", 60, NOW) is None
        await store.jobs.set_state(job.id, JobState.PAUSED, JobState.RUNNING, ANN, NOW)
        assert [one.id for one in await store.jobs.advance(job.id, "worker", NOW)] == [letter(1).id]

    async def test_a_job_paused_in_its_last_window_is_done_when_that_closes(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        job = await store.jobs.create([letter().id], ANN, NOW)
        await store.jobs.lease("worker", 60, NOW)
        await store.jobs.advance(job.id, "worker", NOW)
        await store.jobs.set_state(job.id, JobState.RUNNING, JobState.PAUSED, ANN, NOW)
        ended = await store.jobs.close_window(job.id, "worker", [], NOW)
        assert (ended.state, ended.sent) == (JobState.DONE, 1)

    async def test_a_cancelled_job_gives_back_what_its_dead_owner_left_open(self, store: Store) -> None:
        await store.letters.file(many(2), NOW)
        job = await store.jobs.create([one.id for one in many(2)], ANN, NOW, window=1)
        await store.jobs.lease("worker", 1, NOW)
        await store.jobs.advance(job.id, "worker", NOW)
        await store.jobs.set_state(job.id, JobState.RUNNING, JobState.CANCELLED, ANN, NOW)
        assert await store.jobs.lease("other", 1, NOW) is None
        assert await state_of(store, letter(0)) is State.REPLAYING
        assert await store.jobs.lease("other", 1, NOW + 5000) is None
        assert [await state_of(store, one) for one in many(2)] == [State.PENDING, State.PENDING]
        assert await store.jobs.outcomes([ok(letter(0), 1)], NOW) == [letter(0).id]

    async def test_an_ended_job_stays_ended(self, store: Store) -> None:
        for ended, to in product((JobState.DONE, JobState.CANCELLED), JobState):
            with pytest.raises(BadRequest):
                await store.jobs.set_state("any", ended, to, ANN, NOW)
        with pytest.raises(BadRequest):
            await store.jobs.create(["x"], ANN, NOW, window=0)

    async def test_an_unverified_letter_is_replayed_when_a_person_asks(self, store: Store) -> None:
        await store.letters.file([letter(verified=False)], NOW)
        job = await store.jobs.create([letter().id], ANN, NOW)
        await store.jobs.lease("worker", 60, NOW)
        assert len(await store.jobs.advance(job.id, "worker", NOW)) == 1

    async def test_recent_jobs_come_newest_first(self, store: Store) -> None:
        made = [(await store.jobs.create(["x"], ANN, NOW + n)).id for n in range(3)]
        assert [job.id for job in await store.jobs.recent(2)] == made[:0:-1]
        assert made == sorted(made)

    async def test_nobody_drives_a_job_without_a_lease(self, store: Store) -> None:
        job = await store.jobs.create(["x"], ANN, NOW)
        for job_id, owner in ((job.id, ""), (job.id, "worker"), ("nobody", "worker")):
            with pytest.raises(LeaseConflict):
                await store.jobs.advance(job_id, owner, NOW)

    # --- lists

    async def test_pages_walk_every_letter_once_newest_first(self, store: Store) -> None:
        for n in range(0, 60, 3):
            await store.letters.file([letter(n), letter(n + 1), letter(n + 2)], NOW + n)
        seen: list[Summary] = []
        async for row in walk(store, Filter(), 7):
            seen.append(row)
        assert {row.id for row in seen} == {one.id for one in many(60)}
        assert len(seen) == 60
        assert all(a.filed_at >= b.filed_at for a, b in pairwise(seen))

    async def test_a_list_stays_right_while_letters_are_filed_and_purged(self, store: Store) -> None:
        await store.letters.file(many(20), NOW)
        first = await store.letters.page(Filter(), 10)
        await store.letters.file([letter(n) for n in range(100, 110)], NOW + 1)
        await store.letters.purge([row.id for row in first.rows[5:]], ANN, NOW)
        rest = await store.letters.page(Filter(), 500, first.next)
        assert {row.id for row in (*first.rows, *rest.rows)} == {one.id for one in many(20)}
        assert len(rest.rows) == 10
        assert rest.next is None

    async def test_a_summary_tells_what_a_list_shows(self, store: Store) -> None:
        sent = letter(attributes={"order": "7", "iban": "DE1"}, masked=("iban",), verified=False)
        await store.letters.file([sent, again(sent, 1)], NOW)
        [row] = (await store.letters.page(Filter())).rows
        assert row == Summary(
            id=sent.id,
            state=State.PENDING,
            source="orders",
            group="billing",
            kind=Kind.TRANSIENT,
            reason=Reason.MAX_RETRIES_EXCEEDED,
            error_type="TimeoutError",
            error_message="the upstream did not answer",
            handler="charge",
            message_type="OrderPlaced",
            attempts=4,
            occurrences=2,
            hop=1,
            size=len(sent.message.body or b""),
            verified=False,
            first_attempt_at=sent.first_attempt_at,
            last_attempt_at=sent.last_attempt_at,
            filed_at=NOW,
            updated_at=NOW,
            attributes={"order": "7", "iban": "DE1"},
            masked=("iban",),
        )

    @pytest.mark.parametrize("cursor", ["", "nonsense", "\udc80", "MTIz.x", "ü", "AAAA" * 99])
    async def test_a_foreign_cursor_is_refused_by_name(self, store: Store, cursor: str) -> None:
        with pytest.raises(BadRequest):
            await store.letters.page(Filter(), 10, cursor)

    async def test_the_limit_is_kept_within_bounds(self, store: Store) -> None:
        await store.letters.file(many(MAX_PAGE + 1), NOW)
        assert len((await store.letters.page(Filter(), 10**9)).rows) == MAX_PAGE
        assert len((await store.letters.page(Filter(), -5)).rows) == 1

    @pytest.mark.parametrize(
        ("wanted", "found"),
        [
            (Filter(), {0, 1, 2}),
            (Filter(states=(State.PENDING,)), {0, 2}),
            (Filter(states=(State.DISCARDED, State.PENDING)), {0, 1, 2}),
            (Filter(source="orders"), {0}),
            (Filter(source="orders*"), {0, 1}),
            (Filter(source="*[eu]?"), {1}),
            (Filter(source="order?"), set()),
            (Filter(source="*"), {0, 1, 2}),
            (Filter(group="shipping"), {2}),
            (Filter(kind=Kind.CRASH), {1}),
            (Filter(error_type="TimeoutError"), {0, 2}),
            (Filter(handler="ship"), {2}),
            (Filter(message_type="OrderPlaced", handler="charge"), {0, 1}),
            (Filter(attributes={"country": "de"}), {0, 1}),
            (Filter(attributes={"country": "de", "order": "1"}), {1}),
            (Filter(attributes={"country": "' OR 1=1 --"}), set()),
            (Filter(since=NOW + 1), {1, 2}),
            (Filter(since=NOW + 1, until=NOW + 2), {1}),
            (Filter(until=10**40, since=-(10**40)), {0, 1, 2}),
            (Filter(text="timeout"), {0, 2}),
            (Filter(text="TIMEOUTERROR"), {0, 2}),
            (Filter(text="refused"), {1}),
            (Filter(text="ConnectionRefused"), {1}),
            (Filter(text="refused straße"), {1}),
            (Filter(text="refused upstream"), set()),
            (Filter(text="msg-2"), {2}),
            (Filter(text="orderplaced"), {0, 1, 2}),
            (Filter(text="de"), {0, 1}),
            (Filter(text='" OR * ^ NEAR( -'), set()),
            (Filter(text="%"), set()),
            (Filter(text="\0\udc80"), set()),
            (Filter(text="  "), {0, 1, 2}),
            (Filter(text="timeout", attributes={"country": "de"}, states=(State.PENDING,), source="or*"), {0}),
        ],
    )
    async def test_filters(self, store: Store, wanted: Filter, found: set[int]) -> None:
        base = letter().message
        letters = [
            letter(0, attributes={"country": "de", "order": "0"}),
            letter(
                message=replace(base, source="orders.[eu]?"),
                attributes={"country": "de", "order": "1"},
                kind=Kind.CRASH,
                error_type="net.ConnectionRefusedError",
                error_message="Straße 7: no route",
            ),
            letter(message=replace(base, source="parcels"), group="shipping", handler="ship", message_id="msg-2"),
        ]
        for n, one in enumerate(letters):
            await store.letters.file([one], NOW + n)
        await store.letters.move([letters[1].id], State.PENDING, State.DISCARDED, ANN, NOW)
        assert await ids(store, wanted) == {letters[n].id for n in found}
        count = await store.letters.count(wanted)
        assert (count.count, count.exact) == (len(found), True)

    async def test_hostile_filters_are_refused_or_answered(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        with pytest.raises(BadRequest):
            await store.letters.page(Filter(source="a*" * 50))
        assert await ids(store, Filter(text="timeout " * 5000)) == {letter().id}
        assert await ids(store, Filter(text="x" * 100_000)) == set()
        assert await ids(store, Filter(group="\udc80\0", handler="'; --")) == set()

    async def test_pages_of_a_filtered_list_meet_without_gap_or_overlap(self, store: Store) -> None:
        for n in range(40):
            await store.letters.file([letter(n, attributes={"even": str(n % 2 == 0)})], NOW + n // 4)
        for wanted in (Filter(attributes={"even": "True"}), Filter(text="true"), Filter(attributes={"even": "False"})):
            found = [row.id async for row in walk(store, wanted, 3)]
            assert len(found) == len(set(found)) == 20

    async def test_masked_values_are_found_by_equality_only(self, store: Store) -> None:
        await store.letters.file([letter(attributes={"iban": "DE9999", "order": "o77"}, masked=("iban",))], NOW)
        assert await ids(store, Filter(text="DE9999")) == set()
        assert await ids(store, Filter(text="o77")) == {letter().id}
        assert await ids(store, Filter(attributes={"iban": "DE9999"})) == {letter().id}

    async def test_a_count_is_exact_up_to_its_limit(self, store: Store) -> None:
        for start in range(0, 10_002, 1667):
            await store.letters.file([letter(n) for n in range(start, min(start + 1667, 10_000))], NOW)
        assert await store.letters.count(Filter(states=(State.PENDING,))) == await store.letters.count(Filter())
        assert (await store.letters.count(Filter())).exact
        await store.letters.file([letter(10_000)], NOW)
        count = await store.letters.count(Filter())
        assert (count.count, count.exact) == (10_000, False)

    # --- statistics and reports

    async def test_statistics_count_everything_once(self, store: Store) -> None:
        empty = await store.statistics()
        assert (empty.total, empty.by_state, empty.oldest) == (0, {}, None)
        await store.letters.file([letter(0), letter(1, kind=Kind.CRASH)], NOW)
        await store.letters.file([letter(2, error_type="ValueError")], NOW + 5)
        await store.letters.move([letter(2).id], State.PENDING, State.DISCARDED, ANN, NOW)
        found = await store.statistics()
        assert (found.total, found.by_source, found.oldest, found.newest) == (3, {"orders": 3}, NOW, NOW + 5)
        assert found.by_state == {"pending": 2, "discarded": 1}
        assert found.by_error_type == {"TimeoutError": 2, "ValueError": 1}
        assert found.by_kind == {"transient": 2, "crash": 1}

    async def test_a_report_counts_once(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await replay(store, [letter()])
        tally = Tally("orders", "billing", "charge", NOW // MINUTE * MINUTE, handled=3, failed=1)
        told = Recorded(letter().id, "orders", "billing", "charge", "m", NOW, "declined \0\udc80")
        one = Report("worker-1", 1, "host", NOW, (ok(letter(), 1),), (tally,), (told,))
        assert await store.report([one, one], NOW) == [letter().id]
        assert await store.report([one, replace(one, serial=2, outcomes=(), recorded=())], NOW) == []
        assert (await store.statistics()).by_handler == {"charge": HandlerRate(6, 2)}
        [kept] = await store.letters.history(letter().id)
        assert replace(kept, note="") == replace(told, note="")
        assert kept.note.startswith("declined")

    # --- audit

    async def test_every_deed_has_its_row(self, store: Store) -> None:
        await store.letters.file([letter()], NOW)
        await store.letters.move([letter().id], State.PENDING, State.DISCARDED, Act("bob", "spam\0\udc80"), NOW + 1)
        await store.letters.move([letter().id], State.DISCARDED, State.PENDING, ANN, NOW + 2)
        await store.letters.purge([letter().id], ANN, NOW + 3)
        job = await store.jobs.create(["x"], ANN, NOW + 4)
        await store.jobs.set_state(job.id, JobState.RUNNING, JobState.CANCELLED, ANN, NOW + 5)
        trail = (await store.audit())[::-1]
        assert [entry.number for entry in trail] == [1, 2, 3, 4, 5]
        assert [entry.at for entry in trail] == [NOW + n for n in range(1, 6)]
        assert [entry.letter for entry in trail] == [letter().id] * 3 + ["", ""]
        assert (trail[0].who, trail[1].why) == ("bob", ANN.why)
        assert "restore" in trail[1].what
        assert "purge" in trail[2].what
        assert job.id in trail[4].what
        assert await store.verify_audit() is None  # type: ignore[attr-defined]

    async def test_a_move_that_took_nobody_leaves_no_row(self, store: Store) -> None:
        await store.letters.move(["nobody"], State.PENDING, State.DISCARDED, ANN, NOW)
        assert await store.audit() == []

    # --- the store itself

    async def test_a_closed_store_says_so(self, make_store: MakeStore) -> None:
        store = make_store()
        with pytest.raises(StoreUnavailable):
            await store.letters.get("x")
        await store.open()
        await store.open()
        await store.close()
        await store.close()
        with pytest.raises(StoreUnavailable):
            await store.letters.file([letter()], NOW)

    async def test_many_callers_at_once_lose_nothing(self, store: Store) -> None:
        batches = [[letter(n) for n in range(start, start + 40)] for start in range(0, 400, 20)]
        filed = await asyncio.gather(*(store.letters.file(batch, NOW) for batch in batches))
        new = [one.id for batch in filed for one in batch if one.filing is Filing.NEW]
        assert len(new) == len(set(new)) == 420
        assert (await store.letters.count(Filter())).count == 420

    def test_a_letters_life_follows_the_model(self, make_store: MakeStore) -> None:
        bounds = settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(lambda: LetterLife(make_store), settings=bounds)  # type: ignore[no-untyped-call]


async def walk(store: Store, wanted: Filter, limit: int) -> Any:
    cursor = None
    while True:
        page = await store.letters.page(wanted, limit, cursor)
        for row in page.rows:
            yield row
        cursor = page.next
        if cursor is None:
            return


class Life:
    """What one letter should look like, in as few words as possible."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.purged = False
        self.hop, self.confirmed, self.deaths = 0, -1, set[int]()

    def file(self, hop: int) -> Filing:
        if self.purged or hop in self.deaths:
            return Filing.DUPLICATE
        new = self.state is None
        if new or (hop >= self.hop and hop > self.confirmed):
            self.state = State.QUARANTINED if hop > 0 and hop >= 3 else State.PENDING
            self.hop = hop
        self.deaths.add(hop)
        return Filing.NEW if new else Filing.AGAIN

    def succeed(self, hop: int) -> bool:
        if self.state is None or hop != self.hop or not 0 < hop > self.confirmed:
            return False
        self.confirmed = hop
        if self.state not in (State.PENDING, State.REPLAYING):
            return False
        self.state = State.RESOLVED
        return True

    def replay(self) -> bool:
        if self.state is not State.PENDING:
            return False
        self.state, self.hop = State.REPLAYING, self.hop + 1
        return True

    def move(self, expected: State, to: State) -> bool:
        if self.state is not expected:
            return False
        self.state = to
        return True

    def purge(self) -> bool:
        if self.state in (None, State.REPLAYING):
            return False
        self.state, self.purged = None, True
        return True


LETTERS = st.integers(0, 2)
HOPS = st.integers(0, 4)
BY_HAND = st.sampled_from([(before, to) for before in State for to in sorted(MOVES[before])])


class LetterLife(RuleBasedStateMachine):
    """Three letters live at random, in the store and in the model; they must agree after every step."""

    def __init__(self, make_store: MakeStore) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = make_store()
        self.lives = [Life() for _ in range(3)]
        self.now = NOW
        self.await_(self.store.open())

    def await_(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    @initialize()
    def begin(self) -> None:
        self.file_one(0, 0)

    @rule(n=LETTERS, hop=HOPS)
    def file_one(self, n: int, hop: int) -> None:
        [filed] = self.await_(self.store.letters.file([letter(n, hop=hop)], self.tick()))
        assert filed.filing is self.lives[n].file(hop)

    @rule(deaths=st.lists(st.tuples(LETTERS, HOPS), max_size=6))
    def file_batch(self, deaths: list[tuple[int, int]]) -> None:
        filed = self.await_(self.store.letters.file([letter(n, hop=hop) for n, hop in deaths], self.tick()))
        assert [one.filing for one in filed] == [self.lives[n].file(hop) for n, hop in deaths]

    @rule(n=LETTERS, hop=HOPS)
    def succeed(self, n: int, hop: int) -> None:
        resolved = self.await_(self.store.jobs.outcomes([ok(letter(n), hop)], self.tick()))
        assert bool(resolved) is self.lives[n].succeed(hop)

    @rule(chosen=st.lists(LETTERS, min_size=1, max_size=3), window=st.integers(1, 3))
    def replay(self, chosen: list[int], window: int) -> None:
        job = self.await_(replay(self.store, [letter(n) for n in chosen], self.tick(), window=window))
        sent = [self.lives[n].replay() for n in dict.fromkeys(chosen)]
        done = self.await_(self.store.jobs.get(job))
        assert (done.state, done.sent, done.refused) == (JobState.DONE, sum(sent), len(sent) - sum(sent))

    @rule(n=LETTERS, move=BY_HAND)
    def move(self, n: int, move: tuple[State, State]) -> None:
        moved = self.await_(self.store.letters.move([letter(n).id], *move, ANN, self.tick()))
        assert bool(moved) is self.lives[n].move(*move)

    @rule(n=LETTERS)
    def purge(self, n: int) -> None:
        assert bool(self.await_(self.store.letters.purge([letter(n).id], ANN, self.tick()))) is self.lives[n].purge()

    @invariant()
    def they_agree(self) -> None:
        for n, life in enumerate(self.lives):
            found = self.await_(self.store.letters.get(letter(n).id))
            assert (found.state if found else None) is life.state
            if found:
                assert (found.hop, found.confirmed_hop, found.occurrences) == (
                    life.hop,
                    life.confirmed,
                    len(life.deaths),
                )

    def tick(self) -> int:
        self.now += 1
        return self.now

    def teardown(self) -> None:
        assert self.await_(self.store.verify_audit()) is None  # type: ignore[attr-defined]
        self.await_(self.store.close())
        self.runner.close()
