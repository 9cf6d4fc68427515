"""The producer's rules, its PTX against the contract, and its results on the virtual GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import ml_dtypes
import numpy as np
import pytest
import torch
from cutlass import Int32, Int64

from oproj_lib import vgpu
from oproj_lib.kernels import configuration
from oproj_lib.kernels.configuration import Configuration, XPath
from oproj_lib.kernels.inputs import check_inputs
from oproj_lib.kernels.primitives import Floats4
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.transport import MulticastTransport, UnicastTransport, as_transport
from oproj_lib.problem import TOLERANCE, N, Problem, error_measures, reference
from oproj_lib.program import Program, build_producer

BATCHES = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 32, 33, 48, 63, 64)

# k, staged_blocks, rows, group_tiles, batch, target, transport: every x path, rows, ragged and full tiles,
# one and
# several groups, short last groups, both targets, both transports.
BUILDS = [
    (768, 0, 1, 0, 8, "sm_90a", "multicast"),
    (768, 0, 1, 0, 63, "sm_100a", "unicast:2"),
    (768, 6, 1, 0, 1, "sm_90a", "unicast:1"),
    (768, 2, 2, 0, 9, "sm_100a", "multicast"),
    (768, 2, 2, 3, 48, "sm_90a", "multicast"),
    (768, 1, 1, 8, 64, "sm_100a", "multicast"),
    (1536, 4, 1, 0, 5, "sm_90a", "multicast"),
    (1536, 1, 1, 0, 16, "sm_100a", "unicast:2"),
    (1536, 2, 2, 0, 7, "sm_90a", "multicast"),
    (1536, 2, 4, 0, 1, "sm_100a", "multicast"),
    (1536, 0, 1, 1, 8, "sm_90a", "multicast"),
    (1536, 4, 1, 2, 64, "sm_90a", "unicast:2"),
    (1536, 3, 1, 3, 33, "sm_100a", "multicast"),
    (1536, 2, 4, 1, 13, "sm_90a", "multicast"),
    (1536, 12, 1, 1, 3, "sm_100a", "unicast:2"),
]


def build(
    k: int,
    staged_blocks: int,
    rows: int,
    group_tiles: int,
    batch: int,
    target: str = "sm_90a",
    transport: str = "multicast",
    *,
    policy: str = "latent",
    tokens: int | None = None,
    kind: type[OprojProducer] = OprojProducer,
) -> Program:
    producer = kind(
        k, staged_blocks=staged_blocks, rows=rows, group_tiles=group_tiles, transport=transport, policy=policy
    )
    cache = None if kind is not OprojProducer else "default"
    return build_producer(
        producer, target=target, batch=batch, mailbox_slots=2, mailbox_tokens=tokens or batch, cache=cache
    )


# Rules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"k": 1000},
            r"k = 1000 is not a positive multiple of 32 \* parts = 32 \* 4 = 128 .*rows that fit .*: none",
        ),
        ({"k": 0}, "k = 0 is not a positive multiple"),
        ({"k": 768, "rows": 4}, r"32 \* 16 = 512 .*rows that fit this k: 1, 2"),
        ({"k": 1536, "rows": 3}, r"rows = 3: .* choose from \(1, 2, 4\)"),
        (
            {"k": 1536, "staged_blocks": -1},
            r"staged_blocks = -1: .* 1536 / 128 = 12 K blocks; choose 0 to 12",
        ),
        ({"k": 1536, "staged_blocks": 13}, "staged_blocks = 13: .* choose 0 to 12"),
        ({"k": 1536, "staged_blocks": 7, "rows": 2}, "1536 / 256 = 6 K blocks; choose 0 to 6"),
        ({"k": 1536, "group_tiles": 9}, r"9 tiles \* 8 tokens \* 8 chunks = 576 .*choose 0 .* to 8"),
        ({"k": 1536, "group_tiles": -1}, "group_tiles = -1"),
        ({"k": 1536}, "has no x path: choose k = 768 .* staged_blocks 1 to 12 .* group_tiles 1 to 8"),
        (
            {"k": 2048, "group_tiles": 1},
            r"160 registers per thread \(128 of weights\), 512 threads have 65536 / 512 = 128",
        ),
        (
            {"k": 1536, "staged_blocks": 4, "twoshot": True, "transport": "multicast"},
            "twoshot = True with transport = 'multicast': .* leave transport out",
        ),
        (
            {"k": 1536, "staged_blocks": 4, "transport": "twoshot"},
            "twoshot = False with transport = 'twoshot'",
        ),
        (
            {"k": 1536, "staged_blocks": 4, "policy": "fast"},
            r"policy = 'fast': choose from \('latent', 'plain'\)",
        ),
        (
            {"k": 1536, "staged_blocks": 4, "transport": "smoke"},
            "transport = 'smoke': choose 'multicast', 'unicast'",
        ),
        ({"k": 1536, "staged_blocks": 4, "transport": "unicast:0"}, "unicast to 0 ranks: choose 1 to 72"),
        ({"k": 1536, "staged_blocks": 4, "transport": 7}, "transport = 7: choose"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OprojProducer(**{"staged_blocks": 0, **arguments})


@pytest.mark.parametrize(
    ("settings", "batch", "message"),
    [
        ((1536, 4, 1, 0), 0, r"batch = 0: .* choose 1 to 64"),
        ((1536, 4, 1, 1), 65, r"8 \* batch = 520 threads publish, a CTA has 512; choose 1 to 64"),
        (
            (1536, 4, 1, 0),
            64,
            r"x 200704 \+ partial sums 81920 = 348160 shared bytes, .* 232448; it fits batches 1 to 36",
        ),
        ((1536, 0, 1, 1), 9, r"136 registers per thread \(96 of weights\).*it fits batches 1 to 8"),
    ],
)
def test_what_does_not_fit_a_batch_is_refused(
    settings: tuple[int, int, int, int], batch: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration(*settings).plan(batch)


def test_boundary_batches_fit() -> None:
    assert Configuration(1536, 4).valid_batches() == tuple(range(1, 37))
    assert Configuration(768, 0).valid_batches() == tuple(range(1, 65))
    assert Configuration(1536, 0, 1, 1).valid_batches() == tuple(range(1, 9))


def test_paths() -> None:
    assert Configuration(768, 0).path is XPath.REGISTERS
    assert Configuration(768, 3).path is XPath.REGISTERS
    assert Configuration(1536, 1).path is XPath.SHARED
    assert Configuration(1536, 0, 1, 1).path is XPath.RING
    assert Configuration(768, 0, 1, 8).path is XPath.RING


def test_plan_adds_up() -> None:
    plan = OprojProducer(1536, staged_blocks=4).plan(8)
    # 16 warps x 4 blocks x 2 x 32 lanes x 16 B; 8 rows x 196 chunks x 16 B; 4 row tiles x 4 parts x 8 x 20 x
    # 4 B
    assert (plan.staged_bytes, plan.x_bytes, plan.partial_bytes) == (65536, 25088, 10240)
    assert plan.shared_bytes == 100864
    ring = OprojProducer(1536, staged_blocks=4, group_tiles=2).plan(64)
    assert (ring.tiles, ring.tiles_per_group, ring.groups) == (8, 2, 4)
    assert ring.x_bytes == 2 * 16 * 196 * 16


def test_configurations_are_the_ones_that_construct() -> None:
    found = OprojProducer.configurations(768)
    # rows 1: 7 staged counts x 9 group sizes, rows 2: 4 x 9. All have a path at K = 768.
    assert len(found) == 7 * 9 + 4 * 9
    found = OprojProducer.configurations(1536)
    # 13, 7 and 4 staged counts x 9, less the three without an x path (staged 0, group 0), less what leaves no
    # shared memory for a single token: 192 KiB staged with rows 2 in a ring (8) and with rows 4 (9).
    assert len(found) == (13 + 7 + 4) * 9 - 3 - 8 - 9
    assert (0, 1, 0) not in found and (0, 1, 1) in found
    for staged_blocks, rows, group_tiles in found:
        assert Configuration(1536, staged_blocks, rows, group_tiles).valid_batches()


@pytest.mark.parametrize("k", [768, 1536])
@pytest.mark.parametrize("batch", range(1, 65))
def test_there_is_a_recommendation_for_every_batch(k: int, batch: int) -> None:
    OprojProducer.recommended(k, batch).plan(batch)


def test_recommendations() -> None:
    assert OprojProducer.recommended(768, 64).settings() == {"staged_blocks": 0, "rows": 1, "group_tiles": 0}
    assert OprojProducer.recommended(1536, 8).settings() == {"staged_blocks": 4, "rows": 1, "group_tiles": 0}
    assert OprojProducer.recommended(1536, 64).settings()["group_tiles"] > 0
    assert OprojProducer.recommended(1536, 8, policy="plain").policy == "plain"
    with pytest.raises(
        ValueError, match=r"no configuration of k = 1536 takes batch = 65: choose batch 1 to 64"
    ):
        configuration.recommended(1536, 65)


def test_transport_names() -> None:
    assert as_transport("multicast") == MulticastTransport()
    assert as_transport("unicast") == UnicastTransport(1)
    assert as_transport("unicast:8") == UnicastTransport(8)
    assert as_transport(UnicastTransport(8)).name == "unicast:8"


# Inputs


def arrays(batch: int = 8, k: int = 1536) -> dict[str, Any]:
    bf16 = ml_dtypes.bfloat16
    return {
        "x": np.zeros((batch, k), bf16),
        "weight": np.zeros((N, k), bf16),
        "mailbox": np.zeros((2, batch, N), bf16),
    }


def test_good_inputs_pass() -> None:
    check_inputs(**arrays())
    check_inputs(**arrays(batch=1))
    tensors = [torch.zeros(array.shape, dtype=torch.bfloat16) for array in arrays().values()]
    check_inputs(*tensors)
    assert OprojProducer(1536, staged_blocks=4).check(**arrays()).shared_bytes == 100864


def misaligned(shape: tuple[int, ...]) -> np.ndarray:
    flat = np.zeros(int(np.prod(shape)) + 16, ml_dtypes.bfloat16)
    start = (-flat.ctypes.data % 16) // 2 + 1
    return flat[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.zeros((8, 1536), np.float32), "x has dtype float32: it must be bfloat16"),
        ("x", torch.zeros(8, 1536), "x has dtype float32"),
        (
            "x",
            np.zeros((8, 3072), ml_dtypes.bfloat16)[:, ::2],
            r"x of shape \(8, 1536\) has strides \(3072, 2\)",
        ),
        ("x", np.zeros((16, 1536), ml_dtypes.bfloat16)[::2], r"strides \(3072, 1\).*copy it first"),
        (
            "weight",
            np.zeros((1536, N), ml_dtypes.bfloat16).T,
            r"weight of shape \(7168, 1536\) has strides \(1, 7168\)",
        ),
        ("weight", torch.zeros(1536, N, dtype=torch.bfloat16).T, r"weight .* has strides \(1, 7168\)"),
        ("x", misaligned((8, 1536)), "x starts at address .*2 bytes past a multiple of 16"),
        (
            "weight",
            np.zeros((N - 1, 1536), ml_dtypes.bfloat16),
            "weight has 7167 rows, it must have N = 7168",
        ),
        ("weight", np.zeros((N, 768), ml_dtypes.bfloat16), "x has K = 1536 columns and weight 768"),
        ("x", np.zeros(1536, ml_dtypes.bfloat16), r"x has shape \(1536,\): it must have 2 dimensions"),
        ("x", np.zeros((0, 1536), ml_dtypes.bfloat16), "every extent must be at least 1"),
        ("mailbox", np.zeros((2, 8, 7000), ml_dtypes.bfloat16), "mailbox has 7000 columns"),
        ("mailbox", np.zeros((2, 7, N), ml_dtypes.bfloat16), "mailbox has 7 tokens per slot and x has M = 8"),
        ("x", [1, 2], "x is a list: it needs shape, dtype and strides"),
    ],
)
def test_bad_inputs_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_inputs(**{**arrays(), name: value})


def test_the_producer_refuses_another_k() -> None:
    with pytest.raises(ValueError, match="x has K = 768 columns, this producer is built for k = 1536"):
        OprojProducer(1536, staged_blocks=4).check(**arrays(k=768))


@pytest.mark.parametrize(
    ("slots", "tokens", "message"),
    [
        (0, 8, "mailbox_slots = 0"),
        (1, 7, "mailbox_tokens = 7 < batch = 8"),
        (6000, 64, r"= 2752512000 elements"),
    ],
)
def test_mailboxes_that_cannot_hold_the_batch_are_refused(slots: int, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_producer(
            OprojProducer(1536, staged_blocks=4),
            target="sm_90a",
            batch=8,
            mailbox_slots=slots,
            mailbox_tokens=tokens,
        )


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target = 'sm_80': choose from \('sm_90a', 'sm_100a'\)"):
        build_producer(
            OprojProducer(1536, staged_blocks=4), target="sm_80", batch=8, mailbox_slots=1, mailbox_tokens=8
        )


# PTX against the contract


@dataclass(frozen=True)
class Line:
    """One PTX instruction: opcode, registers in order of appearance, and the byte offset of its (last)
    address."""

    opcode: str
    registers: tuple[str, ...]
    offset: int


def instructions(ptx: str) -> list[Line]:
    """The instructions of a kernel's body; a line with several is split, predicates are dropped."""
    body = ptx[ptx.index("{", ptx.index(".reqntid")) :]
    found = []
    for statement in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        match = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)\s+(.*)|\s*([a-z][\w.]+)\s*$", statement)
        if match and not (match[1] or match[3]).startswith("."):
            operands = match[2] or ""
            offsets = re.findall(r"\+(\d+)\]", operands)
            found.append(
                Line(
                    match[1] or match[3],
                    tuple(re.findall(r"%r\w*\d+", operands)),
                    int(offsets[-1]) if offsets else 0,
                )
            )
    return found


