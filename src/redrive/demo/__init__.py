"""`redrive demo`: the whole product on its embedded default, with an order service that fails in realistic ways."""

from __future__ import annotations

import asyncio


def main(check: bool = False, port: int | None = None) -> int:
    """Run until Ctrl-C; with `check`, play the same story alone, count, and say by exit code whether all is well."""
    if check:
        from redrive.demo.check import check as play
    else:
        from redrive.demo.show import show as play

    return asyncio.run(play(port))
