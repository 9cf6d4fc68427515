"""The UMMA engine's rules, its PTX against the contract, and its machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ring_engines import (
    DEFAULT,
    PROXY,
    TOGETHER,
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
from oproj_lib.kernels.umma_configuration import UmmaConfiguration
from oproj_lib.lessons.broken_umma import (
    ClearsTheTileEarly,
    FreesTooEarly,
    NeverFrees,
    NoCommit,
    NoProxyFence,
    WrongParity,
    WrongStride,
)
from oproj_lib.program import Program, build_producer, build_umma, source_hashes
from oproj_lib.sass import disassemble

BATCHES = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 32, 33, 48, 63, 64)


def build(
    k: int,
    batch: int,
    stages: int | None = None,
    transport: str = "multicast",
    kind: type[RingEngine] = OprojUmma,
    **options: Any,
) -> Program:
    return compiled(engine(kind, k, batch, stages, transport, **options), batch)


# Rules


@pytest.mark.parametrize(
    ("k", "batch", "budget", "expected"),
    [
        # n = M up to a multiple of 8; stage = 8192 + 128 n; stages = min(k // 64, budget // stage); columns
        (1536, 1, DEFAULT, (8, 9216, 20, 32)),
        (1536, 8, DEFAULT, (8, 9216, 20, 32)),
        (1536, 9, DEFAULT, (16, 10240, 18, 32)),
        (1536, 32, DEFAULT, (32, 12288, 15, 32)),
        (1536, 33, DEFAULT, (40, 13312, 14, 64)),
        (1536, 64, DEFAULT, (64, 16384, 11, 64)),
        (768, 8, DEFAULT, (8, 9216, 12, 32)),
        (768, 64, DEFAULT, (64, 16384, 11, 64)),
        (768, 64, 12 * 16384, (64, 16384, 12, 64)),
        (768, 65, DEFAULT, (72, 17408, 10, 128)),
        (768, 128, DEFAULT, (128, 24576, 7, 128)),
        (1536, 256, DEFAULT, (256, 40960, 4, 256)),
        (768, 1, 9216, (8, 9216, 1, 32)),
        (768, 1, 2 * 9216 - 1, (8, 9216, 1, 32)),
        (768, 1, 2 * 9216, (8, 9216, 2, 32)),
        (64, 1, DEFAULT, (8, 9216, 1, 32)),
    ],
)
def test_geometry(k: int, batch: int, budget: int, expected: tuple[int, int, int, int]) -> None:
    assert OprojUmma(k, budget=budget).geometry(batch) == expected


def test_shared_bytes_add_up() -> None:
    # 14 stages * 13312; barriers (2 * 14 + 1) * 8; the TMEM address 4
    assert OprojUmma(1536).plan(33).shared_bytes == 14 * 13312 + 29 * 8 + 4
    # One stage of 16384 bytes is smaller than the epilogue tile, 64 * 68 * 4: the tile counts.
    assert OprojUmma(768, budget=16384).plan(64).shared_bytes == 17408 + 3 * 8 + 4
    assert OprojUmma(768, budget=15360).plan(56).shared_bytes == 15360 + 3 * 8 + 4


@pytest.mark.parametrize("k", [768, 1536])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_budget_of_1_to_12_stages_is_valid(k: int, batch: int) -> None:
    for stages in range(1, 13):
        assert OprojUmma(k, budget=budget_for(stages, batch)).geometry(batch)[2] == stages


def test_valid_batches() -> None:
    assert OprojUmma(1536).valid_batches() == tuple(range(1, 257))
    assert OprojUmma(1536, budget=9216).valid_batches() == tuple(range(1, 9))
    assert OprojUmma(1536, budget=10240 - 1).valid_batches() == tuple(range(1, 9))
    assert OprojUmma(1536, budget=10240).valid_batches() == tuple(range(1, 17))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k = 0 is not a positive multiple of 64"),
        ({"k": 100}, "k = 100 is not a positive multiple of 64, a K block of the ring"),
        ({"budget": 9215}, r"budget = 9215 bytes holds no stage at batch 1: 8192 \+ 128 \* 8 = 9216 bytes; "),
        ({"budget": -1}, "budget = -1 bytes holds no stage"),
        (
            {"budget": 227 * 1024 + 9216},
            r"26 stages \* 9216 \+ 428 bytes of barriers = 240044 shared bytes, a block has 232448; choose "
            r"budget 9216 to 239615",
        ),
        ({"twoshot": True, "transport": "multicast"}, "twoshot = True with transport = 'multicast'"),
        ({"policy": "fast"}, r"policy = 'fast': choose from \('latent', 'plain'\)"),
        ({"transport": "smoke"}, "transport = 'smoke': choose 'multicast', 'unicast'"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OprojUmma(**{"k": 3072, **arguments})


def test_the_largest_budget_is_the_one_that_the_error_names() -> None:
    with pytest.raises(ValueError, match=r"choose budget 9216 to (\d+)") as error:
        OprojUmma(3072, budget=10**6)
    most = int(str(error.value).split(" to ")[-1])
    assert OprojUmma(3072, budget=most).plan(1).shared_bytes <= 227 * 1024
    with pytest.raises(ValueError, match="shared bytes, a block has 232448"):
        OprojUmma(3072, budget=most + 1)


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
        UmmaConfiguration(1536, budget).plan(batch)


def test_what_it_says_of_itself() -> None:
    assert OprojUmma.configurations(1536) == ()
    assert OprojUmma(1536).schedule(33) == (5, 5, 1)
    assert OprojUmma.recommended(768, 64, policy="plain").policy == "plain"
    assert OprojUmma(1536).settings() == {"budget": DEFAULT}
    with pytest.raises(ValueError, match=r"batch = 300"):
        OprojUmma.recommended(768, 300)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm_90a", "target = 'sm_90a' has no tcgen05 instructions and no tensor memory: UMMA needs sm_100a"),
        ("sm_80", r"target = 'sm_80': choose from \('sm_90a', 'sm_100a'\)"),
    ],
)
def test_targets_without_tcgen05_are_refused(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_umma(OprojUmma(768), target=target, batch=8, mailbox_slots=1, mailbox_tokens=8)


def test_compiling_it_by_hand_for_hopper_is_refused_too() -> None:
    umma = OprojUmma(768)
    with pytest.raises(ValueError, match="target = 'sm_90a' has no tcgen05"):
        programs._compile(umma, "sm_90a", programs.engine_parameters(umma, 8, (1, 8, 7168)))


def test_engines_are_not_mixed_up() -> None:
    common: dict[str, Any] = {"target": "sm_100a", "batch": 8, "mailbox_slots": 1, "mailbox_tokens": 8}
    with pytest.raises(ValueError, match=r"OprojUmma is no mma\.sync producer: build it with build_umma"):
        build_producer(OprojUmma(768), **common)
    with pytest.raises(ValueError, match="OprojProducer is no UMMA engine: build it with build_producer"):
        build_umma(OprojProducer(768, staged_blocks=0), **common)  # type: ignore[arg-type]


def test_the_cache_key_covers_the_engine() -> None:
    hashed = source_hashes()
    for file in ("umma", "umma_primitives", "umma_configuration", "umma_lane"):
        assert f"kernels/{file}.py" in hashed
    for name in ("descriptors", "swizzle", "ring", "tmem"):
        assert f"layouts/{name}.py" in hashed


def test_a_program_says_how_to_launch_it() -> None:
    program = build(768, 9, 3)
    assert program.config["engine"] == "umma"
    assert program.config["budget"] == 3 * 10240
    assert program.block == (160, 1, 1) and program.grid == (112, 1, 1) and program.pdl
    assert program.dynamic_shared_bytes == 3 * 10240 + 7 * 8 + 4
    assert program.name == "umma_k768_m9_sm_100a" and program.entry.startswith("oproj_umma")
    assert [p.name for p in program.parameters] == ["x", "weight", "mailbox", "mc", "slot"]


# PTX against the contract


ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
PERMIT = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"
LOADED = "tcgen05.wait::ld.sync.aligned"


def three_blocks_in_two_stages() -> list[str]:
    """k = 192: block 2 reuses slot 0. Barriers: full 0, 8; empty 16, 24; accumulator 32. M = 8, one rank."""
    set_up = [
        "elect.sync",
        "init +0 256", "init +16 1", "init +8 256", "init +24 1", "init +32 1",
        "fence.mbarrier_init.release.cluster", ALLOC, PERMIT, "bar.sync 0",
    ]  # fmt: skip
    multiply = [
        "ld.shared.b32", "elect.sync",
        "wait +0 0", TOGETHER, PROXY, AFTER, "mma first", "mma", "mma", "mma", "commit +16",
        "wait +8 0", TOGETHER, PROXY, AFTER, "mma", "mma", "mma", "mma",
        "wait +0 1", TOGETHER, PROXY, AFTER, "mma", "mma", "mma", "mma", "commit +32",
        "ld.shared.b32", "bar.sync 2, 160", AFTER, FREE,
    ]  # fmt: skip
    weight = ["copy"] * 4
    load = [
        *weight, "arrive +0", *weight, "arrive +8", *["prefetch 128"] * 4,
        "griddepcontrol.wait", "griddepcontrol.launch_dependents",
        "copy", "arrive +0", "copy", "arrive +8",
        "wait +16 0", PROXY, *weight, "arrive +0", "copy", "arrive +0",
    ]  # fmt: skip
    epilogue = [
        "wait +32 0", AFTER, PROXY, "ld.shared.b32",
        "tcgen05.ld.sync.aligned.32x32b.x8.b32", LOADED, *["st.shared.b32"] * 8,
        BEFORE, "bar.arrive 2, 160", "bar.sync 1, 128",
        *["ld.shared.v4.f32"] * 2, *["cvt.rn.bf16x2.f32"] * 4, "st.relaxed.sys.global.v4.b32",
    ]  # fmt: skip
    return [*set_up, *multiply, *load, *epilogue]


def test_three_blocks_in_two_stages_step_by_step() -> None:
    assert described(build(192, 8, 2, "unicast:1")) == three_blocks_in_two_stages()


@pytest.mark.parametrize(
    "kind", [NoProxyFence, WrongParity, NoCommit, FreesTooEarly, NeverFrees, ClearsTheTileEarly]
)
def test_the_steps_of_a_broken_kernel_differ(kind: type[OprojUmma]) -> None:
    assert described(build(192, 8, 2, "unicast:1", kind=kind)) != three_blocks_in_two_stages()


BUILDS = [
    (768, 1, 1, "unicast:1"),
    (768, 9, 3, "multicast"),
    (768, 64, 12, "multicast"),
    (1536, 33, 12, "unicast:2"),
    (1536, 64, None, "multicast"),
    (1536, 200, 2, "multicast"),
]


@pytest.mark.parametrize(("k", "batch", "stages", "transport"), BUILDS)
def test_counts(k: int, batch: int, stages: int | None, transport: str) -> None:
    program = build(k, batch, stages, transport)
    steps = described(program)
    blocks = k // 64
    stages = OprojUmma(k, budget=int(program.config["budget"])).geometry(batch)[2]
    refills = blocks - stages

    def count(prefix: str) -> int:
        return sum(step.startswith(prefix) for step in steps)

    assert count("mma") == 4 * blocks and count("mma first") == 1
    assert steps.index("mma first") == min(i for i, s in enumerate(steps) if s.startswith("mma"))
    assert count("commit") == refills + 1
    assert count("arrive") == 2 * blocks
    assert count("init") == 2 * stages + 1
    assert count("init +") == sum(s.endswith((" 256", " 1")) for s in steps if s.startswith("init"))
    assert count("wait +") == blocks + refills + 1
    assert count(PROXY) == blocks + refills + 1
    assert count("copy") == blocks * (4 + -(-batch // 16))
    assert count("prefetch") == (4 if refills else 0)
    wait = steps.index("griddepcontrol.wait")
    assert steps[wait + 1] == "griddepcontrol.launch_dependents"
    assert steps[:wait].count("copy") == 4 * stages  # W only: x does not exist yet
    assert sum(s.startswith("arrive") for s in steps[:wait]) == stages
    assert steps.count(FREE) == steps.count(ALLOC) == steps.count(PERMIT) == 1
    # Tokens from M on are neither stored to the tile nor published.
    assert count("st.shared.b32") == batch
    sends = "multimem" if transport == "multicast" else "st.relaxed"
    ranks = int(transport.partition(":")[2] or 1)
    assert count(sends) == -(-batch // 16) * ranks
    assert count(LOADED) == -(-batch // 64)


@pytest.mark.parametrize("stages", [1, 2, 5, 12])
def test_parities_in_the_ptx(stages: int) -> None:
    """K = 768, 12 blocks: every wait against a list made from rounds, without the kernel's functions."""
    steps = [s for s in described(build(768, 8, stages, "unicast:1")) if s.startswith("wait")]
    assert steps == [*slot_waits(stages), f"wait +{16 * stages} 0"]