def at(lines: list[Line], prefix: str) -> list[int]:
    return [number for number, line in enumerate(lines) if line.opcode.startswith(prefix)]


def contract_problems(program: Program) -> list[str]:
    """Everything in the PTX that is not as the contract orders it; empty when all is well."""
    fields = ("k", "staged_blocks", "rows", "group_tiles")
    config = Configuration(**{field: int(program.config[field]) for field in fields}, direct=False)
    plan = config.plan(int(program.config["batch"]))
    lines = instructions(program.ptx)
    problems = []
    waits, triggers = at(lines, "griddepcontrol.wait"), at(lines, "griddepcontrol.launch_dependents")
    weights, mmas = at(lines, "ld.global.L1::no_allocate.v4"), at(lines, "mma.sync")
    copies = at(lines, "cp.async.cg")
    wait = waits[0]
    if len(waits) != 1 or triggers != [wait + 1]:
        problems.append("one wait, and the trigger right after it")
    if len(weights) != 2 * config.register_blocks * config.rows or any(at_ > wait for at_ in weights):
        problems.append("register weights are loaded before the wait")
    staged = [copy for copy in copies if copy < wait]
    if len(staged) != 2 * config.staged_blocks * config.rows or any(
        copy > min(weights, default=wait) for copy in staged
    ):
        problems.append("staged weights are copied before the register loads")
    if config.staged_blocks and not any(
        max(staged) < c < min(weights, default=wait) for c in at(lines, "cp.async.commit")
    ):
        problems.append("staged weights are one committed group")
    if any(load < wait for load in at(lines, "ld.global.v4")):
        problems.append("x is read after the wait")
    if at(lines, "ld.global.nc") or at(lines, "ld.local") or at(lines, "st.local"):
        problems.append("no non-coherent loads, no local memory")
    if len(mmas) != 2 * config.kblocks * config.rows * plan.tiles:
        problems.append("two MMAs per K block, row tile and token tile")
    problems += chain_problems(config, plan, [lines[number] for number in mmas])
    problems += fragment_problems(config, lines, mmas)
    problems += part_problems(config, lines)
    return problems


