"""What a launch says when it cannot end: who waits where, and for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .launch import Launch


def report_leaks(launch: Launch) -> None:
    """Every thread has exited: tensor memory must have been freed."""
    if launch.has_tensor_memory:
        launch.tmem.report_leaks()


def report_deadlock(launch: Launch) -> None:
    """No thread can run, and threads are left."""
    dependency = launch.dependency
    if dependency.times.start is None:
        before = dependency.prerequisite
        what = "no CTA becomes resident"
        if before is not None:
            what = f"{before.name} before it in its stream never completes"
            if dependency.pdl and before.dependency.let_dependents_go():
                what += " (all its CTAs have triggered, but a GPU need not start a dependent early)"
        launch.found("deadlock", f"{launch.name} never starts: {what}", launch.op, np.zeros(1, np.int64))
        return
    if not launch.live:
        report_leaks(launch)
    launch.mbarriers.report_deadlock()
    for pc, ids in launch.gathering.items():
        op = launch.code.ops[pc]
        message = f"{op.instruction.op} waits for lanes of its warp that never come here"
        launch.found("deadlock", message, op, ids)
    launch.barriers.report_deadlock()
    for op, threads in dependency.parked:
        before = dependency.prerequisite
        assert before is not None
        message = f"griddepcontrol.wait waits for ever for {before.name}, which never completes"
        launch.found("deadlock", message, op, threads)


def report_residency(launch: Launch, limit: int) -> None:
    """CTAs are left that never became resident."""
    left = launch.ctas - launch.admitted
    if left and launch.dependency.times.start is not None:
        message = (
            f"{left} of {launch.ctas} CTAs of {launch.name} never become resident: all {limit} places of rank "
            f"{launch.rank} are taken by CTAs that wait or poll"
        )
        first = np.array([launch.admitted * launch.threads_per_cta])
        launch.found("deadlock", message, launch.code.ops[0], first)


def report_out_of_budget(launch: Launch, budget: int) -> None:
    """The step budget is used up, and threads still run."""
    waiting = "".join(
        f"; {parked.threads.size} threads wait at the mbarrier at shared byte {barrier.offset} for parity "
        f"{int(parked.parity[0])}"
        for barrier in launch.mbarriers.at.values()
        for parked in barrier.waiting
    )
    for pc, ids in launch.groups.items():
        message = f"still running after {budget:,} steps: a loop that never ends, or polls what nobody writes"
        launch.found("endless", message + waiting, launch.code.ops[pc], ids)
