"""The pytest plugin: one fixture, and nothing is loaded before a test asks for it. Only pytest imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from redrive.testing import TestOffice


@pytest.fixture
def redrive_office() -> Callable[..., AbstractAsyncContextManager[TestOffice]]:
    """`redrive.testing.office`: `async with redrive_office(app) as office: …`."""
    from redrive.testing import office

    return office