def chain_problems(config: Configuration, plan: configuration.Plan, mmas: list[Line]) -> list[str]:
    """MMA number 2 j + h of a (token tile, row tile) adds to chain (2 j + h) % chains, each chain starting
    from zero."""
    groups = [plan.tiles_per_group] * plan.groups if config.group_tiles else [1] * plan.tiles
    groups[-1] = plan.tiles - sum(groups[:-1])
    order = [
        (group, tile, row, (2 * block + half) % config.chains)
        for group, tiles in enumerate(groups)
        for block in range(config.kblocks)
        for row in range(config.rows)
        for half in range(2)
        for tile in range(tiles)
    ]
    latest: dict[tuple[int, ...], tuple[str, ...]] = {}
    for place, mma in zip(order, mmas, strict=True):
        result, addend = mma.registers[:4], mma.registers[10:]
        if place in latest and addend != latest[place]:
            return [f"MMA of {place} does not add to the one before it in its chain"]
        if place not in latest and len(set(addend)) != 1:
            return [f"the first MMA of {place} does not start from zero"]
        latest[place] = result
    return []


def fragment_problems(config: Configuration, lines: list[Line], mmas: list[int]) -> list[str]:
    """A registers are (lo[2h], hi[2h], lo[2h+1], hi[2h+1]) of one block and row tile: lo and hi are 8 rows
    apart."""
    loaded: dict[str, tuple[int, int]] = {}
    for line in lines:
        if line.opcode.startswith("ld.global.L1::no_allocate"):
            loaded.update({register: (line.offset, word) for word, register in enumerate(line.registers[:4])})
    for number in mmas:
        a = [loaded.get(register) for register in lines[number].registers[4:8]]
        if None in a:
            continue  # staged: the virtual GPU's results cover these
        low, high, low2, high2 = [place for place in a if place]
        word = low[1]
        expected = [
            low,
            (low[0] + 16 * config.k, word),
            (low[0], word + 1),
            (low[0] + 16 * config.k, word + 1),
        ]
        if [low, high, low2, high2] != expected or word not in (0, 2):
            return [f"A registers {a}, expected {expected}"]
    return []


