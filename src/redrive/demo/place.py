"""The folder a demo lives in: its configuration, its broker and store, and the switches of its small world."""

from __future__ import annotations

import json
from pathlib import Path

MARK = "# written by redrive demo; the next one wipes this folder\n"
LEASE_SECONDS = 2.0


class Place:
    """Every process of one demo is handed the same folder. A switch is a file, so that a shell can throw it too."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = home / "redrive.toml"
        self.ledger = home / "ledger.jsonl"
        self.logs = home / "logs"
        self.release_2 = home / "release-2"
        self.outage = home / "payment-provider-is-down"

    @property
    def is_mended(self) -> bool:
        """Whether release 2 of the order service is deployed."""
        return self.release_2.exists()

    @property
    def provider_is_down(self) -> bool:
        return self.outage.exists()

    @property
    def is_ours(self) -> bool:
        """Whether an earlier demo made this folder, so that it may be wiped."""
        try:
            return self.config.read_text("utf-8", "replace").startswith(MARK)
        except OSError:
            return False

    def furnish(self, port: int) -> None:
        """Write the configuration that the demo's processes, and a person's commands, read."""
        self.logs.mkdir(parents=True)
        self.ledger.touch()
        lines = [
            'service = "order-service"',
            'environment = "demo"',
            f"broker = {_text(f'embedded://{self.home}/broker.db')}",
            f"store = {_text(f'sqlite://{self.home}/letters.db')}",
            "[embedded]",
            f"lease_seconds = {LEASE_SECONDS}",
            "[serve]",
            f"port = {port}",
        ]
        self.config.write_text(MARK + "\n".join(lines) + "\n", "utf-8")


def _text(value: str) -> str:
    """A TOML string; JSON's are a subset of them."""
    return json.dumps(value)
