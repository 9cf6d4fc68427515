"""The wgmma engine's rules, its PTX against the contract, and its machine code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from ring_engines import (
    DEFAULT,
    PROXY,
    TOGETHER,
    WAIT,
    budget_for,
    check_line,
    compiled,
    described,
    engine,
    late_weights,
    slot_waits,
    tile_offsets,
)

from oproj_lib import program as programs
from oproj_lib.cubin import resources
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.kernels.wgmma_configuration import WgmmaConfiguration
from oproj_lib.layouts import wgmma as registers
from oproj_lib.lessons.broken_wgmma import (
    NoProxyFence,
    NoRegisterFence,
    OneWarpForAll,
    OverwritesTheRing,
    ReadsTooEarly,
    ReleasesTooMuch,
    ReleasesUnread,
    WrongParity,
    WrongStride,
)
from oproj_lib.program import Program, build_producer, build_wgmma, source_hashes
from oproj_lib.sass import disassemble


def build(
    k: int,
    batch: int,
    stages: int | None = None,
    transport: str = "multicast",
    kind: type[RingEngine] = OprojWgmma,
    **options: Any,
) -> Program:
    return compiled(engine(kind, k, batch, stages, transport, **options), batch)


# Rules


@pytest.mark.parametrize(
    ("k", "batch", "budget", "expected"),
    [
        # n = M up to a multiple of 8; stage = 8192 + 128 n; stages = min(k // 64, budget // stage); n / 2
        (1536, 1, DEFAULT, (8, 9216, 20, 4)),
        (1536, 9, DEFAULT, (16, 10240, 18, 8)),
        (1536, 33, DEFAULT, (40, 13312, 14, 20)),
        (1536, 64, DEFAULT, (64, 16384, 11, 32)),
        (768, 8, DEFAULT, (8, 9216, 12, 4)),
        (768, 256, DEFAULT, (256, 40960, 4, 128)),
        (768, 1, 2 * 9216 - 1, (8, 9216, 1, 4)),
    ],
)
def test_geometry(k: int, batch: int, budget: int, expected: tuple[int, int, int, int]) -> None:
    assert OprojWgmma(k, budget=budget).geometry(batch) == expected


def test_shared_bytes_add_up() -> None:
    assert OprojWgmma(1536).plan(33).shared_bytes == 14 * 13312 + 2 * 14 * 8
    # One stage of 16384 bytes is smaller than the epilogue tile, 64 * 68 * 4: the tile counts.
    assert OprojWgmma(768, budget=16384).plan(64).shared_bytes == 17408 + 2 * 8


def test_a_single_slot_leaves_no_group_in_flight() -> None:
    """Block 1 needs the slot that block 0 is read from: waiting for block 0 behind block 1 would hang."""
    assert [OprojWgmma(768, budget=budget_for(s, 8)).plan(8).in_flight for s in (1, 2, 12)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 100}, "k = 100 is not a positive multiple of 64, a K block of the ring"),
        ({"budget": 9215}, r"budget = 9215 bytes holds no stage at batch 1: 8192 \+ 128 \* 8 = 9216 bytes; "),
        (
            {"budget": 227 * 1024 + 9216},
            r"26 stages \* 9216 \+ 416 bytes of barriers = 240032 shared bytes, a block has 232448; choose "
            r"budget 9216 to 239615",
        ),
        ({"policy": "fast"}, r"policy = 'fast': choose from \('latent', 'plain'\)"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OprojWgmma(**{"k": 3072, **arguments})


@pytest.mark.parametrize(
    ("budget", "batch", "message"),
    [
        (DEFAULT, 0, "batch = 0: an MMA with M = 64 has N of at most 256; choose 1 to 256"),
        (DEFAULT, 257, "batch = 257: .* choose 1 to 256"),
        (9216, 9, r"8192 \+ 128 \* 16 = 10240 bytes; choose at least 10240, or a batch of at most 8"),
    ],
)
def test_what_does_not_fit_a_batch_is_refused(budget: int, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WgmmaConfiguration(1536, budget).plan(batch)


def test_targets_without_wgmma_are_refused() -> None:
    message = "target = 'sm_100a' has no wgmma instructions: OprojWgmma needs sm_90a"
    wgmma = OprojWgmma(768)
    with pytest.raises(ValueError, match=message):
        build_wgmma(wgmma, target="sm_100a", batch=8, mailbox_slots=1, mailbox_tokens=8)
    with pytest.raises(ValueError, match=message):
        programs._compile(wgmma, "sm_100a", programs.engine_parameters(wgmma, 8, (1, 8, 7168)))


def test_engines_are_not_mixed_up() -> None:
    common: dict[str, Any] = {"target": "sm_90a", "batch": 8, "mailbox_slots": 1, "mailbox_tokens": 8}
    with pytest.raises(ValueError, match=r"OprojWgmma is no mma\.sync producer"):
        build_producer(OprojWgmma(768), **common)
    for other in (OprojProducer(768, staged_blocks=0), OprojUmma(768)):
        with pytest.raises(ValueError, match=f"{type(other).__name__} is no wgmma engine"):
            build_wgmma(other, **common)  # type: ignore[arg-type]


def test_the_cache_key_covers_the_engine() -> None:
    hashed = source_hashes()
    for name in ("kernels/wgmma", "kernels/wgmma_primitives", "kernels/wgmma_configuration", "layouts/wgmma"):
        assert f"{name}.py" in hashed
    for name in ("engine", "primitives", "configuration", "lane"):
        assert f"kernels/ring_{name}.py" in hashed


def test_a_program_says_how_to_launch_it() -> None:
    program = build(768, 9, 3)
    assert program.config["engine"] == "wgmma"
    assert program.block == (256, 1, 1) and program.grid == (112, 1, 1) and program.pdl
    assert program.dynamic_shared_bytes == 3 * 10240 + 2 * 3 * 8
    assert program.name == "wgmma_k768_m9_sm_90a" and program.entry.startswith("oproj_wgmma")


# Where D is


@pytest.mark.parametrize("n", [8, 24, 256])
def test_registers_cover_d_once(n: int) -> None:
    """Against the manual's formulas for D of m64nNk16, written out: row = 16 w + lane / 4 + 8 ((i / 2) mod 2),
    column = 8 (i / 4) + 2 (lane mod 4) + i mod 2."""
    thread = np.arange(128)[:, None]
    i = np.arange(n // 2)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
    assert registers.register_count(n) == n // 2
    rows = registers.thread_row(thread) + np.array([[registers.register_row(j) for j in range(n // 2)]])
    columns = registers.thread_column(thread) + np.array(
        [[registers.register_column(j) for j in range(n // 2)]]
    )
    np.testing.assert_array_equal(rows, row)
    np.testing.assert_array_equal(columns, column)
    assert sorted((rows * n + columns).reshape(-1)) == list(range(64 * n))


# PTX against the contract


# k = 192: block 2 reuses slot 0. Barriers: full 0, 8; empty 16, 24. M = 8, one rank.
FULL = [TOGETHER, PROXY]
SET_UP = ["elect.sync", "init +0 256", "init +16 4", "init +8 256", "init +24 4", "bar.sync 0"]
MULTIPLY = [
    WAIT, "elect.sync",
    "wait +0 0", *FULL, "wgmma.fence", "mma first", "mma", "mma", "mma", "wgmma.commit_group",
    "wait +8 0", *FULL, "mma", "mma", "mma", "mma", "wgmma.commit_group",
    "wgmma.wait_group 1", "release +16",
    "wait +0 1", *FULL, "mma", "mma", "mma", "mma", "wgmma.commit_group",
    "wgmma.wait_group 0",
]  # fmt: skip
EPILOGUE = [
    "bar.sync 1, 128", *["st.shared.f32"] * 4, "bar.sync 1, 128",
    *["ld.shared.v4.f32"] * 2, *["cvt.rn.bf16x2.f32"] * 4, "st.relaxed.sys.global.v4.b32",
]  # fmt: skip
LOAD = [
    *["copy"] * 4, "arrive +0", *["copy"] * 4, "arrive +8", *["prefetch 128"] * 4,
    WAIT, "griddepcontrol.launch_dependents",
    "copy", "arrive +0", "copy", "arrive +8",
    "wait +16 0", *["copy"] * 4, "arrive +0", "copy", "arrive +0",
]  # fmt: skip
STEPS = [*SET_UP, *MULTIPLY, *EPILOGUE, *LOAD]


def test_three_blocks_in_two_stages_step_by_step() -> None:
    assert described(build(192, 8, 2, "unicast:1")) == STEPS


@pytest.mark.parametrize(
    "kind",
    [
        NoProxyFence, WrongParity, NoRegisterFence, ReleasesUnread, ReleasesTooMuch, OneWarpForAll,
        ReadsTooEarly, OverwritesTheRing,
    ],
)  # fmt: skip
def test_the_steps_of_a_broken_kernel_differ(kind: type[OprojWgmma]) -> None:
    assert described(build(192, 8, 2, "unicast:1", kind=kind)) != STEPS


BUILDS = [
    (768, 1, 1, "unicast:1"),
    (768, 64, 12, "multicast"),
    (1536, 33, 12, "unicast:2"),
    (384, 200, 3, "multicast"),
]


@pytest.mark.parametrize(("k", "batch", "stages", "transport"), BUILDS)
def test_counts(k: int, batch: int, stages: int, transport: str) -> None:
    program = build(k, batch, stages, transport)
    steps = described(program)
    blocks = k // 64
    refills = blocks - stages
    n = -(-batch // 8) * 8

    def count(prefix: str) -> int:
        return sum(step.startswith(prefix) for step in steps)

    assert count("mma") == 4 * blocks and count("mma first") == 1 and count("wgmma.fence") == 1
    assert steps.index("mma first") == min(i for i, s in enumerate(steps) if s.startswith("mma"))
    assert count("wgmma.commit_group") == blocks
    assert count("release") == refills
    assert [s for s in steps if s.startswith("wgmma.wait_group")] == [
        *[f"wgmma.wait_group {min(1, stages - 1)}"] * refills, "wgmma.wait_group 0"
    ]  # fmt: skip
    assert count("arrive") == 2 * blocks
    assert count("init") == 2 * stages
    assert count("wait +") == blocks + refills
    assert count(PROXY) == blocks  # none behind the wait for an empty slot: wait_group implies it
    assert count("copy") == blocks * (4 + -(-batch // 16))
    assert count("prefetch") == (4 if refills else 0)
    loaders = steps.index("copy")
    wait = steps.index(WAIT, loaders)
    assert steps[wait + 1] == "griddepcontrol.launch_dependents" and count(WAIT) == 2
    assert steps[loaders:wait].count("copy") == 4 * stages  # W only: x does not exist yet
    assert count("st.shared.f32") == n // 2
    sends = "multimem" if transport == "multicast" else "st.relaxed"
    ranks = int(transport.partition(":")[2] or 1)
    assert count(sends) == -(-batch // 16) * ranks
    # One accumulator: every wgmma names the same registers.
    accumulators = set(re.findall(r"wgmma\.mma_async\S* \{([^}]*)\}", program.ptx))
    assert len(accumulators) == 1 and accumulators.pop().count("%") == n // 2
    assert f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16" in program.ptx


@pytest.mark.parametrize("stages", [1, 2, 5, 12])
def test_parities_in_the_ptx(stages: int) -> None:
    """K = 768, 12 blocks: every wait against a list made from rounds, without the kernel's functions."""
    steps = [s for s in described(build(768, 8, stages, "unicast:1")) if s.startswith("wait")]
    assert steps == slot_waits(stages)


