"""`vgpu.warm_up` compiles what a producer needs, so that no launch is timed with the compiler in it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from oproj_lib import vgpu
from oproj_lib.run import run_producer
from oproj_lib.vgpu import counting, shadow, tensorcore

loops = [counting.count_sectors, counting.count_wavefronts]
loops += [shadow.mark_reads, shadow.mark_writes, tensorcore._mma_m16n8]
vgpu.warm_up()
before = [len(loop.signatures) for loop in loops]
assert all(before), before
for ranks, batch, exact in ((8, 8, False), (16, 9, True)):
    assert run_producer(ranks=ranks, batch=batch, device="vgpu", exact=exact, checks=True).ok
after = [len(loop.signatures) for loop in loops]
assert after == before, (before, after)
"""


def test_a_producer_compiles_nothing_further() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=300)
