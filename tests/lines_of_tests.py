"""Pytest plugin that writes which lines of jtrain each test runs: `-p tests.lines_of_tests --lines-of-tests
FILE`.

`bench/mutation_score.py` chooses by it the tests that could notice a changed line. Every line of every test
fires once (`sys.monitoring`), which costs a few percent of the tests' time. Processes that tests start are
not seen.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT}/jtrain/"

_lines: defaultdict[str, set[int]] = defaultdict(set)
_tests: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file to write."""
    parser.addoption("--lines-of-tests", type=Path, required=True, metavar="FILE")


def pytest_configure() -> None:
    """Watches lines from now on; those of imports belong to the first test that runs."""
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.COVERAGE_ID, "lines_of_tests")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, _on_line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def _on_line(code: CodeType, line: int) -> Any:
    if code.co_filename.startswith(PACKAGE):
        _lines[code.co_filename.removeprefix(f"{ROOT}/")].add(line)
    return sys.monitoring.DISABLE  # until the next test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begins a test's lines, its fixtures' among them."""
    _lines.clear()
    sys.monitoring.restart_events()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds a phase's seconds to its test, and keeps the lines of a test that passed."""
    test = _tests.setdefault(report.nodeid, {"seconds": 0.0, "lines": {}})
    test["seconds"] += report.duration
    if report.when == "call" and report.passed:
        test["lines"] = {file: sorted(lines) for file, lines in _lines.items()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes `{test: {seconds, lines: {file: [line]}}}`."""
    file = session.config.getoption("--lines-of-tests")
    assert isinstance(file, Path)
    file.write_text(json.dumps(_tests))