def added_to_the_address(program: Program) -> set[int]:
    """The constants that are added to the ring's address >> 4, less the descriptor of the contract."""
    words = re.findall(r"add\.s64\s+%rd\d+, %rd\d+, (46117\d+);", program.ptx)
    return {int(word) - 0x4000_4040_0001_0000 for word in words}


def test_descriptors_in_the_ptx() -> None:
    program = build(192, 8, 2, "unicast:1")
    assert added_to_the_address(program) == tile_offsets()
    assert added_to_the_address(build(192, 8, 2, "unicast:1", kind=WrongStride)) != tile_offsets()
    assert set(re.findall(r"tcgen05\.mma.*?(0x[0-9a-f]+), %p", program.ptx)) == {"0x4020490"}


def test_policy_plain_leaves_negative_zeros() -> None:
    assert "selp.b32" in build(768, 9, 3).ptx
    assert "selp.b32" not in build(768, 9, 3, policy="plain").ptx


def test_instructions_carry_the_line_that_issues_them() -> None:
    """``.loc`` of an MMA and of a wait name umma.py, where the call stands."""
    for opcode, call in (("tcgen05.mma", "umma_f16("), ("mbarrier.try_wait", "barrier_wait(")):
        check_line(build(768, 9, 3), "umma", opcode, call)


