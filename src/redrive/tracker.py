"""How far one lane of a log may be committed. Pure: offsets handed out and settled go in, a watermark comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import lt

DEFAULT_LIMIT = 10_000


class Tracker:
    """Commits nothing past an offset that is not settled yet.

    It knows the offsets that were handed out and never counts in between, so the gaps that transaction markers and
    compaction leave do not stall it. Each offset is touched a constant number of times, in whatever order it is
    settled.
    """

    __slots__ = ("_next", "_open", "_order", "generation", "limit")

    def __init__(self, start: int = 0, *, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.generation = 0
        """Counts ownerships of the lane. What was handed out under an older one can no longer be settled."""
        self._begin(start)

    def _begin(self, start: int) -> None:
        self._next = start  # above everything handed out so far
        self._open: set[int] = set()
        self._order: deque[int] = deque()  # handed out at or above the watermark, ascending; the first is open

    @property
    def watermark(self) -> int:
        """The offset to commit: every one below it that was handed out is settled."""
        return self._order[0] if self._order else self._next

    @property
    def unsettled(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether `limit` offsets wait above the watermark, settled or not.

        Counting the settled ones bounds the memory, and what a crash redelivers, while one message hangs.
        """
        return len(self._order) >= self.limit

    def deliver(self, offset: int) -> None:
        """This offset is handed out. One at or below an earlier one is known already and changes nothing."""
        if offset >= self._next:
            self._next = offset + 1
            self._open.add(offset)
            self._order.append(offset)

    def deliver_many(self, offsets: Sequence[int]) -> None:
        """A batch, ascending as brokers hand them out; any other order is taken one by one."""
        if offsets and offsets[0] >= self._next and all(map(lt, offsets, islice(offsets, 1, None))):
            self._next = offsets[-1] + 1
            self._open.update(offsets)
            self._order.extend(offsets)
        else:
            for offset in offsets:
                self.deliver(offset)

    def is_open(self, offset: int, generation: int) -> bool:
        """Whether it was handed out under this ownership and is not settled yet."""
        return generation == self.generation and offset in self._open

    def are_open(self, offsets: Sequence[int], generation: int) -> bool:
        """Whether all of these are, and none is named twice."""
        unique = set(offsets)
        return generation == self.generation and len(unique) == len(offsets) and self._open >= unique

    def settle(self, offset: int, generation: int) -> bool:
        """True when it was handed out under this ownership and not settled before."""
        if generation != self.generation or offset not in self._open:
            return False
        self._open.remove(offset)
        self._advance()
        return True

    def settle_many(self, offsets: Sequence[int], generation: int) -> int:
        """How many of these it settled."""
        if generation != self.generation:
            return 0
        before = len(self._open)
        self._open.difference_update(offsets)
        self._advance()
        return before - len(self._open)

    def revoke(self, start: int = 0) -> None:
        """The lane has gone, or was taken back at `start`: forget what was handed out and ignore its settling."""
        self.generation += 1
        self._begin(start)

    def _advance(self) -> None:
        order, unsettled = self._order, self._open
        while order and order[0] not in unsettled:
            order.popleft()
