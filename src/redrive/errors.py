"""Every error redrive raises by name, and the verdicts a handler may raise.

Errors carry facts as attributes; the text is for people only.
"""

from __future__ import annotations


class RedriveError(Exception):
    """Base of everything redrive raises on purpose."""


class ConfigError(RedriveError):
    """A setting cannot work. Names the key, where it was read, and what to do about it."""

    def __init__(self, problem: str, *, key: str = "", where: str = "", fix: str = "") -> None:
        self.problem, self.key, self.where, self.fix = problem, key, where, fix
        place = f"{where}: " if where else ""
        name = f"{key}: " if key else ""
        super().__init__(f"{place}{name}{problem}" + (f"\n  fix: {fix}" if fix else ""))

    def at(self, where: str) -> ConfigError:
        """The same error, naming this place where it names none."""
        if not self.where:
            self.where = where
            self.args = (f"{where}: {self}",)
        return self


class Unreachable(ConfigError):
    """A broker, store or folder that a setting names does not answer at start."""


class MissingExtra(ConfigError):
    """A backend's client library is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} needs the extra '{extra}'", fix=f"pip install 'redrive[{extra}]'")


class BrokerUnavailable(RedriveError):
    """The broker did not answer. Nothing is known to have happened."""

    def __init__(self, broker: str, what: str, why: object = "") -> None:
        self.broker, self.what, self.why = broker, what, str(why)
        super().__init__(f"broker {broker} is unavailable for {what}" + (f": {why}" if why else ""))


class StoreUnavailable(RedriveError):
    """The store could not commit: down, full, locked or read-only. Nothing was written."""

    def __init__(self, store: str, why: object = "") -> None:
        self.store, self.why = store, str(why)
        super().__init__(f"store {store} is unavailable" + (f": {why}" if why else ""))


class BlobsUnavailable(RedriveError):
    """The blob storage refused or did not answer."""

    def __init__(self, place: str, why: object = "") -> None:
        self.place, self.why = place, str(why)
        super().__init__(f"blob storage {place} is unavailable" + (f": {why}" if why else ""))


class AttemptsUnavailable(RedriveError):
    """The record of runs and crashes could not be read or written. Nothing was counted."""

    def __init__(self, name: str, why: object = "") -> None:
        self.name, self.why = name, str(why)
        super().__init__(f"attempts {name} are unavailable" + (f": {why}" if why else ""))


class SpoolFailed(RedriveError):
    """The local spool could not make a letter durable."""

    def __init__(self, folder: str, why: object = "") -> None:
        self.folder, self.why = folder, str(why)
        super().__init__(f"spool {folder} failed" + (f": {why}" if why else ""))


class FilingFailed(RedriveError):
    """No place could make these letters durable, so their messages must stay unsettled."""

    def __init__(self, letters: list[str], causes: list[Exception]) -> None:
        self.letters, self.causes = letters, causes
        super().__init__(f"{len(letters)} letter(s) could not be filed: " + "; ".join(str(c) for c in causes))


class SchemaMismatch(RedriveError):
    """The database was written by another version of redrive."""

    def __init__(self, place: str, found: int, known: int) -> None:
        self.place, self.found, self.known = place, found, known
        super().__init__(f"{place} has schema version {found}, this redrive knows {known}: upgrade redrive to open it")


class BadRequest(RedriveError, ValueError):
    """What was asked can never be done as it stands: a foreign cursor, a move no letter may make."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


class BadParameter(BadRequest):
    """One named part of what was asked cannot be understood."""

    def __init__(self, parameter: str, problem: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: {problem}")


class LetterNotFound(RedriveError):
    def __init__(self, letter_id: str) -> None:
        self.letter_id = letter_id
        super().__init__(f"there is no letter {letter_id}")


class StateConflict(RedriveError):
    """A letter is not in the state the move needs; somebody else moved it first."""

    def __init__(self, letter_id: str, *, expected: str, actual: str) -> None:
        self.letter_id, self.expected, self.actual = letter_id, expected, actual
        super().__init__(f"letter {letter_id} is {actual}, not {expected}")


class BodyWithheld(RedriveError):
    """Something of this letter is masked, and raw bytes cannot be."""

    def __init__(self, letter_id: str) -> None:
        self.letter_id = letter_id
        super().__init__(f"letter {letter_id} has masked fields, so its raw body is not handed out")


class BodyMissing(RedriveError):
    """The body is kept elsewhere, and it is not to be had from there."""

    def __init__(self, letter_id: str, where: str) -> None:
        self.letter_id, self.where = letter_id, where
        super().__init__(f"the body of letter {letter_id} is {where}")


class JobNotFound(RedriveError):
    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"there is no replay {job_id}")


class JobConflict(RedriveError):
    """A replay is not in the state the move needs."""

    def __init__(self, job_id: str, *, expected: str, actual: str) -> None:
        self.job_id, self.expected, self.actual = job_id, expected, actual
        super().__init__(f"replay {job_id} is {actual}, not {expected}")


class LeaseConflict(RedriveError):
    """The job is driven by somebody else now."""

    def __init__(self, job_id: str, owner: str) -> None:
        self.job_id, self.owner = job_id, owner
        super().__init__(f"job {job_id} is no longer leased to {owner}")


class PayloadUnreadable(RedriveError):
    """The body does not decode to what the handler asked for. Retrying cannot help."""


class HandlerTimeout(RedriveError):
    """The handler ran longer than its limit."""

    def __init__(self, handler: str, seconds: float) -> None:
        self.handler, self.seconds = handler, seconds
        super().__init__(f"{handler} ran longer than {seconds:g} s")


class HandlerCancelled(RedriveError):
    """The handler let a cancellation escape that nobody asked for."""

    def __init__(self, handler: str) -> None:
        self.handler = handler
        super().__init__(f"{handler} was cancelled from within")


class ProcessDied(RedriveError):
    """The process died while this message ran with nothing beside it, more than once."""

    def __init__(self, times: int) -> None:
        self.times = times
        super().__init__(f"the process died {times} times while this message ran alone in it")


class ReportedFailure(RedriveError):
    """A handler returned a value that `result=` maps to failed."""


class Verdict(Exception):
    """What a handler decides about its own message, by raising it."""


class Retry(Verdict):
    """Run this message again, after `after` seconds, or after the policy's own delay."""

    def __init__(self, why: str = "the handler asked for a retry", *, after: float | None = None) -> None:
        self.why, self.after = why, after
        super().__init__(why)


class DeadLetter(Verdict):
    """File this message now; no retry will help."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Discard(Verdict):
    """Settle this message without handling it; it is counted and logged, never filed."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)
