"""Kernels that break one rule each are caught, with the Python line to blame; the same configurations
unbroken are not."""

from __future__ import annotations

import inspect
import re

import pytest

from oproj_lib import vgpu
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.lessons.broken import BROKEN, Broken
from oproj_lib.problem import Problem
from oproj_lib.program import Program, build_producer
from oproj_lib.run import SLOTS, delivery_findings, launch_on_vgpu


def build(producer: type[OprojProducer], broken: Broken, target: str) -> Program:
    made = producer(broken.k, staged_blocks=broken.staged_blocks)
    return build_producer(
        made, target=target, batch=broken.batch, mailbox_slots=SLOTS, mailbox_tokens=broken.batch
    )


def run(
    producer: type[OprojProducer], broken: Broken, target: str, schedule: str | int
) -> tuple[vgpu.Report, list[str]]:
    x, weight = Problem(8, broken.batch).inputs(1)
    mailboxes, report, _ = launch_on_vgpu(
        build(producer, broken, target), x, weight, ranks=1, checks=True, schedule=schedule
    )
    return report, delivery_findings(mailboxes, broken.batch)


def definitions(producer: type[OprojProducer], method: str) -> list[tuple[str, range]]:
    """(file name, lines) of every definition of the method: the broken one, and the one that it may call."""
    found = []
    for cls in producer.__mro__:
        if method in vars(cls):
            function = inspect.unwrap(vars(cls)[method])
            source, first = inspect.getsourcelines(function)
            file = inspect.getsourcefile(function)
            assert file is not None
            found.append((file.rsplit("/", 1)[-1], range(first, first + len(source))))
    return found


@pytest.mark.parametrize("schedule", ["program", 1])
@pytest.mark.parametrize("name", BROKEN)
def test_the_mistake_is_found_with_its_line(name: str, schedule: str | int) -> None:
    broken = BROKEN[name]
    report, delivered = run(broken.producer, broken, "sm_90a", schedule)
    if broken.kind == "unwritten output":
        assert [finding.split(":")[0] for finding in delivered] == ["unwritten output"]
        assert "7168 elements never published, first token 7 column 0" in delivered[0]
        return
    found = [finding for finding in report.findings if finding.kind == broken.kind]
    assert found, f"no {broken.kind} among {[f.kind for f in report.findings]}"
    # The line at fault is where the finding points, or what its message blames.
    places = [(place, int(line)) for f in found for place, line in re.findall(r"([\w.]+\.py):(\d+)", str(f))]
    wanted = definitions(broken.producer, broken.method)
    assert any(place == file and line in lines for place, line in places for file, lines in wanted), places


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_unbroken_kernel_has_no_findings(target: str) -> None:
    for schedule in ("program", 1, 2):
        report, delivered = run(OprojProducer, BROKEN["no cp.async wait"], target, schedule)
        assert not report.findings and not delivered


def test_wrong_data_shows_even_without_checks() -> None:
    """A missing wait gives NaN, since copies complete as late as the rules allow."""
    broken = BROKEN["no cp.async wait"]
    x, weight = Problem(8, broken.batch).inputs(1)
    mailboxes, report, _ = launch_on_vgpu(build(broken.producer, broken, "sm_90a"), x, weight, ranks=1)
    assert not report.findings
    values = mailboxes[0].array[1].astype("float32")
    assert (values != values).all()


def test_a_broken_class_does_not_get_the_right_one_from_the_cache() -> None:
    broken = BROKEN["no cp.async wait"]
    assert build(broken.producer, broken, "sm_90a").key != build(OprojProducer, broken, "sm_90a").key
