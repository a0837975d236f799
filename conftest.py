"""Stands at the root so that tests can import `lab` and every test run has its servers."""

pytest_plugins = ("lab.pytest_plugin",)
