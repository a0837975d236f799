"""The small commands: a key, a check of the configuration, the demo."""

from __future__ import annotations

from argparse import Namespace

from redrive import cli
from redrive.cli.text import pairs


def keygen(_: Namespace) -> int:
    from redrive.keyring import generate

    print(generate())
    return cli.DONE


def check(args: Namespace) -> int:
    """Build everything that the settings describe, and open and make nothing."""
    from msgspec.structs import replace

    from redrive.cli.settings import profile_of, settings_of, where
    from redrive.clock import SystemClock
    from redrive.errors import ConfigError
    from redrive.keyring import generate
    from redrive.redact import scrub
    from redrive.wiring import build

    settings = settings_of(args)
    try:
        # A key of its own keeps the check from making the one beside an embedded broker.
        build(replace(settings, signing_keys=settings.signing_keys or (generate(),)), SystemClock())
    except ConfigError as error:
        raise error.at(where(args)) from None
    facts = [
        ("configuration", f"{where(args)} is good"),
        ("profile", profile_of(args) or "none"),
        ("broker", scrub(settings.broker)),
        ("store", scrub(settings.store or "none: letters stay in the broker")),
        ("signing keys", len(settings.signing_keys) or "made at first use, beside the broker"),
        ("sources", ", ".join(settings.sources) or "none named: all have the defaults"),
    ]
    print("\n".join(pairs(facts)))
    return cli.DONE


def demo(args: Namespace) -> int:
    from redrive.demo import main

    return main(check=args.check, port=args.port)
