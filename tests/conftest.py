"""What all tests share: the rule that a skip must be on the committed list, and the demo model's whereabouts."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.kernels import build

# How long one example takes on a busy machine says nothing about the code.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"


def read_allowed_skips(text: str) -> list[tuple[str, str]]:
    """Gives (test id pattern, reason pattern) pairs; a line is ``pattern | reason``, # starts a comment."""
    pairs = []
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            pattern, separator, reason = (part.strip() for part in line.partition("|"))
            assert all((pattern, separator, reason)), f"allowed_skips.txt: {line!r} is not `pattern | reason`"
            pairs.append((pattern, reason))
    return pairs


class SkipRule:
    """Fails the run when a test was skipped that the committed list does not allow."""

    def __init__(self, allowed: list[tuple[str, str]]) -> None:
        self._allowed = allowed
        self._refused: list[str] = []

    def _judge(self, node_id: str, longrepr: object) -> None:
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
        for pattern, allowed_reason in self._allowed:
            if fnmatch.fnmatchcase(node_id, pattern) and fnmatch.fnmatchcase(reason, allowed_reason):
                return
        self._refused.append(f"{node_id}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._judge(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._judge(report.nodeid, report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._refused:
            terminalreporter.section("skips that tests/allowed_skips.txt does not list", red=True)
            for line in self._refused:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if (reason := build.why_stale()) is not None:
        pytest.exit(f"{reason}: {build.REMEDY}", returncode=pytest.ExitCode.USAGE_ERROR)
    config.pluginmanager.register(SkipRule(read_allowed_skips(ALLOWED_SKIPS.read_text())), "skip_rule")


def find_demo_model() -> Path | None:
    """Gives the demo model's folder in the user's cache, or None; reaches for no network."""
    try:
        from headrace.registry.cache import default_cache_path
        from headrace.registry.sources import DEMO_SOURCE, find_cached
    except ImportError:
        return None
    return find_cached(DEMO_SOURCE, cache=default_cache_path())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("model")]
    if marked and find_demo_model() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="the demo model is not in the cache"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder; only for tests marked ``model``."""
    path = find_demo_model()
    assert path is not None, "mark the test with `model`"
    return path
