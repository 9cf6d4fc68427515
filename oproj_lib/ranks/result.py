"""What a run of ranks found, whatever ran it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oproj_lib.ranks.plan import Plan

if TYPE_CHECKING:
    from oproj_lib.vgpu import GridHandle


@dataclass(frozen=True)
class RanksResult:
    """A run, judged. rounds: that were run; exact: of them, those whose sums were compared bit for bit; findings: one
    line each; rank: whose view this is; name: of the folder in a suite; handles: of the last rounds in flight together,
    for `ranks.timeline` (virtual GPU)."""

    plan: Plan
    device: str
    rounds: int
    exact: int
    batches: tuple[int, ...]
    seconds: float
    findings: tuple[str, ...]
    rank: int = 0
    name: str = ""
    handles: tuple[GridHandle, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the handles."""
        return {
            **({"name": self.name} if self.name else {}),
            "plan": self.plan.as_dict(),
            "device": self.device,
            "rank": self.rank,
            "rounds": self.rounds,
            "bit_exact_rounds": self.exact,
            "batches": list(self.batches),
            "seconds": self.seconds,
            "ok": self.ok,
            "findings": list(self.findings),
        }
