"""A module that stands in no layer would be checked by no contract."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def layered() -> set[str]:
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return set(re.findall(r"redrive[.\w]*", contracts["importlinter:contract:layers"]["layers"]))


def modules() -> set[str]:
    files = (ROOT / "src" / "redrive").rglob("*.py")
    return {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in files if path.stem[:2] != "__"}


def test_every_module_stands_in_a_layer():
    homes = layered()
    homeless = {name for name in modules() if not any(name == home or name.startswith(f"{home}.") for home in homes)}
    assert homeless == set(), "add these to the layers in .importlinter"
