"""docs/sentryward.md: what SentryWard says about our PTX, and where it and the virtual GPU differ."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version

import pytest
import sentryward_cases as cases

from oproj_lib.lessons.broken import BROKEN
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.lessons.mutants import without
from oproj_lib.problem import Problem
from oproj_lib.program import Program
from oproj_lib.run import launch_on_vgpu, producer_for

BLOCKED = "The reference execution cannot advance; events remain blocked."
UNORDERED = "Conflicting accesses have no proven required ordering"


@cache
def umma(stages: int) -> Program:
    """K = 768, M = 8: 12 K blocks, so 12 stages are never refilled."""
    return cases.umma(768, 8, stages)


@cache
def producer() -> Program:
    return cases.build(producer_for(768, 8, staged_blocks=4), 8, "sm_90a")


def vgpu_kinds(program: Program, schedule: str | int = "program") -> set[str]:
    """Kinds of the virtual GPU's findings, all checks on, two CTAs."""
    x, weight = Problem(16, 8).inputs(11)
    _, report, _ = launch_on_vgpu(program, x, weight, ranks=2, checks=True, ctas=2, schedule=schedule)
    return {finding.kind for finding in report.findings}


def says(program: Program) -> tuple[str, list[str]]:
    said = cases.verdict(cases.plain_stores(program))
    return said["result"], [diagnostic["message"] for diagnostic in said["diagnostics"]]


def test_the_document_names_the_version() -> None:
    assert version("sentryward") == "0.1.1"


def test_multimem_is_not_modelled() -> None:
    said = cases.verdict(producer())
    assert said["result"] == "unsupported"
    assert [(d["code"], d["message"]) for d in said["diagnostics"]] == [
        ("missing_memory_operand", "missing address/width")
    ]
    (reason,) = said["frontend"]["address_value_bridge"]["diagnostics"]
    assert reason["message"] == "No value-IR model for 'multimem' (including its memory effects/results)"


def test_addresses_read_from_memory_are_not_resolved() -> None:
    """The unicast transport loads each rank's mailbox address from a table."""
    said = cases.verdict(cases.umma(768, 8, 12, transport="unicast:2"))
    assert (said["result"], said["checks"]["synchronization"]) == ("unsupported", "passed")
    assert [d["code"] for d in said["diagnostics"]] == ["allocation_alias_relation_unknown"]


def test_race_free() -> None:
    assert says(producer()) == ("race_free", [])
    assert says(cases.lagging(umma(12))) == ("race_free", [])
    assert says(umma(11)) == ("race_free", [])


def test_idle_lanes_of_the_mma_warp_fall_behind() -> None:
    """Without the warp barrier nothing but convergence keeps lanes 1 to 31 within one phase of the elected
    lane. The virtual GPU runs them together and cannot see it."""
    behind = cases.lagging(umma(11))
    assert says(behind) == ("not_wellsynced", [BLOCKED])
    assert not vgpu_kinds(behind) and not vgpu_kinds(behind, 1)


def test_the_kernel_as_it_is_refills_safely() -> None:
    assert "bar.warp.sync" in umma(11).ptx
    assert says(umma(11)) == ("race_free", [])


def test_an_arrival_too_few() -> None:
    """SentryWard follows each lane; the virtual GPU sees that a phase ends between the lanes of one warp."""
    early = cases.expecting(umma(2), 255)
    message = "next-phase arrival occurred before a successful prior-phase wait"
    assert says(early) == ("not_wellsynced", [message])
    assert vgpu_kinds(early) == vgpu_kinds(early, 1) == {"arrival count"}


@pytest.mark.parametrize(
    ("opcode", "occurrence", "result", "message", "vgpu"),
    [
        ("bar.sync", 0, "not_wellsynced", "async request references an uninitialized barrier", "race"),
        (
            "bar.sync", 1, "invalid_lifecycle",
            "tcgen05.load must complete before the allocation is deallocated", "race",
        ),
        ("bar.sync", 2, "potential_race", UNORDERED, "race"),
        ("tcgen05.commit", -1, "not_wellsynced", BLOCKED, "deadlock"),
    ],
)  # fmt: skip
def test_both_find_it(opcode: str, occurrence: int, result: str, message: str, vgpu: str) -> None:
    broken = without(umma(12), opcode, occurrence=occurrence)
    assert says(broken) == (result, [message])
    assert vgpu in vgpu_kinds(broken)


@pytest.mark.parametrize("name", ["wrong parity", "one thread does not arrive"])
def test_broken_umma(name: str) -> None:
    broken = BROKEN_UMMA[name]
    program = cases.build(broken.build(), broken.batch, cached=False)
    assert says(program) == ("not_wellsynced", [BLOCKED])
    assert broken.kind in vgpu_kinds(program)


@pytest.mark.parametrize("name", ["no cp.async wait", "no barrier before publish"])
def test_broken_producer(name: str) -> None:
    broken = BROKEN[name]
    assert says(cases.build(broken.build(), broken.batch, cached=False)) == ("potential_race", [UNORDERED])


@pytest.mark.parametrize("finding", ["missing proxy fence", "too early"])
def test_only_the_virtual_gpu_finds_it(finding: str) -> None:
    """SentryWard models neither proxies nor the kernel before."""
    if finding == "missing proxy fence":
        unfenced = replace(BROKEN_UMMA["no proxy fence"], stages=12)
        broken = cases.build(unfenced.build(), unfenced.batch, cached=False)
    else:
        broken = without(umma(12), "griddepcontrol.wait")
    assert says(broken) == ("race_free", [])
    assert finding in vgpu_kinds(broken)
