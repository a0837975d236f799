"""Runs handlers over a broker's deliveries: slots run them, the worker decides, the settler files and settles."""

from redrive.runtime.engine import Engine, SlotsLost
from redrive.runtime.spans import Gate
from redrive.runtime.worker import Worker

__all__ = ["Engine", "Gate", "SlotsLost", "Worker"]
