"""The producer tuned for M <= 8: the same bits as the contract orders, however x arrives and parts are added."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from contract import chains_of, expected_bits
from cutlass import Float32, Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels.direct import OprojProducerDirect
from oproj_lib.kernels.lane import Shared
from oproj_lib.kernels.transport import UnicastTransport
from oproj_lib.problem import Problem
from oproj_lib.program import Program, build_producer
from oproj_lib.run import SLOT, SLOTS, delivery_findings, launch_on_vgpu
from oproj_lib.sass import check_sass

RANKS = {768: 16, 1536: 8}
# (k, staged_blocks, rows, batch, target, transport): every rows of both K, 1 and 8 tokens, what tuning chose,
# the fullest register file (1536, 0, 4), no weight in registers at all (1536, 12, 1).
POINTS = [
    (768, 0, 2, 8, "sm_90a", "unicast:2"),
    (1536, 1, 2, 8, "sm_90a", "multicast"),
    (768, 0, 1, 1, "sm_100a", "multicast"),
    (768, 3, 2, 7, "sm_90a", "multicast"),
    (1536, 0, 4, 5, "sm_90a", "unicast:2"),
    (1536, 12, 1, 2, "sm_100a", "unicast:2"),
    (1536, 5, 1, 3, "sm_90a", "multicast"),
]


def build(k: int, staged_blocks: int, rows: int, batch: int, target: str, transport: str) -> Program:
    producer = OprojProducerDirect(k, staged_blocks=staged_blocks, rows=rows, transport=transport)
    return build_producer(producer, target=target, batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch + 1)


@cache
def expected(k: int, rows: int) -> np.ndarray:
    x, weight = Problem(RANKS[k], 8).inputs(7)
    return expected_bits(x, weight, rows, chains_of(rows, 0))


def differences(program: Program, k: int, rows: int, batch: int, ranks: int = 2, **options: Any) -> int:
    """Outputs that are not the contract's bits; a finding raises."""
    x, weight = Problem(RANKS[k], 8).inputs(7)
    mailboxes, report, _ = launch_on_vgpu(program, x[:batch], weight, ranks=ranks, **options)
    report.raise_for_findings()
    assert not delivery_findings(mailboxes, batch)
    bits = np.stack([mailbox.array[SLOT, :batch].view(np.uint16) for mailbox in mailboxes])
    return int((bits != expected(k, rows)[:batch]).sum())


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_bits_are_the_contracts(point: tuple[Any, ...]) -> None:
    k, _, rows, batch, _, _ = point
    program = build(*point)
    check_sass(program).raise_for_problems()
    assert differences(program, k, rows, batch, checks=True) == 0
    assert differences(program, k, rows, batch, schedule=batch) == 0


@pytest.mark.parametrize(
    ("k", "staged_blocks", "rows", "target"),
    [(768, 0, 2, "sm_90a"), (1536, 1, 2, "sm_90a"), (1536, 0, 4, "sm_100a")],
)
def test_one_ranks_address_is_looked_up_before_the_wait(
    k: int, staged_blocks: int, rows: int, target: str
) -> None:
    program = build(k, staged_blocks, rows, 8, target, "unicast:1")
    waits = program.ptx.index("griddepcontrol.wait")
    lookups = [match.start() for match in re.finditer(r"ld\.global\.b64 ", program.ptx)]
    assert len(lookups) == 1 and lookups[0] < waits
    assert differences(program, k, rows, 8, ranks=1, checks=True) == 0

    several = build(k, staged_blocks, rows, 8, target, "unicast:2").ptx
    lookups = [match.start() for match in re.finditer(r"ld\.global\.b64 ", several)]
    assert len(lookups) == 2 and min(lookups) > several.index("griddepcontrol.wait")


def test_only_one_address_can_be_held() -> None:
    with pytest.raises(ValueError, match="held with 2 ranks: mc holds one address, not 2"):
        UnicastTransport(2, held=True)


class PartsBackwards(OprojProducerDirect):
    """Adds the K parts from the last to the first."""

    def sum_pair(self, shared: Shared, token: Int32, row_tile: Int32, row: Int32) -> tuple[Float32, Float32]:
        from oproj_lib.layouts import shared_memory

        parts = self.config.parts
        address = shared.partials + shared_memory.partial_offset(0, row_tile, 0, token, row, parts)
        size = shared_memory.PARTIAL_TILE_BYTES
        low, high = primitives.load_shared_pair(address, (parts - 1) * size)
        for part in reversed(range(parts - 1)):
            a, b = primitives.load_shared_pair(address, part * size)
            low, high = primitives.add_float(low, a), primitives.add_float(high, b)
        return low, high


def test_another_order_of_the_parts_is_noticed() -> None:
    producer = PartsBackwards(768, staged_blocks=0, transport="unicast:2")
    program = build_producer(producer, target="sm_90a", batch=8, mailbox_slots=SLOTS, mailbox_tokens=9)
    assert differences(program, 768, 2, 8) > 0


class EveryToken(OprojProducerDirect):
    """Publishes all 8 tokens of the tile, whether the batch has them or not."""

    @cute.jit
    def publish(
        self,
        shared: cutlass.Constexpr,
        mailbox: cutlass.Constexpr,
        mc: Int64,
        slot: Int32,
        first_token: cutlass.Constexpr,
        tokens: cutlass.Constexpr,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        if tid < 256:
            self.publish_pair(shared, mailbox, mc, slot, first_token, 8)


def test_a_token_beyond_the_batch_is_noticed() -> None:
    program = build_producer(
        EveryToken(768, staged_blocks=0, transport="unicast:2"), target="sm_90a", batch=7,
        mailbox_slots=SLOTS, mailbox_tokens=8,
    )  # fmt: skip
    x, weight = Problem(16, 8).inputs(7)
    mailboxes, _, _ = launch_on_vgpu(program, x[:7], weight, ranks=2)
    assert any("stray write" in finding for finding in delivery_findings(mailboxes, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 768, "staged_blocks": 0, "group_tiles": 1}, "there is no ring; choose 0"),
        ({"k": 1536, "staged_blocks": 0, "rows": 2}, "138 registers per thread"),
        ({"k": 1536, "staged_blocks": 4, "rows": 1}, "130 registers per thread"),
        ({"k": 1536, "staged_blocks": 3, "rows": 3}, "rows = 3"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OprojProducerDirect(**arguments)


def test_more_than_one_tile_is_refused() -> None:
    producer = OprojProducerDirect(1536, staged_blocks=1)
    assert producer.valid_batches() == (1, 2, 3, 4, 5, 6, 7, 8)
    with pytest.raises(ValueError, match=r"batch = 9: .* one tile of 8 tokens; choose 1 to 8"):
        producer.plan(9)