def added_to_the_address(program: Program) -> set[int]:
    """The constants that are added to the ring's address >> 4, less the descriptor of a K-major tile with the
    128-byte swizzle: stride 1024 >> 4 in bits 32.., leading 16 >> 4 in bits 16.., swizzle 1 in bits 62.."""
    words = re.findall(r"add\.s64\s+%rd\d+, %rd\d+, (46116\d+);", program.ptx)
    return {int(word) - 0x4000_0040_0001_0000 for word in words}


def test_descriptors_in_the_ptx() -> None:
    program = build(192, 8, 2, "unicast:1")
    assert added_to_the_address(program) == tile_offsets()
    assert added_to_the_address(build(192, 8, 2, "unicast:1", kind=WrongStride)) != tile_offsets()


def test_policy_plain_leaves_negative_zeros() -> None:
    assert "selp.b32" in build(768, 9, 3).ptx
    assert "selp.b32" not in build(768, 9, 3, policy="plain").ptx


def test_instructions_carry_the_line_that_issues_them() -> None:
    """``.loc`` of a wgmma names wgmma.py, where the call stands."""
    for opcode, call in (("wgmma.mma_async", "multiply_bf16("), ("mbarrier.try_wait", "barrier_wait(")):
        check_line(build(768, 9, 3), "wgmma", opcode, call)


