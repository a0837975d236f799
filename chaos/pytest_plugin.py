"""Prints the kill matrix at the end of a test run; its rows come from whichever process ran them."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.matrix import table

ROW = "chaos_row"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
    rows = [value for one in reports for name, value in one.user_properties if name == ROW]
    if rows:
        terminalreporter.section("kill matrix")
        terminalreporter.write_line(table(sorted(tuple(row) for row in rows)))
