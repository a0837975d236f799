"""The tracker never commits past an unsettled offset, never stalls on a gap, and never grows without bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from redrive.tracker import Tracker


def test_nothing_handed_out_commits_where_it_started():
    assert Tracker(17).watermark == 17


def test_a_later_success_does_not_commit_past_an_earlier_unsettled_one():
    tracker = Tracker()
    tracker.deliver_many([0, 1, 2])
    assert tracker.settle_many([1, 2], 0) == 2
    assert tracker.watermark == 0
    assert tracker.settle(0, 0)
    assert tracker.watermark == 3


def test_gaps_of_transaction_markers_and_compaction_do_not_stall_it():
    tracker = Tracker(5)
    tracker.deliver_many([9, 12, 40])
    assert tracker.watermark == 9
    tracker.settle(9, 0)
    assert tracker.watermark == 12
    tracker.settle_many([40, 12], 0)
    assert tracker.watermark == 41


def test_settling_twice_or_what_was_never_handed_out_changes_nothing():
    tracker = Tracker()
    tracker.deliver(3)
    assert not tracker.settle(2, 0)
    assert tracker.settle(3, 0)
    assert not tracker.settle(3, 0)
    assert (tracker.watermark, tracker.unsettled) == (4, 0)


def test_one_message_that_hangs_fills_it_however_many_settle_behind_it():
    tracker = Tracker(limit=3)
    tracker.deliver_many([0, 1])
    assert not tracker.full
    tracker.deliver(2)
    tracker.settle_many([1, 2], 0)
    assert (tracker.full, tracker.unsettled) == (True, 1)
    tracker.settle(0, 0)
    assert not tracker.full


def test_what_was_handed_out_before_a_revoke_cannot_be_settled_after_it():
    tracker = Tracker()
    tracker.deliver_many([0, 1])
    tracker.revoke(start=0)
    tracker.deliver_many([0, 1])
    assert not tracker.settle(0, 0)
    assert tracker.settle_many([0, 1], 0) == 0
    assert tracker.watermark == 0
    assert tracker.settle_many([0, 1], 1) == 2
    assert tracker.watermark == 2


@given(st.lists(st.integers(0, 50)))
def test_a_batch_is_worth_its_offsets_one_by_one(offsets: list[int]):
    whole, single = Tracker(), Tracker()
    whole.deliver_many(offsets)
    for offset in offsets:
        single.deliver(offset)
    assert (whole.watermark, whole.unsettled, whole.full) == (single.watermark, single.unsettled, single.full)


class NaiveModel(RuleBasedStateMachine):
    """The tracker beside a list of everything handed out, which is searched from the start each time."""

    @initialize(start=st.integers(0, 5))
    def begin(self, start: int) -> None:
        self.tracker, self.start, self.generation = Tracker(start, limit=8), start, 0
        self.delivered: dict[int, bool] = {}

    @rule(gaps=st.lists(st.integers(1, 4), max_size=6))
    def deliver(self, gaps: list[int]) -> None:
        offsets, at = [], max(self.delivered, default=self.start - 1)
        for gap in gaps:
            at += gap
            offsets.append(at)
        self.tracker.deliver_many(offsets)
        self.delivered |= dict.fromkeys(offsets, False)

    @rule(offset=st.integers(0, 60))
    def deliver_any(self, offset: int) -> None:
        if offset > max(self.delivered, default=self.start - 1):
            self.delivered[offset] = False
        self.tracker.deliver(offset)

    @rule(offset=st.integers(0, 60), late=st.booleans())
    def settle_any(self, offset: int, late: bool) -> None:
        settled = self.tracker.settle(offset, self.generation - late)
        assert settled is (not late and self.delivered.get(offset) is False)
        if settled:
            self.delivered[offset] = True

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.delivered)), unique=True))
        fresh = [offset for offset in chosen if not self.delivered[offset]]
        assert self.tracker.settle_many(chosen, self.generation) == len(fresh)
        self.delivered |= dict.fromkeys(fresh, True)

    @rule()
    def revoke(self) -> None:
        self.start = self.tracker.watermark
        self.tracker.revoke(self.start)
        self.generation += 1
        self.delivered = {}

    @invariant()
    def the_watermark_is_the_first_unsettled_offset(self) -> None:
        unsettled = [offset for offset, settled in self.delivered.items() if not settled]
        watermark = min(unsettled, default=max(self.delivered, default=self.start - 1) + 1)
        assert self.tracker.watermark == watermark
        assert self.tracker.unsettled == len(unsettled)
        assert self.tracker.full is (sum(offset >= watermark for offset in self.delivered) >= 8)


TestAgainstANaiveModel = NaiveModel.TestCase


def test_it_knows_what_is_open_one_by_one_and_together():
    tracker = Tracker()
    tracker.deliver_many([3, 5, 9])
    assert tracker.is_open(5, 0)
    assert tracker.are_open([9, 3], 0)
    assert not tracker.are_open([3, 3], 0)
    assert not tracker.are_open([3, 4], 0)
    tracker.settle(3, 0)
    assert not tracker.is_open(3, 0)
    assert not tracker.are_open([3, 5], 0)
    tracker.revoke()
    assert not tracker.is_open(5, 0)
    assert not tracker.are_open([5], 0)
