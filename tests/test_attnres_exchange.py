"""Residual attention behind a projection: R virtual ranks, split and fused, one-shot and two-shot, call after call.

Expected bits come from `contract.expected_bits` (the projection) and `fp32_reference`. K is small: what is tested
is the exchange, and K does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import ml_dtypes
import numpy as np
import pytest
from contract import expected_bits

from oproj_lib.attnres_programs import build_attnres, build_fused_attnres
from oproj_lib.attnres_reference import fp32_reference, make_inputs
from oproj_lib.attnres_run import AttnResRanks
from oproj_lib.exchange_programs import build_second_shot
from oproj_lib.kernels.attnres import AttnRes
from oproj_lib.kernels.attnres_configuration import (
    THREAD_CHOICES,
    AttnResConfiguration,
    registers_per_thread,
)
from oproj_lib.kernels.attnres_fused import FusedAttnRes, FusedTwoShotAttnRes
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.second_shot import SecondShot
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.layouts import mailbox as layout
from oproj_lib.lessons.broken_attnres import NeverWaits
from oproj_lib.problem import N
from oproj_lib.program import Program, build_producer
from oproj_lib.sass import disassemble

K = 128
TOKENS = 5
"""Of the mailboxes; calls have as many or fewer."""
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Chain:
    """How a call is made: kernels, ranks, exchange."""

    fused: bool = False
    twoshot: bool = False
    ranks: int = 2
    blocks: int = 1
    producer: type[OprojProducer] = OprojProducer
    attnres: type[AttnRes] = AttnRes

    def kernel(self, tokens: int) -> AttnRes:
        return self.attnres(self.blocks, ranks=1 if self.twoshot else self.ranks, tokens=tokens)

    def programs(self, tokens: int) -> list[Program]:
        engine = self.producer(K, staged_blocks=1, generations=True, twoshot=self.twoshot)
        kernel, second = self.kernel(tokens), SecondShot(self.ranks, tokens)
        if self.fused:
            fused = (
                FusedTwoShotAttnRes(engine, second, kernel) if self.twoshot else FusedAttnRes(engine, kernel)
            )
            return [build_fused_attnres(fused, target="sm_90a", mailbox_tokens=TOKENS)]
        first = build_producer(
            engine, target="sm_90a", batch=tokens, mailbox_slots=layout.slots_of(self.ranks),
            mailbox_tokens=TOKENS, ranks=self.ranks if self.twoshot else 1,
        )  # fmt: skip
        middle = [build_second_shot(second, target="sm_90a", mailbox_tokens=TOKENS)] if self.twoshot else []
        return [first, *middle, build_attnres(kernel, target="sm_90a", mailbox_tokens=TOKENS)]


def run_chain(
    chain: Chain, batches: Sequence[int], *, checks: bool = False, **schedule: Any
) -> tuple[list[str], bool]:
    """(kinds of findings, whether every rank's prefix and all outs have the expected bits)."""
    rng = np.random.default_rng(sum(batches))
    first = make_inputs(AttnResConfiguration(chain.blocks, 1, TOKENS), 0)
    ranks = AttnResRanks(chain.ranks, TOKENS, first.prefix, twoshot=chain.twoshot)
    weight = [(rng.standard_normal((N, K)) / K**0.5).astype(BF16) for _ in range(chain.ranks)]
    prefix, calls = first.prefix, []
    for seed, tokens in enumerate(batches):
        x = [rng.standard_normal((tokens, K)).astype(BF16) for _ in range(chain.ranks)]
        slots = np.stack([expected_bits(a, w, 1, 4) for a, w in zip(x, weight, strict=True)]).view(BF16)
        summed = AttnResConfiguration(chain.blocks, chain.ranks, tokens)
        inputs = replace(make_inputs(summed, seed), slots=slots, prefix=prefix[:tokens])
        new, out = fp32_reference(summed, inputs)
        prefix = np.concatenate([new, prefix[tokens:]])
        calls.append((ranks.enqueue(chain.programs(tokens), x, weight, inputs, checks=checks), out))
    reports = ranks.gpu.synchronize(**schedule)
    right = all((buffer.array.view(np.uint16) == prefix.view(np.uint16)).all() for buffer in ranks.prefix)
    for call, out in calls:
        right &= all((buffer.array.view(np.uint16) == out.view(np.uint16)).all() for buffer in call.out)
    return [finding.kind for report in reports for finding in report.findings], right


def test_split_calls() -> None:
    assert run_chain(Chain(), [2, 2]) == ([], True)


def test_fused_calls_of_growing_and_shrinking_batches() -> None:
    """Four calls: every generation is armed again and used again."""
    assert run_chain(Chain(fused=True), [2, 5, 2, 5]) == ([], True)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_two_shot(fused: bool) -> None:
    assert run_chain(Chain(fused, twoshot=True), [3]) == ([], True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("twoshot", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_random_schedules_and_skewed_ranks(fused: bool, twoshot: bool, seed: int) -> None:
    chain = Chain(fused, twoshot, blocks=3)
    assert run_chain(chain, [2, 5, 1, 3], checks=True, schedule=seed, skew={seed % 2: 3.0}) == ([], True)


@pytest.mark.parametrize(
    ("engine", "target"), [(OprojUmma, "sm_100a"), (OprojWgmma, "sm_90a")], ids=["umma", "wgmma"]
)
def test_fused_with_an_engine_of_128_consumers(engine: type[RingEngine], target: str) -> None:
    """One rank: its own sums are still in the mailbox, and give what AttnRes has to make of them."""
    tokens = 9
    config = AttnResConfiguration(1, 1, tokens, threads=128)
    inputs = make_inputs(config, 3)
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal((rows, 64)).astype(BF16) for rows in (tokens, N))
    fused = FusedAttnRes(engine(64, generations=True), AttnRes(1, ranks=1, tokens=tokens, threads=128))
    ranks = AttnResRanks(1, tokens, inputs.prefix)
    program = build_fused_attnres(fused, target=target, mailbox_tokens=tokens)
    call = ranks.enqueue([program], [x], [weight], inputs, checks=True)
    (report,) = ranks.gpu.synchronize()
    report.raise_for_findings()
    slots = ranks.exchange.first.generation(0, 0)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.linalg.norm(slots[0].astype(np.float64) - exact) < 2.5e-3 * np.linalg.norm(exact)
    prefix, out = fp32_reference(config, replace(inputs, slots=np.array(slots)))
    np.testing.assert_array_equal(ranks.prefix[0].array.view(np.uint16), prefix.view(np.uint16))
    np.testing.assert_array_equal(call.out[0].array.view(np.uint16), out.view(np.uint16))


class TriggersBeforeItsWait(OprojProducer):
    """Its dependent may run before what came before the producer has completed."""

    def compute(
        self, x: Any, weights: Any, shared: Any, mailbox: Any, mc: Any, slot: Any,
        trigger_after_wait: bool = True, state: Any = None,
    ) -> None:  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()  # the mistake
        super().compute(x, weights, shared, mailbox, mc, slot, False, state)


def test_prefix_is_safe_only_behind_a_producer_that_triggers_after_its_wait() -> None:
    """Both kernels rely on the rule that the module names; the virtual GPU sees who breaks it."""
    assert "too early" in run_chain(Chain(producer=TriggersBeforeItsWait), [2, 2])[0]
    assert "too early" in run_chain(Chain(attnres=NeverWaits), [2, 2])[0]


def test_fused_weights_are_loaded_before_the_wait() -> None:
    """At K = 1536: all 16-byte weight loads and copies, and nothing of AttnRes."""
    engine = OprojProducer.recommended(1536, 8, generations=True)
    fused = FusedAttnRes(engine, AttnRes(3, ranks=8, tokens=8))
    program = build_fused_attnres(fused, target="sm_90a", mailbox_tokens=8)
    code = disassemble(program.cubin)[program.entry]
    wait = next(i for i, instruction in enumerate(code) if instruction.name == "ACQBULK")
    before = [c for c in code[:wait] if (c.name, "128" in c.opcode) in (("LDG", True), ("LDGSTS", True))]
    assert len(before) == 2 * engine.config.kblocks


@pytest.mark.exhaustive
@pytest.mark.parametrize("blocks", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 8, 17, 64])
@pytest.mark.parametrize("k", [768, 1536])
@pytest.mark.parametrize(
    ("engine", "target", "threads"),
    [
        (OprojProducer, "sm_90a", 448),
        (OprojProducer, "sm_100a", 448),
        (OprojUmma, "sm_100a", 128),
        (OprojWgmma, "sm_90a", 128),
    ],
)
def test_no_fused_build_spills(
    engine: type[OprojProducer], target: str, threads: int, k: int, batch: int, blocks: int
) -> None:
    """`build_program` refuses a build that spills, or whose shared memory is not what the object says."""
    fused = FusedAttnRes(
        engine.recommended(k, batch, generations=True),
        AttnRes(blocks, ranks=8, tokens=batch, threads=threads),
    )
    assert build_fused_attnres(fused, target=target, mailbox_tokens=batch).dynamic_shared_bytes <= 227 * 1024


# ---- errors ----


def fuse(threads: int = 448, tokens: int = 8, ranks: int = 8, **engine: Any) -> FusedAttnRes:
    settings: dict[str, Any] = {"staged_blocks": 4, "generations": True, **engine}
    return FusedAttnRes(
        OprojProducer(1536, **settings), AttnRes(3, ranks=ranks, tokens=tokens, threads=threads)
    )


def test_engines_that_cannot_be_fused() -> None:
    with pytest.raises(ValueError, match=r"only 512 threads of OprojProducer .* choose from \(448,\)"):
        fuse(threads=896)
    with pytest.raises(ValueError, match=r"only 128 threads of OprojWgmma .* choose from \(128,\)"):
        FusedAttnRes(OprojWgmma(1536, generations=True), AttnRes(3, ranks=8, tokens=8))
    with pytest.raises(ValueError, match="generations = False"):
        fuse(generations=False)
    with pytest.raises(ValueError, match="twoshot = True"):
        fuse(twoshot=True)
    with pytest.raises(ValueError, match=r"shared bytes of the engine.* a block has 232448: choose fewer"):
        fuse(tokens=8, staged_blocks=11)


@pytest.mark.parametrize(
    ("blocks", "ranks", "threads", "need", "choices"),
    [
        (1, 2, 128, 188, "224, 448"),  # 56 weights, 28 + 28 early, 14 polled chunks of 4 words, 20
        (0, 8, 128, 140, "224, 448"),  # 28 + 28, 16 chunks, 20
        (1, 8, 224, 148, "448,"),  # 32, 16 + 16, 16 chunks, 20
        (7, 2, 224, 164, "448,"),  # 32, 7 block rows of 16 words, 20
    ],
)
def test_threads_without_registers_are_refused(
    blocks: int, ranks: int, threads: int, need: int, choices: str
) -> None:
    """ptxas spills 240, 8, 56 and 208 bytes in these; those of ``test_threads_that_fit`` it does not."""
    message = (
        rf"threads = {threads}: .* of {blocks} blocks and {ranks} ranks, AttnRes needs {need} registers per thread, "
        rf"and the 512 threads of OprojProducer have 128; choose from \({choices}\)"
    )
    with pytest.raises(ValueError, match=message):
        FusedAttnRes(
            OprojProducer(128, staged_blocks=1, generations=True),
            AttnRes(blocks, ranks=ranks, tokens=2, threads=threads),
        )


def fits(blocks: int, ranks: int, threads: int) -> bool:
    return AttnResConfiguration(blocks, ranks, 2, threads=threads).register_need <= 128


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("blocks", "ranks", "threads"),
    [
        (blocks, ranks, threads)
        for threads in (128, 224, 448)
        for blocks in range(9)
        for ranks in (1, 2, 3, 8, 72)
        if fits(blocks, ranks, threads)
    ],
)
def test_threads_that_fit(blocks: int, ranks: int, threads: int, target: str) -> None:
    """`build_program` refuses a build that spills."""
    kernel = AttnRes(blocks, ranks=ranks, tokens=2, threads=threads)
    fused = FusedAttnRes(OprojProducer(128, staged_blocks=1, generations=True), kernel)
    build_fused_attnres(fused, target=target, mailbox_tokens=2)


@pytest.mark.parametrize("threads", THREAD_CHOICES)
def test_every_split_build_has_its_registers(threads: int) -> None:
    """Alone on its SM, every configuration of AttnRes fits (``test_attnres.py`` builds them)."""
    for blocks in range(9):
        config = AttnResConfiguration(blocks, 72, 2, threads=threads)
        assert config.register_need <= registers_per_thread(threads)


def test_two_shot_sums_one_slot() -> None:
    engine = OprojProducer(1536, staged_blocks=4, generations=True, twoshot=True)
    with pytest.raises(ValueError, match="ranks = 8: the second shot has summed the ranks; choose 1"):
        FusedTwoShotAttnRes(engine, SecondShot(8, 8), AttnRes(3, ranks=8, tokens=8))
    with pytest.raises(ValueError, match="built for 7 tokens, AttnRes for 8"):
        FusedTwoShotAttnRes(engine, SecondShot(8, 7), AttnRes(3, ranks=1, tokens=8))
