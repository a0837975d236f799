"""What can go wrong in the lab."""

from __future__ import annotations


class LabError(Exception):
    """Any failure of the lab."""


class Missing(LabError):
    """A server cannot be had here; the text says what is missing and how to get it."""


class PortTaken(LabError):
    def __init__(self, name: str, port: int, pids: set[int]) -> None:
        self.name, self.port, self.pids = name, port, pids
        super().__init__(f"port {port}, meant for {name}, belongs to somebody else (process {sorted(pids)})")


class StartFailed(LabError):
    def __init__(self, name: str, why: str, log: str) -> None:
        self.name, self.why, self.log = name, why, log
        super().__init__(f"{name} {why}; the end of its log:\n{log}")


class NotOurs(LabError):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} was given by REDRIVE_LAB_{name.upper()}; the lab neither stops nor kills it")