# Machine code


def weight_copies_before_the_wait(program: Program) -> int:
    names = [instruction.name for instruction in disassemble(program.cubin)[program.entry]]
    return names[: names.index("ACQBULK")].count("LDGSTS")


def test_late_weights_are_seen() -> None:
    assert weight_copies_before_the_wait(build(192, 8, 2)) == 8
    assert weight_copies_before_the_wait(build(192, 8, 2, kind=late_weights(OprojUmma))) == 0


@pytest.mark.parametrize(("k", "batch", "stages", "transport"), BUILDS)
def test_sass(k: int, batch: int, stages: int | None, transport: str) -> None:
    """W copies and the prefetch stand above the PDL wait, nothing spills, one wait and one trigger."""
    program = build(k, batch, stages, transport)
    stages = OprojUmma(k, budget=int(program.config["budget"])).geometry(batch)[2]
    code = disassemble(program.cubin)[program.entry]
    names = [instruction.name for instruction in code]
    used = resources(program.cubin, program.entry)
    assert used.stack_bytes == 0 and not {"LDL", "STL"} & set(names)
    assert used.registers <= 255 and used.static_shared_bytes == 0
    assert names.count("ACQBULK") == names.count("PREEXIT") == 1
    wait = names.index("ACQBULK")
    assert weight_copies_before_the_wait(program) == 4 * stages
    assert names[:wait].count("UBLKPF") == names.count("UBLKPF") == (4 if k // 64 > stages else 0)
    assert names.count("UTCHMMA") == 4 * (k // 64)
