"""BF16, orders of sums, the tensor core's step, and sums over ranks: against ml_dtypes, mmasim and numpy's float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

import contract
import ml_dtypes
import numpy as np
import pytest
import torch
from mmasim.nv_ptx import MMA
from mmasim_oracle import hopper_bf16
from test_figures import cut_off

from oproj_lib import bf16, figures, fused_dot, number_tables, rank_sums, reproducibility, summation
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.problem import TOLERANCE, Array, reference
from oproj_lib.run import producer_for

BF16 = ml_dtypes.bfloat16
ONES = np.ones(16, BF16)
CONFIGURATIONS = [  # every number of parts and chains
    Configuration(1536, 4, 1, 0),
    Configuration(768, 0, 1, 2),
    Configuration(768, 1, 2, 0),
    Configuration(1536, 1, 2, 2),
    Configuration(1536, 1, 4, 0),
]


def inputs(k: int, tokens: int, columns: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal((rows, k)) for rows in (tokens, columns))
    return x.astype(BF16), (weight * k**-0.5).astype(BF16)


# ---- BF16 ----


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        (0x3F800000, 0x3F80),
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F80),  # middle, even below
        (0x3F808001, 0x3F81),
        (0x3F818000, 0x3F82),  # middle, even above
        (0x3FFF8000, 0x4000),
        (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FFF),
        (0xFFFFFFFF, 0x7FFF),
        (0x80008000, 0x8000),
        (0x80008001, 0x8001),
        (0x00018000, 0x0002),
    ],
)
def test_rounding_of_single_words(word: int, bits: int) -> None:
    assert bf16.round_word(word) == bits


def test_rounding_is_that_of_ml_dtypes_and_torch() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 300_000, dtype=np.uint32)
    values = words.view(np.float32)
    number = ~np.isnan(values)
    with np.errstate(all="ignore"):
        by_ml_dtypes = values.astype(BF16).view(np.uint16)
    by_torch = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    got = bf16.round_to_bits(values)
    assert (got == by_ml_dtypes)[number].all() and (got == by_torch)[number].all()
    assert (got[~number] == 0x7FFF).all() and not number.all()
    assert (bf16.truncate_to_bits(values) != got)[number].mean() == pytest.approx(0.5, abs=0.01)


def test_value_of_all_bits() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = every.view(BF16).astype(np.float64)
    got = np.array([bf16.value_of(int(bits)) for bits in every])
    assert np.array_equal(got, expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))
    kinds = [bf16.fields(int(bits)).kind for bits in (0x0000, 0x0001, 0x0080, 0x7F80, 0x7FFF)]
    assert kinds == ["zero", "subnormal", "normal", "infinity", "NaN"]


def test_spacing() -> None:
    values = np.array([1.0, 1.99, 2.0, -3.0, 256.0, 2.0**-126, 2.0**-127, 2.0**-133, 0.0])
    steps = [2**-7, 2**-7, 2**-6, 2**-6, 2.0, 2.0**-133, 2.0**-133, 2.0**-133, 2.0**-133]
    assert bf16.spacing(values).tolist() == steps


def test_errors_of_rounding() -> None:
    assert pytest.approx(2.2553e-3, rel=1e-4) == bf16.WORST_ROUNDING
    assert bf16.WORST_ROUNDING < TOLERANCE
    uniform = np.linspace(1, 2, 200_001)  # mean square 7 / 3: 2**-8 / sqrt(3) / sqrt(7 / 3)
    assert bf16.expected_error(uniform)[0] == pytest.approx(2**-8 / math.sqrt(7), rel=1e-4)
    values = np.random.default_rng(2).standard_normal(400_000) * 3
    seen = rank_sums.relative_error(values.astype(np.float32).astype(BF16), values)
    expected, deviation = bf16.expected_error(values)
    assert abs(seen - expected) < 4 * deviation < 0.01 * expected
    assert bf16.normal_error(3.0) == pytest.approx(expected, rel=3e-3)
    assert bf16.normal_error(truncate=True) == pytest.approx(2 * 1.6617e-3, rel=1e-4)
    assert bf16.normal_error(truncate=True) > TOLERANCE


def test_negative_zero() -> None:
    assert bf16.rounding_to_negative_zero() == (-(2.0**-134), -0.0, 32769)
    sums = np.array([-0.0, -(2.0**-134), -(2.0**-133), 1.0, np.nan, -np.inf], np.float32)
    plain, latent, early = (
        out.view(np.uint16).tolist()
        for out in (bf16.publish(sums, "plain"), bf16.publish(sums), bf16.publish_too_early(sums))
    )
    assert plain == [0x8000, 0x8000, 0x8001, 0x3F80, 0x7FFF, 0xFF80]
    assert latent == [0x0000, 0x0000, 0x8001, 0x3F80, 0x7FFF, 0xFF80]
    assert early == [0x0000, 0x8000, 0x8001, 0x3F80, 0x7FFF, 0xFF80]


# ---- orders ----


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_the_contract_s_order_in_fp32(config: Configuration) -> None:
    x, weight = inputs(config.k, 9, 64)
    expected = contract.expected_bits(
        x, weight, config.rows, contract.chains_of(config.rows, config.group_tiles)
    )
    sums = summation.contract_sums(x, weight, config, exact=False)
    assert np.array_equal(bf16.publish(sums).view(np.uint16), expected)
    backwards = summation.sequential_sums(x, weight, backwards=True)
    assert summation.differing(sums, backwards) > 64  # so the order shows in FP32


@pytest.mark.parametrize("exact", [False, True])
def test_sums_before_rounding(exact: bool) -> None:
    """Where a mistake in the order cannot hide; the tensor core's arithmetic is mmasim's."""
    config = Configuration(768, 1, 2, 0)
    x, weight = inputs(config.k, 8, 16)
    expected = contract.expected_sums(x, weight, 2, 2, hopper_bf16 if exact else contract.fast_mma)
    assert summation.differing(summation.contract_sums(x, weight, config, exact=exact), expected) == 0
    assert summation.differing(summation.contract_sums(x, weight, config, exact=not exact), expected) > 16


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_every_column_once(config: Configuration) -> None:
    count = 2 * config.kblocks
    columns = [
        c
        for part in range(config.parts)
        for n in range(count)
        for c in summation.mma_columns(config, part, n)
    ]
    assert sorted(columns) == list(range(config.k))
    assert summation.mma_columns(config, 0, 1)[:4] == [4, 5, 12, 13]


def test_sums_go_from_left_to_right() -> None:
    terms = np.array([2.0**24, 1.0, 1.0], np.float32)
    orders = np.array([[0, 1, 2], [1, 2, 0]])
    assert summation.sums_in_orders(terms, orders).tolist() == [2.0**24, 2.0**24 + 2]
    assert summation.add_in_turn(terms) == 2.0**24
    assert summation.add_in_turn(terms, (2, 1, 0)) == 2.0**24 + 2
    assert summation.add_pairwise(np.array([2.0**24, 1, 1, 1], np.float32)) == 2.0**24 + 2
    assert summation.add_in_turn(np.array([2.0**24, 1, 1, 1], np.float32)) == 2.0**24


def test_differing_looks_at_bits() -> None:
    first = np.array([0.0, np.nan, 1.0], np.float32)
    assert summation.differing(first, first.copy()) == 0
    assert summation.differing(first, np.array([-0.0, np.nan, 1.0], np.float32)) == 1


def test_expected_flips() -> None:
    first = np.full(4000, 1.0, np.float32) + np.linspace(0, 0.9, 4000, dtype=np.float32)
    second = first + np.float32(2.0**-7 / 8)  # an eighth of a step
    assert summation.expected_flips(first, second) == pytest.approx(500, rel=1e-3)
    assert summation.differing(bf16.publish(first), bf16.publish(second)) == pytest.approx(500, abs=60)


# ---- the tensor core's step ----


@pytest.mark.parametrize("scale", [1, 20, 66])
def test_a_step_is_mmasim_s(scale: int) -> None:
    rng = np.random.default_rng(scale)

    def matrix(*shape: int) -> Array:
        values = rng.standard_normal(shape) * np.exp2(rng.integers(-scale, scale + 1, shape))
        values[rng.random(shape) < 0.15] = 0
        return values.astype(np.float32)

    a, b, c = matrix(16, 16).astype(BF16), matrix(16, 8).astype(BF16), matrix(16, 8)
    a[:, 8:] = a[:, :8]
    b[8:] = -b[:8] * BF16(1 + 2.0**-7)  # cancellation
    assert not np.isinf(a.astype(np.float32) @ b.astype(np.float32)).any()
    model = MMA("Hopper", "m16n8k16.f32.bf16.bf16.f32")
    a_torch, b_torch = (torch.from_numpy(m.astype(np.float32)).to(torch.bfloat16) for m in (a, b))
    expected = model(a_torch, b_torch, torch.from_numpy(c)).numpy().view(np.uint32)
    got = [[fused_dot.fused_dot(a[m], b[:, n], c[m, n]) for n in range(8)] for m in range(16)]
    bits = np.array([[dot.result.view(np.uint32) for dot in row] for row in got])
    assert np.array_equal(bits, expected)
    for dot in (dot for row in got for dot in row):
        assert dot.cut_off + dot.rounded_off == dot.exact - type(dot.exact)(float(dot.result))
        assert bool(dot.shortened) >= bool(dot.cut_off)


def test_a_step_of_subnormals_and_overflow() -> None:
    largest = np.full(16, 2.0**64, BF16)
    assert fused_dot.fused_dot(largest, largest, 0.0).result == np.inf
    assert fused_dot.fused_dot(largest, -largest, 0.0).result == -np.inf
    tiny = np.array([2.0**-75, *[0.0] * 15], BF16)
    dot = fused_dot.fused_dot(tiny, tiny, 0.0)  # 2**-150 is half the smallest FP32
    assert dot.result == 0 and not np.signbit(dot.result)
    assert fused_dot.fused_dot(np.zeros(16, BF16), np.zeros(16, BF16), -0.0).result.view(np.uint32) == 0


@pytest.mark.parametrize(
    ("name", "core", "fp32", "shortened"),
    [
        ("large ones cancel", 2.0**-7, 3 * 2.0**-8, ("product 3",)),
        ("many small ones", 1 + 3 * 2.0**-23, 1.0, ()),
        ("rounding toward zero", 1.0, 1 + 2.0**-23, ()),
    ],
)
def test_examples(name: str, core: float, fp32: float, shortened: tuple[str, ...]) -> None:
    a, b, addend = fused_dot.example(name)
    dot = fused_dot.fused_dot(a, b, addend)
    assert (float(dot.result), float(fused_dot.plain_fp32(a, b, addend))) == (core, fp32)
    assert dot.shortened == shortened
    assert float(dot.exact) == float(a.astype(np.float64) @ b.astype(np.float64) + addend)


def test_operands_of_an_mma() -> None:
    config = CONFIGURATIONS[1]
    x, weight = inputs(config.k, 1, 16)
    a, b, before = summation.mma_operands(x[0], weight[3], config, 2, 5)  # chains 2: MMAs 1, 3, 5
    columns = summation.mma_columns(config, 2, 5)
    assert np.array_equal(a, weight[3, columns]) and np.array_equal(b, x[0, columns])
    sums = np.zeros((1, 16), np.float32)
    for number in (1, 3):
        wanted = summation.mma_columns(config, 2, number)
        sums = summation.mma(sums, x[:, wanted], weight[:, wanted])
    assert before == sums[0, 3] != 0


# ---- ranks ----


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_both_exchanges_give_the_same_bits(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    partials = (
        rng.standard_normal((ranks, 3, 256)) * np.exp2(rng.integers(-20, 20, (ranks, 3, 256)))
    ).astype("f4")
    partials[:, 0, :4] = -(2.0**-140)  # rounds to -0.0 at every rank
    partials[0, 1, :8] = np.inf
    partials[1, 1, :4] = -np.inf
    partials[1, 2, 0] = np.nan
    for policy in ("latent", "plain"):
        second = rank_sums.two_shot(partials, policy)
        assert [summation.differing(at_rank, second) for at_rank in rank_sums.one_shot(partials, policy)] == [
            0
        ] * ranks
        sent = partials.astype(BF16).astype(np.float32)  # an independent sum
        total = sent[0]
        with np.errstate(invalid="ignore"):
            for one in sent[1:]:
                total = total + one
        expected = total.astype(BF16).astype(np.float32)
        assert np.array_equal(second.astype(np.float32), expected, equal_nan=True)
        negative = (second.view(np.uint16) == 0x8000).sum()
        assert negative == (0 if policy == "latent" else 4)


def test_ranks_are_added_in_order() -> None:
    partials = np.array([2.0**24, 1.0, -(2.0**24)], np.float32)[:, None, None] * np.ones(
        (1, 1, 3), np.float32
    )
    for exchange in (lambda p: rank_sums.one_shot(p)[2], rank_sums.two_shot):
        assert exchange(partials).tolist() == [[0.0] * 3]  # 2**24 + 1 is a tie and stays 2**24
        assert exchange(partials[::-1]).tolist() == [[1.0] * 3]
        assert exchange(partials[[0, 2, 1]]).tolist() == [[1.0] * 3]


def test_errors_of_exchanges() -> None:
    made = rank_sums.scheme_errors((4, 16), *rank_sums.full_inputs(16, 128, 3))
    for row in made:
        assert row.measured == pytest.approx(row.expected, rel=0.08), row  # 2048 outputs: 1.9 % is one sigma
    expected = rank_sums.expected_errors(16, 0.25)
    assert expected["FP32 partials"] == pytest.approx(1.6617e-3, rel=1e-3)
    # sigma / 4 is two binades away from sigma, so c is the same: sqrt(2) c
    assert expected["BF16 partials, FP32 sum"] == pytest.approx(math.sqrt(2) * 1.6617e-3, rel=1e-3)
    assert expected["BF16 running sum"] == pytest.approx(math.sqrt(17 / 2) * 1.66e-3, rel=0.01)


def test_partials_add_up() -> None:
    x, weight = rank_sums.full_inputs(2, 16, 0)
    made = rank_sums.rank_partials(8, x, weight)
    assert made.partials.shape == (8, 2, 16) and made.partials.dtype == np.float32
    assert np.allclose(made.exact, reference(x.astype(BF16), weight.astype(BF16)), rtol=1e-12, atol=1e-12)
    assert made.partials[3] == pytest.approx((x[:, 4608:6144] @ weight[:, 4608:6144].T), rel=1e-6)


# ---- settings and tables ----


def test_variations_differ_in_one_thing() -> None:
    base = reproducibility.Setting("base", Configuration(768, 2, 1, 0), "sm_90a")
    found = {setting.name: setting.order for setting in reproducibility.variations(base, 8)}
    assert found == {
        "base": (4, 4),
        "staged blocks: 1": (4, 4),
        "x in a ring of 1 tile": (4, 4),
        "x in a ring of 2 tiles": (4, 2),
        "rows per warp: 2": (8, 2),  # 4 would need K to be a multiple of 512
        "built for sm_100a": (4, 4),
        "unicast, warps in random order": (4, 4),
    }


@pytest.mark.parametrize("k", [768, 1536])
def test_recommended_orders_cover_every_batch(k: int) -> None:
    orders = reproducibility.orders_by_batch(k)
    assert sorted(batch for batches in orders.values() for batch in batches) == list(range(1, 65))
    for (parts, chains), batches in orders.items():
        config = producer_for(k, batches[-1]).config
        assert (parts, chains) == (4 * config.rows, contract.chains_of(config.rows, config.group_tiles))


def test_tables() -> None:
    assert number_tables.special_values_table().row_count == len(number_tables.SPECIAL)
    assert number_tables.examples_table().row_count == len(fused_dot.EXAMPLES)
    base = reproducibility.Setting("base", Configuration(768, 2, 1, 0), "sm_90a")
    outs = [np.array([1.0, 0.0], BF16), np.array([1.0, -0.0], BF16)]
    counts = number_tables.settings_table([base, base], outs).columns[3]
    assert list(counts.cells) == ["none", "1"]


# ---- pictures ----


@cache
def run_like() -> tuple[Array, Array]:
    """(BF16 outputs, float64): random normals, rounded."""
    exact = np.random.default_rng(0).standard_normal((4, 7168))
    return exact.astype(np.float32).astype(BF16), exact


def tree(config: Configuration) -> figures.Picture:
    chains = np.linspace(-1, 1, config.parts * config.chains, dtype=np.float32)
    return figures.sum_tree(config, chains.reshape(config.parts, config.chains))


def alignment(name: str) -> figures.Picture:
    return figures.alignment(fused_dot.fused_dot(*fused_dot.example(name)))


PICTURES: dict[str, tuple[Callable[[], figures.Picture], str]] = {
    "rounding": (lambda: figures.bf16_rounding(0.3), "60% of the way from the one nearer to zero, and goes to 0.3"),
    "errors": (lambda: figures.rounding_by_size(*run_like()), "2.26e-3 at every power of two"),
    "tree": (lambda: tree(CONFIGURATIONS[0]), "Each of 4 K parts, 4 of them shown, has 24 MMAs in 4 chain(s)"),
    "tree, 16 parts": (lambda: tree(CONFIGURATIONS[4]), "Each of 16 K parts, 4 of them shown, has 6 MMAs in 1"),
    "orders": (
        lambda: figures.order_histogram(np.array([1, 1 + 2**-23, 1 + 2**-23], "f4"), 1.0, 1 + 2**-23),
        "in 3 random orders: they end between -1.0 and 0.0 FP32 steps from the exact sum, in 2 different values",
    ),
    "cancellation": (lambda: alignment("large ones cancel"), "a line marks 2^-7, below which bits are cut off: 1 of"),
    "toward zero": (lambda: alignment("rounding toward zero"), "2 bits of the sum do not fit FP32"),
    "ranks": (
        lambda: figures.rank_errors([rank_sums.SchemeError("s", r, 1e-3 * r, 2e-3) for r in (2, 4)]),
        "s: 2 ranks 2.00e-3, 4 ranks 4.00e-3",
    ),
}  # fmt: skip


def test_more_alternatives() -> None:
    """Of pictures that are drawn like those above."""
    assert "9% of the way" in figures.bf16_rounding(-1e-40).alt
    assert "not 0, 16 of 17, as rows" in alignment("many small ones").alt


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    make, words = PICTURES[name]
    picture = make()
    assert words in picture.alt
    assert cut_off(picture) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bf16.fields(0x10000), "a BF16 has 16 bits"),
        (lambda: bf16.round_to_bits(np.zeros(2)), "values are float64; they must be float32"),
        (lambda: bf16.publish(np.zeros(1, "f4"), "late"), "policy = 'late'; choose latent or plain"),
        (lambda: bf16.spacing(np.array([np.inf])), "a value is not finite"),
        (lambda: bf16.expected_error(np.zeros(2)), "all values are 0"),
        (lambda: bf16.normal_error(0.0), "sigma = 0.0; it must be positive"),
        (lambda: summation.check_output(8, 0, 8), "token = 8: there are 8, choose 0 to 7"),
        (lambda: summation.check_output(0, 7168, 8), "column = 7168: there are 7168, choose 0 to 7167"),
        (lambda: summation.mma_columns(CONFIGURATIONS[1], 4, 0), "part = 4: there are 4 K parts, choose 0 to 3"),
        (lambda: summation.mma_columns(CONFIGURATIONS[1], 0, 12), "2 * 6 K blocks = 12 MMAs, choose 0 to 11"),
        (lambda: summation.chain_sums(*inputs(32, 1, 16), CONFIGURATIONS[0]), "the configuration 1536"),
        (lambda: summation.differing(np.zeros(1), np.zeros(2)), "cannot be compared bit by bit"),
        (lambda: fused_dot.example("none"), "choose from 'large ones cancel', 'many small ones'"),
        (lambda: fused_dot.fused_dot(np.zeros(16), np.zeros(16), 0.0), "a is float64 (16,); it must be bfloat16 (16,)"),
        (lambda: fused_dot.fused_dot(ONES, ONES, math.inf), "not finite"),
        (lambda: fused_dot.fused_dot(ONES, ONES, 0.0, arch=80), "16 / 2 = 8 products per step, not 16"),
        (lambda: rank_sums.full_inputs(0, 1, 0), "tokens = 0, columns = 1"),
        (lambda: rank_sums.rank_partials(7, *np.zeros((2, 1, 12288))), "ranks = 7: must be at least 1 and divide"),
        (lambda: rank_sums.two_shot(np.zeros((8, 1, 12), "f4")), "12 columns / 8 ranks = 1.5"),
        (lambda: rank_sums.expected_errors(0, 1.0), "ranks = 0"),
        (lambda: figures.bf16_rounding(math.inf), "has no BF16 neighbours"),
        (lambda: figures.rounding_by_size(np.zeros((1, 1)), np.zeros((1, 1))), "a reference value is 0"),
        (lambda: figures.sum_tree(CONFIGURATIONS[0], np.zeros((4, 2))), "it must be (4, 4)"),
        (lambda: figures.order_histogram(np.zeros(1, "f4"), 0.0, 0.0), "it has no FP32 step"),
        (lambda: figures.alignment(fused_dot.fused_dot(0 * ONES, ONES, 0.0)), "all 17 terms are 0"),
        (lambda: figures.rank_errors([]), "no measurements"),
    ],
)  # fmt: skip
def test_wrong_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
