"""redrive: the dead letter office for every broker."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redrive.app import Redrive
    from redrive.errors import ConfigError, DeadLetter, Discard, FilingFailed, RedriveError, Retry
    from redrive.handlers import failed, handled, recorded
    from redrive.letter import Kind, Letter, Reason, State
    from redrive.message import Message
    from redrive.retry import constant, delays, exponential, linear

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DeadLetter",
    "Discard",
    "FilingFailed",
    "Kind",
    "Letter",
    "Message",
    "Reason",
    "Redrive",
    "RedriveError",
    "Retry",
    "State",
    "constant",
    "delays",
    "exponential",
    "failed",
    "handled",
    "linear",
    "recorded",
]

_HOMES = {
    "app": ("Redrive",),
    "errors": ("ConfigError", "DeadLetter", "Discard", "FilingFailed", "RedriveError", "Retry"),
    "handlers": ("failed", "handled", "recorded"),
    "letter": ("Kind", "Letter", "Reason", "State"),
    "message": ("Message",),
    "retry": ("constant", "delays", "exponential", "linear"),
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for, so that `redrive --help` answers at once."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"redrive.{home}"), name)
    raise AttributeError(f"module 'redrive' has no attribute {name!r}")