# Machine code


def loader_code(program: Program) -> list[str]:
    """Names of the loaders' instructions from the first copy to the PDL wait. (The multipliers have one too.)"""
    names = [instruction.name for instruction in disassemble(program.cubin)[program.entry]]
    copies = names.index("LDGSTS")
    return names[copies : names.index("ACQBULK", copies)]


def test_late_weights_are_seen() -> None:
    assert loader_code(build(192, 8, 2)).count("LDGSTS") == 8
    late = build(192, 8, 2, kind=late_weights(OprojWgmma))
    names = [instruction.name for instruction in disassemble(late.cubin)[late.entry]]
    assert names.count("ACQBULK") == 3 and names[: names.index("LDGSTS")].count("ACQBULK") == 2


@pytest.mark.parametrize(("k", "batch", "stages", "transport"), BUILDS)
def test_sass(k: int, batch: int, stages: int, transport: str) -> None:
    """W copies and the prefetch stand above the loaders' PDL wait, nothing spills, and ptxas left the wgmmas
    asynchronous: a group ends with its last one (gsb0), and there is no wait but those of the PTX."""
    program = build(k, batch, stages, transport)
    code = disassemble(program.cubin)[program.entry]
    names = [instruction.name for instruction in code]
    used = resources(program.cubin, program.entry)
    assert used.stack_bytes == 0 and not {"LDL", "STL"} & set(names)
    assert used.registers <= 255 and used.static_shared_bytes == 0
    assert names.count("ACQBULK") == 2 and names.count("PREEXIT") == 1
    before = loader_code(program)
    refills = k // 64 - stages
    assert before.count("LDGSTS") == 4 * stages
    assert before.count("UBLKPF") == names.count("UBLKPF") == (4 if refills else 0)
    products = [instruction for instruction in code if instruction.name == "HGMMA"]
    n = -(-batch // 8) * 8
    assert len(products) == 4 * (k // 64)
    assert {product.opcode for product in products} == {f"HGMMA.64x{n}x16.F32.BF16"}
    assert [("gsb0" in product.operands) for product in products] == [False, False, False, True] * (k // 64)
    assert sum(instruction.opcode.startswith("WARPGROUP.DEPBAR") for instruction in code) == refills + 1