def part_problems(config: Configuration, lines: list[Line]) -> list[str]:
    """The first published value adds K parts 0, 1, .. in order: each add takes the running sum and the next
    part."""
    loads = [line for line in lines if line.opcode == "ld.shared.v4.f32"][: 2 * config.parts]
    parts = {register: line.offset // 640 for line in loads for register in line.registers[:4]}
    first = [register for line in loads if line.offset % 640 == 0 for register in line.registers[:1]]
    sums, seen = first[0], 0
    for line in lines:
        if line.opcode == "add.rn.f32" and sums in line.registers[1:]:
            if line.registers[1] != sums or parts.get(line.registers[2]) != seen + 1:
                return ["K parts are not added in order"]
            sums, seen = line.registers[0], seen + 1
    return [] if seen == config.parts - 1 else [f"{seen + 1} of {config.parts} K parts are added"]


@pytest.mark.parametrize("settings", BUILDS)
def test_ptx_is_what_the_contract_orders(settings: tuple[Any, ...]) -> None:
    program = build(*settings)
    assert contract_problems(program) == []
    assert program.pdl
    assert (program.grid, program.block) == ((112, 1, 1), (512, 1, 1))
    assert program.entry.startswith("oproj_producer")
    assert [p.name for p in program.parameters] == ["x", "weight", "mailbox", "mc", "slot"]
    assert ".reqntid 512, 1, 1" in program.ptx


class ReversedChains(OprojProducer):
    """Adds the chains one after the other."""

    def add_chains(self, chains: list[Floats4]) -> Floats4:
        return super().add_chains([super().add_chains(chains[:1]), *chains[1:]][::-1])


class SwappedHalves(OprojProducer):
    """Takes the lower rows for the upper ones."""

    def weight_fragment(self, *arguments: Any) -> Any:
        return super().weight_fragment(*arguments)[::-1]


class Plain(OprojProducer):
    """The same kernel, compiled anew: tests' classes do not use the cache."""


class LateWeights(OprojProducer):
    """Loads the weights after the wait."""

    def load_weight(self, weight: Any, shared: Any) -> Any:
        return lambda: super(LateWeights, self).load_weight(weight, shared)

    def compute_ungrouped(self, lane: Any, batch: int, weights: Any, *rest: Any) -> None:
        super().compute_ungrouped(lane, batch, weights(), *rest)


def test_the_contract_check_finds_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contract_problems(build(768, 0, 1, 0, 8)) == []
    assert any("A registers" in p for p in contract_problems(build(768, 0, 1, 0, 8, kind=SwappedHalves)))
    late = contract_problems(build(768, 0, 1, 0, 8, kind=LateWeights))
    assert "register weights are loaded before the wait" in late
    ptx = build(768, 0, 1, 0, 8).ptx
    assert len(instructions(ptx)) > 100
    monkeypatch.setattr(
        "oproj_lib.layouts.fragments.chain_of", lambda block, half, chains: (block + half) % chains
    )
    assert any("MMA of (0, 0, 0, 2)" in p for p in contract_problems(build(768, 0, 1, 0, 8, kind=Plain)))


def test_source_lines_name_the_kernel() -> None:
    """Memory instructions and MMAs carry the line of their caller in producer.py, not of the primitive."""
    program = build(1536, 4, 1, 0, 5)
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', program.ptx))
    assert all(name.startswith("oproj_lib/") for name in files.values())
    current = ""
    for text in program.ptx.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", text)
        if location:
            current = files[location[1]]
        if re.match(
            r"\s*(mma\.sync|multimem\.st|ld\.global|cp\.async\.cg|st\.shared|ld\.shared|griddepcontrol)", text
        ):
            assert current == "oproj_lib/kernels/producer.py", text


# Results on the virtual GPU


def run(
    program: Program, x: np.ndarray, weight: np.ndarray, *, ranks: int = 2, slot: int = 1, exact: bool = False
) -> list[np.ndarray]:
    """Launch on rank 0; the mailbox of every rank, armed with -0.0 and checked for stray writes."""
    gpu = vgpu.VirtualGPU(ranks)
    inputs = [gpu.upload(x, "x"), gpu.upload(weight, "weight")]
    tokens = int(program.config["mailbox_tokens"])
    mailboxes = [
        gpu.upload(np.full((2, tokens, N), -0.0, ml_dtypes.bfloat16), f"mailbox {rank}", rank)
        for rank in range(ranks)
    ]
    if program.config["transport"] == "multicast":
        mc: Any = gpu.multicast(mailboxes)
    else:
        mc = gpu.upload(np.array([mailbox.address for mailbox in mailboxes], np.int64), "table")
    report = gpu.launch(
        vgpu.load(program.ptx),
        grid=program.grid,
        block=program.block,
        args=[*inputs, mailboxes[0], mc, slot],
        dynamic_shared_bytes=program.dynamic_shared_bytes,
        exact=exact,
        predecessor_writes=(inputs[0],),
    )
    report.raise_for_findings()
    return [mailbox.array.view(np.uint16) for mailbox in mailboxes]


def published(program: Program, boxes: Sequence[np.ndarray], batch: int, slot: int = 1) -> np.ndarray:
    """The published bits; fails when ranks differ or anything else was written."""
    for box in boxes:
        assert np.array_equal(box, boxes[0])
        stray = box.copy()
        stray[slot, :batch] = 0x8000
        assert (stray == 0x8000).all(), "written outside the slot's tokens"
    return boxes[0][slot, :batch]


@pytest.mark.parametrize("settings", BUILDS)
def test_results(settings: tuple[Any, ...]) -> None:
    k, *_, batch, _, transport = settings
    ranks = 2 if transport == "multicast" else int(transport.split(":")[1])
    x, weight = Problem(12288 // k, batch).inputs(seed=batch)
    program = build(*settings, tokens=batch + 2)
    bits = published(program, run(program, x, weight, ranks=ranks), batch)
    measures = error_measures(bits.view(ml_dtypes.bfloat16), reference(x, weight))
    assert measures.relative_frobenius < TOLERANCE
    assert not (bits == 0x8000).any()  # everything was written: the mailbox was armed


def test_the_result_check_fails_on_a_wrong_kernel() -> None:
    x, weight = Problem(16, 8).inputs(seed=1)
    program = build(768, 0, 1, 0, 8, kind=SwappedHalves)
    bits = published(program, run(program, x, weight), 8)
    assert error_measures(bits.view(ml_dtypes.bfloat16), reference(x, weight)).relative_frobenius > 1


@pytest.mark.parametrize("settings", [(768, 0, 1, 0), (768, 2, 1, 2), (1536, 4, 1, 0), (1536, 4, 1, 1)])
def test_a_token_does_not_depend_on_the_batch(settings: tuple[int, int, int, int]) -> None:
    x, weight = Problem(12288 // settings[0], 17).inputs(seed=5)
    bits = {}
    for batch in (3, 9, 17):
        program = build(*settings, batch)
        bits[batch] = published(
            program, run(program, np.ascontiguousarray(x[:batch]), weight, exact=True), batch
        )
    assert np.array_equal(bits[3], bits[17][:3])
    assert np.array_equal(bits[9], bits[17][:9])


def test_transports_and_staging_publish_the_same_bits() -> None:
    """Where weights wait and how chunks travel changes no arithmetic; neither do slot and capacity."""
    x, weight = Problem(8, 5).inputs(seed=2)
    first = build(1536, 4, 1, 0, 5)
    expected = published(first, run(first, x, weight, exact=True), 5)
    for program, slot in (
        (build(1536, 4, 1, 0, 5, "sm_100a", "unicast:2"), 1),
        (build(1536, 9, 1, 0, 5), 1),
        (build(1536, 4, 1, 0, 5, tokens=64), 0),
    ):
        boxes = run(program, x, weight, exact=True, slot=slot)
        assert np.array_equal(published(program, boxes, 5, slot), expected)


def test_policies_differ_only_in_the_sign_of_zero() -> None:
    x, weight = Problem(16, 5).inputs(seed=3, kind="rounds_to_negative_zero")
    plain = build(768, 1, 1, 0, 5, policy="plain")
    latent = build(768, 1, 1, 0, 5, policy="latent")
    plain_bits = published(plain, run(plain, x, weight, exact=True), 5)
    latent_bits = published(latent, run(latent, x, weight, exact=True), 5)
    assert (plain_bits == 0x8000).any()
    assert not (latent_bits == 0x8000).any()
    assert np.array_equal(np.where(plain_bits == 0x8000, 0, plain_bits), latent_bits)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_nan_and_inf_pass_through(kind: str) -> None:
    x, weight = Problem(16, 3).inputs(seed=4, kind=kind)
    program = build(768, 0, 1, 0, 3)
    values = published(program, run(program, x, weight), 3).view(ml_dtypes.bfloat16).astype(np.float64)
    expected = reference(x, weight)
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    assert np.array_equal(np.isinf(values), np.isinf(expected))


class Fused:
    """A kernel that uses the device functions and triggers its dependents itself, after publishing."""

    def __init__(self, producer: OprojProducer) -> None:
        self.producer = producer
        self.config, self.plan = producer.config, producer.plan
        self.transport, self.policy = producer.transport, producer.policy
        self.twoshot, self.generations = producer.twoshot, producer.generations
        self.records = producer.records

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(x, weight, mailbox, mc, slot).launch(
            grid=[112, 1, 1], block=[512, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, weight: cute.Tensor, mailbox: cute.Tensor, mc: Int64, slot: Int32
    ) -> None:
        shared = self.producer.allocate(x.shape[0])
        weights = self.producer.load_weight(weight, shared)
        self.producer.compute(x, weights, shared, mailbox, mc, slot, trigger_after_wait=False)
        cute.arch.griddepcontrol_launch_dependents()


@pytest.mark.parametrize("settings", [(768, 1, 1, 0, 9), (1536, 4, 1, 2, 17)])
def test_another_kernel_can_use_the_device_functions(settings: tuple[int, int, int, int, int]) -> None:
    k, staged_blocks, rows, group_tiles, batch = settings
    x, weight = Problem(12288 // k, batch).inputs(seed=6)
    split = build(*settings)
    producer = OprojProducer(k, staged_blocks=staged_blocks, rows=rows, group_tiles=group_tiles)
    fused: Any = Fused(producer)
    program = build_producer(
        fused, target="sm_90a", batch=batch, mailbox_slots=2, mailbox_tokens=batch, cache=None
    )
    lines = instructions(program.ptx)
    assert at(lines, "griddepcontrol.launch_dependents")[0] > at(lines, "multimem.st")[0]
    assert at(lines, "griddepcontrol.wait")[0] < at(lines, "multimem.st")[0]
    assert np.array_equal(
        published(program, run(program, x, weight, exact=True), batch),
        published(split, run(split, x, weight, exact=True), batch),
    )


# The whole grid


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("k", "settings"), [(k, settings) for k in (768, 1536) for settings in configuration.configurations(k)]
)
def test_every_configuration_builds_without_spilling(
    k: int, settings: tuple[int, int, int], target: str
) -> None:
    """``build_producer`` raises where ptxas spills; every batch of the contract that the configuration
    accepts."""
    for batch in set(BATCHES) & set(Configuration(k, *settings).valid_batches()):
        assert contract_problems(build(k, *settings, batch, target)) == []
