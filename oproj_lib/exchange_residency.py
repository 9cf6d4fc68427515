"""Which recorded builds of an exchange leave room for what runs before and after them, and what a layer waited.

Registers and shared memory are those of the recorded programs, compiled here; whether CTAs fit is the arithmetic of
``residency``. Where CTAs ran was not recorded: that a build was slow *because* nothing fits beside it is inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from oproj_lib.bench.small_kernels import PREDECESSOR_BLOCK
from oproj_lib.exchange_programs import build_mailbox_reduce
from oproj_lib.kernels.direct import OprojProducerDirect
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.layouts import mailbox
from oproj_lib.measured_exchange import ExchangeRow, MeasuredExchange
from oproj_lib.program import Program, build_producer, build_wgmma
from oproj_lib.residency import REGISTERS, Beside, Needs, beside, needs_of

CARVEOUT_KIB = 228
"""The largest share of shared memory, which every kernel of the benchmark asks for."""
PREDECESSOR = Needs("predecessor", PREDECESSOR_BLOCK, 18)
"""Registers: of ptxas for ``bench.small_kernels.PREDECESSOR``, sm_90a."""
DIRECT_SETTINGS = {768: {"staged_blocks": 0, "rows": 2}, 1536: {"staged_blocks": 1, "rows": 2}}
"""By K, of the recorded `direct` builds. A preset may change later, a recording does not."""


@dataclass(frozen=True)
class Room:
    """A recorded build: a CTA of its projection beside one of the predecessor and one of the reduction."""

    row: ExchangeRow
    projection: Needs
    predecessor: Beside
    reduction: Beside

    @property
    def fits(self) -> bool:
        """Whether the projection can start on an SM that has one or the other."""
        return self.predecessor.fits and self.reduction.fits

    @property
    def neighbours(self) -> str:
        """What fits, for people."""
        there = {"predecessor": self.predecessor, "reduction": self.reduction}
        return ", ".join(name for name, one in there.items() if one.fits) or "neither"


def room(measured: MeasuredExchange, candidate: str, batch: int) -> Room:
    """What a recorded candidate, one shot and split, leaves at M = ``batch``.

    Raises ValueError for a candidate that was not recorded at this M, or is fused or two shots: those poll themselves.
    """
    found = [row for row in measured.rows if (row.candidate, row.batch) == (candidate, batch)]
    if not found or candidate not in measured.plans:
        raise ValueError(f"{candidate!r}, M = {batch}: none of ours that was recorded")
    plan = measured.plans[candidate]
    if plan["fused"] or plan["shots"] != 1:
        raise ValueError(f"{candidate!r} is {measured.label(candidate)}: choose a split one of one shot")
    projection = needs_of(_projection(plan, batch), measured.label(candidate))
    reduction = needs_of(
        build_mailbox_reduce(
            MailboxReduce(plan["ranks"]), target=plan["target"], batch=batch, mailbox_tokens=plan["tokens"]
        ),
        "reduction",
    )
    return Room(
        found[0],
        projection,
        beside(projection, PREDECESSOR, CARVEOUT_KIB),
        beside(projection, reduction, CARVEOUT_KIB),
    )


def _projection(plan: Mapping[str, Any], batch: int) -> Program:
    """The recorded program, compiled again."""
    k, name = plan["k"], plan["engine"]
    kinds: dict[str, Any] = {"direct": OprojProducerDirect, "producer": OprojProducer, "wgmma": OprojWgmma}
    engine = kinds[name].recommended(
        k, max(plan["batches"]), generations=True, transport=f"{plan['transport']}:{plan['ranks']}",
        **(DIRECT_SETTINGS[k] if name == "direct" else {}),
    )  # fmt: skip
    build: Any = build_wgmma if name == "wgmma" else build_producer
    return build(
        engine, target=plan["target"], batch=batch, mailbox_slots=mailbox.slots_of(plan["ranks"]),
        mailbox_tokens=plan["tokens"],
    )  # fmt: skip


def split_candidates(measured: MeasuredExchange, k: int, batch: int) -> tuple[str, ...]:
    """Our recorded candidates of one shot, split, at one K and M."""
    return tuple(
        row.candidate
        for row in measured.rows
        if row.ours and (row.k, row.batch) == (k, batch)
        if not measured.plans[row.candidate]["fused"] and measured.plans[row.candidate]["shots"] == 1
    )


def room_table(measured: MeasuredExchange, rooms: Sequence[Room]) -> Table:
    """Registers, what is left of them, whether neighbours fit, and the recorded microseconds."""
    polling = sorted({one.reduction.second.register_total for one in rooms})
    table = Table(
        title="split builds of one shot: room on an SM (computed), and what a layer waits (recorded)",
        caption=f"an SM has {REGISTERS:,} registers; a CTA of the predecessor takes {PREDECESSOR.register_total:,}, of "
        f"the reduction {' or '.join(f'{count:,}' for count in polling)}; {measured.title}",
    )
    names = ("K", "M", "projection", "threads x registers", "registers left", "fits beside", "us exposed")
    for name in names:
        table.add_column(name, justify="left" if name in ("projection", "fits beside") else "right")
    for one in rooms:
        needs = one.projection
        table.add_row(
            str(one.row.k), str(one.row.batch), measured.plans[one.row.candidate]["engine"],
            f"{needs.threads} x {needs.registers}", f"{needs.registers_left:,}", one.neighbours,
            f"{one.row.median_us:.2f}",
        )  # fmt: skip
    return table
