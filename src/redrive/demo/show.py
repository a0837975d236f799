"""The demo with a person in front of it: it goes on until Ctrl-C, and says where to look and what happens."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redrive.app import Redrive
from redrive.config import load
from redrive.demo.children import Child, ChildDied, Children
from redrive.demo.front import Front, free_port
from redrive.demo.ledger import HANDLED
from redrive.demo.place import Place
from redrive.demo.stage import Stage, on_signals
from redrive.errors import ConfigError, RedriveError
from redrive.letter import State
from redrive.query import Filter

HOME = Path("redrive-data/demo")
A_SECOND = 6
TELL_EVERY, STATUS_EVERY = 3, 6
OUTAGE_EVERY, OUTAGE_FROM, OUTAGE_UNTIL = 90, 20, 50


class Show:
    """Keeps the small world turning, second by second, and tells what has changed in it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._known: set[str] = set()
        self._handled: set[str] = set()
        self._resolved = 0
        self._mended = False

    async def second(self, number: int) -> None:
        """One second of the demo."""
        self._replace_killed()
        self._stage.children.check()
        self._weather(number)
        await self._stage.produce(A_SECOND)
        self._stage.pass_on_notices()
        if number % TELL_EVERY == 0:
            await self._tell_deaths()
            await self._tell_resolved()
        if number % STATUS_EVERY == 0:
            await self._status()

    def _replace_killed(self) -> None:
        for child in self._stage.children.bury():
            if child.name == "office":
                raise ChildDied(child.name, child.process.returncode, child.tail)
            self._stage.say(f"{child.name} was killed; {self._stage.children.start_worker().name} takes over")

    def _weather(self, number: int) -> None:
        """The provider has an outage now and then, and a person may deploy release 2."""
        place, moment = self._stage.place, number % OUTAGE_EVERY
        if moment == OUTAGE_FROM:
            place.outage.touch()
            self._stage.say("the payment provider goes down")
        if moment == OUTAGE_UNTIL and place.provider_is_down:
            place.outage.unlink()
            self._stage.say("the payment provider is back")
        if place.is_mended is not self._mended:
            self._mended = place.is_mended
            self._stage.say("release 2 is deployed" if self._mended else "release 2 is rolled back")

    async def _tell_deaths(self) -> None:
        """Who filed what since the last look."""
        stage = self._stage
        new = []
        async for row in stage.summaries(Filter()):
            if row.id in self._known:
                break
            new.append(row.id)
        self._known.update(new)
        found = [stored for stored in [await stage.letter(one) for one in new] if stored is not None]
        deaths = Counter((s.letter.environment.process, s.letter.kind, s.letter.error_type) for s in found)
        for (pid, kind, error), count in deaths.items():
            stage.say(f"{stage.children.name_of(pid)} dead-lettered {count}: {kind} ({error.rpartition('.')[2]})")

    async def _tell_resolved(self) -> None:
        resolved = (await self._stage.app.desk().count(Filter(states=(State.RESOLVED,)))).count
        if resolved > self._resolved:
            self._stage.say(f"{resolved - self._resolved} resolved: sent back, and handled this time")
        self._resolved = resolved

    async def _status(self) -> None:
        stage = self._stage
        self._handled |= {entry.order for entry in stage.ledger.refresh() if entry.outcome == HANDLED}
        by_state = (await stage.app.desk().statistics()).by_state
        states = ", ".join(f"{count} {state}" for state, count in sorted(by_state.items())) or "none"
        stage.say(f"{len(stage.produced)} produced, {len(self._handled)} handled · letters: {states}")


async def show(port: int | None) -> int:
    """Play until somebody stops it; 0 unless something broke."""
    place = _place()
    with _alone(place.home):
        _wipe(place)
        front = Front(port or free_port())
        place.furnish(front.port)
        async with Redrive(settings=load(place.config, env={})) as app:
            with Children(place) as children:
                return await _play(Stage(app, place, children, _say), front)


async def _play(stage: Stage, front: Front) -> int:
    playing = asyncio.create_task(_until_stopped(stage, front))
    with on_signals(playing.cancel):
        await asyncio.wait({playing})
        if playing.cancelled():
            print("\nstopping …", flush=True)
        unclean = stage.children.stop()
    for child in unclean:
        print(f"{child.name} did not stop cleanly; the end of its log:\n{child.tail}")
    error = None if playing.cancelled() else playing.exception()
    if isinstance(error, RedriveError):
        print(f"✗ {error}")
    elif error is not None:
        raise error
    else:
        print(f"✓ everything is stopped; the data is still in {stage.place.home}")
    return 1 if error or unclean else 0


async def _until_stopped(stage: Stage, front: Front) -> None:
    children = stage.children
    print("starting the office and two workers …", flush=True)
    children.start_office(front.port)
    workers = [children.start_worker(), children.start_worker()]
    await stage.until("the office to open", front.is_open)
    print(_where_to_look(stage.place, front, workers), flush=True)
    show, started = Show(stage), time.monotonic()
    for number in itertools.count(1):
        await show.second(number)
        await asyncio.sleep(max(started + number - time.monotonic(), 0.0))


def _where_to_look(place: Place, front: Front, workers: list[Child]) -> str:
    redrive, url = _command(), front.url
    first, second = (worker.pid for worker in workers)
    return f"""
  An order service is at work in two processes, {first} and {second}, and not everything goes well.
  The payment provider is down for {OUTAGE_UNTIL - OUTAGE_FROM} s of every {OUTAGE_EVERY}. Ctrl-C stops everything.

  look        export REDRIVE_CONFIG={_short(place.config)}
              {redrive} letters --state pending
              {redrive} letters show ID
              {redrive} stats
  or          curl -s {url}/letters
              curl -s {url}/statistics

  mend        touch {_short(place.release_2)}   # deploys release 2, which knows refunds and is quick
  send back   {redrive} letters replay ID
  or          curl -s -X POST {url}/letters/ID/replay

  break       kill -9 {second}   # another worker takes its messages over
  logs        ls {_short(place.logs)}
"""


def _command() -> str:
    """How to call redrive from this shell."""
    beside = Path(sys.executable).with_name("redrive")
    if shutil.which("redrive") == str(beside) or not beside.exists():
        return "redrive"
    return str(_short(beside))


def _short(path: Path) -> Path:
    """Relative where it can be, to be typed with less."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _place() -> Place:
    return Place(HOME.absolute())


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Two demos in one folder would wipe each other's files."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "another demo runs here", where=str(home), fix="stop it, or use another folder"
            ) from error
        yield


def _wipe(place: Place) -> None:
    """Start afresh, but delete nothing that a demo did not make."""
    if not place.home.exists():
        return
    if not place.is_ours:
        raise ConfigError("this folder is not a demo's", where=str(place.home), fix="move it, or use another folder")
    print(f"wiping {place.home}, left by an earlier demo")
    shutil.rmtree(place.home)
