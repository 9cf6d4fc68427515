"""What the notebooks count: instructions and traffic by function, wavefronts, fragments, the floor."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from tensor_layouts import atoms_nv

from oproj_lib import accesses, attribution, floor, mma_demo, permutation
from oproj_lib.fragment_maps import MAPS, SHAPES, holders, literal_load_sectors
from oproj_lib.kernels.configuration import Configuration, XPath
from oproj_lib.layouts.banks import wavefronts
from oproj_lib.problem import CTAS, Problem
from oproj_lib.recorded import recorded_h200
from oproj_lib.run import RunResult, producer_for, run_producer

# Every x path; ragged and full tiles; several row tiles; ring groups that are full, ragged and single.
LAUNCHES = [
    (8, 8, {}),
    (8, 7, {}),
    (16, 1, {}),
    (16, 9, {}),
    (8, 16, {"rows": 2}),
    (16, 17, {"group_tiles": 2, "staged_blocks": 2}),
    (8, 13, {"group_tiles": 1}),
    (16, 64, {"group_tiles": 8}),
]


@pytest.fixture(params=LAUNCHES, ids=str)
def launch(request: pytest.FixtureRequest) -> tuple[RunResult, Configuration]:
    ranks, batch, settings = request.param
    result = run_producer(ranks=ranks, batch=batch, device="vgpu", **settings)
    return result, producer_for(result.k, batch, **settings).config


def test_the_parts_add_up_to_what_the_virtual_gpu_counts(launch: tuple[RunResult, Configuration]) -> None:
    result, config = launch
    counters, problem = result.report.counters, Problem(result.ranks, result.batch)
    steps = attribution.steps(result.program, result.report)
    assert sum(step.threads for step in steps) == counters.thread_instructions
    assert {step.kind for step in steps} == set(attribution.KINDS)

    predicted = accesses.predicted_wavefronts(config, result.batch, CTAS)
    counted = {
        (function, opcode): attribution.traffic_of(result.program, result.report, function, opcode).wavefronts
        for function, opcode in predicted
    }
    assert predicted == counted
    assert sum(counted.values()) == counters.shared_wavefronts

    job = floor.work(problem)
    assert attribution.traffic_of(result.program, result.report, "load_weight").bytes == job.weight_bytes
    assert counters.multicast_store_bytes == job.out_bytes
    if config.path is XPath.REGISTERS:  # each group of warps that share row tiles reads all of x
        x = attribution.traffic_of(result.program, result.report, "x_words", "ld.global").bytes
        assert x == CTAS * 4 // config.rows * job.x_bytes
    if config.path is XPath.SHARED:
        assert attribution.traffic_of(result.program, result.report, "stage_x").bytes == CTAS * job.x_bytes


def test_a_prediction_for_another_layout_would_differ() -> None:
    result = run_producer(ranks=8, batch=8, device="vgpu")
    other = accesses.predicted_wavefronts(producer_for(1536, 8, group_tiles=1).config, 8, CTAS)
    publish = attribution.traffic_of(result.program, result.report, "publish_chunk", "ld.shared")
    assert other["publish_chunk", "ld.shared"] != publish.wavefronts == 28_672  # 4 x 64 x 112
    assert publish.conflicts == 21_504


def test_functions_by_source_line() -> None:
    result = run_producer(ranks=8, batch=8, device="vgpu")
    table = attribution.traffic(result.program, result.report)
    functions = [function for function, _ in table]
    order = ["load_weight", "stage_x", "x_words", "weight_fragment", "store_partials", "publish_chunk"]
    assert [name for name in dict.fromkeys(functions) if name in order] == order
    assert attribution.function_of(None) == "" == attribution.source_text(None)
    with pytest.raises(ValueError, match=r"'stage_y' has no memory instruction .* there are load_weight"):
        attribution.traffic_of(result.program, result.report, "stage_y")


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "matrix"),
        ("cp.async.cg.shared.global", "memory"),
        ("cp.async.wait_group", "synchronisation"),
        ("bar.sync", "synchronisation"),
        ("ld.param.b64", "arithmetic"),
        ("multimem.st.relaxed.sys.global.v4.bf16x2", "memory"),
    ],
)
def test_kinds(opcode: str, kind: str) -> None:
    assert attribution.kind_of(opcode) == kind


@pytest.mark.parametrize(("operand", "layout"), [("A", "a_layout"), ("B", "b_layout"), ("C", "c_layout")])
def test_fragment_maps_against_tensor_layouts(operand: str, layout: str) -> None:
    """Its atoms map (lane, value) to a column-major offset in (M, K), (N, K) or (M, N)."""
    atom = getattr(atoms_nv.SM80_16x8x16_F32BF16BF16F32_TN, layout)
    for (row, column), (lane, register, element) in holders(operand).items():
        value = register if operand == "C" else 2 * register + element
        rows = {"A": 16, "B": 8, "C": 16}[operand]
        expected = column + rows * row if operand == "B" else row + rows * column  # B is stored [N, K]
        assert atom(lane, value) == expected


def test_fragment_maps_literally() -> None:
    # PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", read off its figures.
    assert MAPS["A"](5, 3, 1) == (9, 11)
    assert MAPS["B"](5, 1, 0) == (10, 1)
    assert MAPS["C"](5, 2, 0) == (9, 2)
    for operand, (rows, columns) in SHAPES.items():
        assert len(holders(operand)) == rows * columns


def test_one_instruction_multiplies() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, shape).astype("bfloat16") for shape in ((16, 16), (16, 8)))
    assert (mma_demo.multiply(a, b) == a.astype(int) @ b.astype(int)).all()
    wrong = mma_demo.pack("A", a)[:, [0, 2, 1, 3]]  # registers 1 and 2 swapped: another matrix
    assert not (
        mma_demo.multiply_registers(wrong, mma_demo.pack("B", b)) == a.astype(int) @ b.astype(int)
    ).all()


def test_the_permutation_changes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    weights, x = rng.integers(-8, 9, (16, 32)), rng.integers(-8, 9, (8, 32))
    assert (permutation.multiply_block(weights, x) == weights @ x.T).all()
    assert sorted(column for order in permutation.k_orders() for column in order) == list(range(32))
    monkeypatch.setattr(
        permutation.fragments, "b_register", lambda half, i: 2 * i + half
    )  # x in another order
    assert not (permutation.multiply_block(weights, x) == weights @ x.T).all()


def test_layout_studies_are_the_kernel_s_layouts() -> None:
    requests = list(accesses.requests(Configuration(1536, 4), 8))
    x_reads = [request.offsets for request in requests if request.function == "x_words"]
    stores = [request.offsets for request in requests if request.function == "store_partials"]
    assert x_reads[0] == tuple(accesses.x_row_offsets(1536, 4))
    assert stores[0] == tuple(accesses.partial_store_offsets(20))
    assert wavefronts(accesses.x_row_offsets(1536, 0), 16) == 8
    assert wavefronts(accesses.partial_store_offsets(16), 4) == 4


def test_the_floor_by_hand() -> None:
    job = floor.work(Problem(8, 8))
    assert (job.weight_bytes, job.x_bytes, job.out_bytes, job.flops) == (
        22_020_096,
        24_576,
        114_688,
        176_160_768,
    )
    machine = floor.Roofline(4.0, 1000.0)
    assert machine.ridge == 250 and machine.tflops(250) == 1000 and machine.tflops(500) == 1000
    assert machine.memory_us(job) == pytest.approx(22.15936 / 4)
    assert machine.compute_us(job) == pytest.approx(0.176160768)
    assert machine.floor_us(job) == machine.memory_us(job)
    assert floor.in_flight_bytes(4.0, 500) == 2e6
    split = floor.Split(64, 1536, 132)
    assert (split.ctas, split.waves, split.weight_bytes) == (112, 1, 196_608)
    assert split.busy == pytest.approx(112 / 132)
    assert floor.Split(32, 1536, 132).waves == 2 == floor.Split(64, 1536, 111).waves


def test_recorded_numbers_name_their_machine() -> None:
    recorded = recorded_h200()
    assert recorded.machine and re.fullmatch(r"\d{4}-\d\d", recorded.date) and recorded.method
    assert recorded.kernel_us[1536, 8] == {"torch.mm": 8.2, "torch.compile": 7.7, "prototype": 6.4}
    assert [row.staged_blocks for row in recorded.exposed[768]] == [0, 3, 6]
    for (k, batch), times in recorded.kernel_us.items():  # no kernel alone is under the floor
        least = floor.Roofline(recorded.copy_tb_s, 989.5).memory_us(floor.work(Problem(12288 // k, batch)))
        assert min(times.values()) > least


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: floor.Roofline(0, 1), "bandwidth_tb_s = 0; it must be more than 0"),
        (lambda: floor.in_flight_bytes(1, -1), "latency_ns = -1; it must be more than 0"),
        (lambda: floor.Split(60, 1536, 132), "rows = 60: 7168 rows must divide evenly"),
        (lambda: floor.Split(64, 1536, 0), "sms = 0; it must be at least 1"),
        (lambda: holders("D"), "operand = 'D': choose from A, B, C"),
        (lambda: MAPS["A"](32, 0, 0), "lane = 32 of operand A: choose 0 to 31"),
        (lambda: MAPS["B"](0, 2, 0), "register = 2 of operand B: choose 0 to 1"),
        (lambda: accesses.x_row_offsets(1536, -1), "padding_chunks = -1"),
        (lambda: accesses.partial_store_offsets(15), "row_words = 15: a token has 16 sums"),
        (lambda: mma_demo.pack("A", np.zeros((8, 16))), "operand A has shape (16, 16), the matrix (8, 16)"),
        (lambda: permutation.lane_chunks(np.zeros((16, 16)), np.zeros((8, 32))), "they must be (16, 32)"),
    ],
)
def test_wrong_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_literal_loads_waste_half_a_sector() -> None:
    assert literal_load_sectors(1536) == (128, 8) == literal_load_sectors(768)
