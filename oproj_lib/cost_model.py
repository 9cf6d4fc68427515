"""What things cost in the modelled timeline: one table, each number with the reason for it.

The model is there to show *who waits for whom*, not to predict microseconds. Its numbers are public ones,
rounded, and none was fitted to a measurement of this kernel. Every time that comes out of it is to be called
modelled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


def _constant(default: float, unit: str, why: str) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "why": why})


@dataclass(frozen=True)
class CostModel:
    """Cycles of one SM, and bytes per cycle of one CTA's share. Replace one with ``dataclasses.replace``.

    Raises ValueError for a negative latency, or a rate that is not positive.
    """

    clock_ghz: float = _constant(1.755, "GHz", "boost clock of an H100 SXM data sheet; only for microseconds")
    schedulers: float = _constant(
        4, "", "sub-partitions of an SM; warp w belongs to w % 4 (Hopper tuning guide)"
    )
    issue: float = _constant(1, "cycles", "a scheduler issues one warp instruction per cycle")
    memory_issue: float = _constant(2, "cycles", "32 lanes over 16 load/store lanes per sub-partition")
    arithmetic: float = _constant(4, "cycles", "dependent FP32 or integer instructions, Volta and later")
    shared_load: float = _constant(30, "cycles", "published: 29 (arXiv 2402.13499, Hopper)")
    l2_load: float = _constant(270, "cycles", "published: 260 to 300 on Hopper and Blackwell")
    hbm_load: float = _constant(700, "cycles", "published values spread from 480 to 1000; a cold load")
    hbm_rate: float = _constant(21, "bytes/cycle", "4.26 TB/s of a copy on an H200 / 112 CTAs / 1.755 GHz")
    l2_rate: float = _constant(32, "bytes/cycle", "half of the 64 an SM can take; all CTAs read the same x")
    mma_sync: float = _constant(
        33,
        "cycles",
        "m16n8k16 to its result, published for Hopper, rounded up; wgmma: the same, an assumption",
    )
    mma_sync_rate: float = _constant(
        512, "MACs/cycle", "per sub-partition: 990 TFLOP/s / 2 / 132 SMs / 4 / 1.83 GHz, H100"
    )
    tensor_macs: float = _constant(
        4096, "MACs/cycle", "per SM at M = 128: 2.25 PFLOP/s / 2 / 148 SMs / 1.85 GHz, B200; half at M = 64"
    )
    tensor_operands: float = _constant(
        128, "bytes/cycle", "operands of tcgen05.mma and wgmma from shared memory: what bounds small N"
    )
    tensor_issue: float = _constant(30, "cycles", "from issuing a tcgen05.mma to its start; an assumption")
    tensor_result: float = _constant(
        100, "cycles", "from the last MMA to its commit's arrival; an assumption"
    )
    tensor_load: float = _constant(30, "cycles", "tcgen05.ld to registers: like shared memory, an assumption")
    barrier: float = _constant(20, "cycles", "last arrival to first instruction behind the wait; 20 to 30")
    fence: float = _constant(
        10, "cycles", "a proxy fence with nothing in flight; 20 seen on an H200, rounded"
    )
    predecessor_end: float = _constant(0, "cycles", "when griddepcontrol.wait lets go: a choice, not a cost")

    def __post_init__(self) -> None:
        for constant in dataclasses.fields(self):
            value = getattr(self, constant.name)
            rate = (
                constant.metadata["unit"] in ("GHz", "bytes/cycle", "MACs/cycle")
                or constant.name == "schedulers"
            )
            if value < 0 or (rate and value == 0):
                raise ValueError(f"{constant.name} = {value}: choose {'more than' if rate else 'at least'} 0")

    def table(self) -> list[dict[str, str | float]]:
        """Every constant with unit and reason: what a notebook prints."""
        return [
            {"constant": item.name, "value": getattr(self, item.name), **item.metadata}
            for item in dataclasses.fields(self)
        ]

    def microseconds(self, cycles: float) -> float:
        """Modelled cycles as modelled microseconds."""
        return cycles / self.clock_ghz / 1e3

    def tensor_mma(self, m: int, n: int, k: int) -> float:
        """Cycles for which one tcgen05.mma [m, k] x [k, n] of BF16 occupies the tensor core.

        The larger of its arithmetic (M = 64 uses half of the unit) and the reads of both operands.
        """
        rate = self.tensor_macs * min(m, 128) / 128
        return max(m * n * k / rate, (m + n) * k * 2 / self.tensor_operands)

    def wgmma_occupancy(self, n: int) -> float:
        """Cycles for which one wgmma m64nNk16 of BF16 occupies the tensor core of each sub-partition, which
        multiplies its warp's 16 rows.

        The larger of its arithmetic and the reads of both operands, [64, 16] and [n, 16], by the SM.
        """
        return max(16 * n * 16 / self.mma_sync_rate, (64 + n) * 16 * 2 / self.tensor_operands)

    def mma_sync_occupancy(self) -> float:
        """Cycles for which one m16n8k16 occupies its sub-partition's tensor core."""
        return 16 * 8 * 16 / self.mma_sync_rate
