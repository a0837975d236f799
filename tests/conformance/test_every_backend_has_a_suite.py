"""A backend is one module and one subclass of its socket's suite; one without the other is a hole in the promises."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOCKETS = {
    "brokers": ("Broker", "broker_suite", "BrokerSuite"),
    "stores": ("Store", "store_suite", "StoreSuite"),
    "blobs": ("Blobs", "blobs_suite", "BlobsSuite"),
    "attempts": ("Attempts", "attempts_suite", "AttemptsSuite"),
}


def modules_of(package: str) -> list[str]:
    """The backends' modules and packages; a name with an underscore in front is a backend's own business."""
    path = importlib.import_module(f"redrive.{package}").__path__
    return [m.name for m in pkgutil.iter_modules(path) if m.name != "base" and not m.name.startswith("_")]


def backends_in(module: ModuleType, protocol: type) -> list[type]:
    """The public classes defined under this module that have every method of the socket."""
    methods = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and not name.startswith("_")
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
        and methods <= set(dir(value))
    ]


def has_suite(backend: type, suite: type, tests: list[Any]) -> bool:
    """Whether a test module runs the suite for this backend, by its `backend` or else by what it imports."""
    return any(
        getattr(found, "backend", None) is backend
        or (not hasattr(found, "backend") and any(value is backend for value in vars(module).values()))
        for module in tests
        for name, found in vars(module).items()
        if name.startswith("Test") and inspect.isclass(found) and issubclass(found, suite)
    )


def conformance_tests() -> list[ModuleType]:
    here = Path(__file__)
    return [importlib.import_module(path.stem) for path in sorted(here.parent.glob("test_*.py")) if path != here]


@pytest.mark.parametrize(("package", "name"), [(p, name) for p in SOCKETS for name in modules_of(p)])
def test_this_backend_runs_the_suite_of_its_socket(package: str, name: str) -> None:
    socket, suite_module, suite_name = SOCKETS[package]
    module = importlib.import_module(f"redrive.{package}.{name}")
    found = backends_in(module, getattr(importlib.import_module(f"redrive.{package}.base"), socket))
    assert found, f"redrive.{package}.{name} has no public class with every method of {socket}"
    suite = getattr(importlib.import_module(suite_module), suite_name)
    tests = conformance_tests()
    missing = [backend.__name__ for backend in found if not has_suite(backend, suite, tests)]
    assert not missing, f"redrive.{package}.{name}: no Test class in tests/conformance runs {suite_name} for {missing}"


@pytest.mark.parametrize("package", SOCKETS)
def test_every_socket_has_a_backend(package: str) -> None:
    assert modules_of(package)


def test_a_backend_nobody_tests_is_noticed() -> None:
    suite = type("Suite", (), {})
    one, other = type("One", (), {}), type("Other", (), {})
    declared = SimpleNamespace(Other=other, TestOne=type("TestOne", (suite,), {"backend": one}))
    assert has_suite(one, suite, [declared])
    assert not has_suite(other, suite, [declared])
    inferred = SimpleNamespace(Other=other, TestOther=type("TestOther", (suite,), {}))
    assert has_suite(other, suite, [inferred])
    assert not has_suite(one, suite, [inferred, SimpleNamespace(One=one, TestOne=type("TestOne", (), {}))])
