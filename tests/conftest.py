"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from notebook_checks import Runs

os.environ.setdefault("MPLBACKEND", "Agg")  # no windows


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a skipped test is a failure: for a machine that has everything the suite uses",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu run where an engine's target finds its GPU, and say otherwise what is missing."""
    if item.get_closest_marker("gpu"):
        from oproj_lib.devices import choose_device

        device, why = choose_device("auto", "producer", "sm_90a")
        if device != "cuda":
            pytest.skip(f"needs a GPU: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which --no-skips forbids: {reason}"
    return report


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of notebooks, each made once for all tests of a file."""
    from notebook_checks import runs_in

    return runs_in(tmp_path_factory.mktemp("runs"))
