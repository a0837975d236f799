"""Stands at the root so that tests can import `lab` and `chaos`, and every test run has its servers."""

pytest_plugins = ("lab.pytest_plugin", "chaos.pytest_plugin")
