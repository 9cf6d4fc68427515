"""Shapes, inputs, reference and tolerance of the job."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from oproj_lib import problem
from oproj_lib.problem import KINDS, TOLERANCE, TP8, TP16, Problem, check, error_measures, reference

BF16 = ml_dtypes.bfloat16


def fp32_product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A right output: FP32 sums, rounded once."""
    with np.errstate(invalid="ignore", over="ignore"):
        return (x.astype(np.float32) @ weight.astype(np.float32).T).astype(BF16)


def small(x: list[list[float]], weight: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(x, dtype=BF16), np.array(weight, dtype=BF16)


# ---- shapes ----


def test_the_shapes_are_those_of_the_model() -> None:
    assert (problem.N, problem.HIDDEN_K, problem.CTAS, problem.ROWS_PER_CTA) == (7168, 12288, 112, 64)
    assert (TP8.name, TP8.ranks, TP8.k) == ("TP8", 8, 1536)
    assert (TP16.name, TP16.ranks, TP16.k) == ("TP16", 16, 768)
    assert problem.PRESETS == {"TP8": TP8, "TP16": TP16}
    assert TP8.with_batch(64) == Problem(8, 64)


@pytest.mark.parametrize("batch", [1, 64])
def test_batch_limits_are_inclusive(batch: int) -> None:
    x, weight = Problem(16, batch).inputs(0)
    assert x.shape == (batch, 768) and weight.shape == (7168, 768)
    assert x.dtype == weight.dtype == BF16
    assert x.flags.c_contiguous and weight.flags.c_contiguous


@pytest.mark.parametrize(
    ("ranks", "batch", "message"),
    [
        (7, 8, r"ranks = 7 would give K = 12288 / 7 = 1755.43; choose 8 \(K = 1536\) or 16 \(K = 768\)"),
        (0, 8, r"ranks = 0 would give K = 12288 / 0; choose 8"),
        (4, 8, r"ranks = 4 would give K = 12288 / 4 = 3072; choose 8"),
        (8, 0, r"batch = 0 is outside 1\.\.64: .* 8 \* batch = 0 of its 512"),
        (8, 65, r"batch = 65 is outside 1\.\.64: .* 8 \* batch = 520 of its 512"),
        (8, -1, r"batch = -1 is outside"),
        ("8", 8, r"ranks = '8' is a str; it must be an int"),
        (8, 8.0, r"batch = 8.0 is a float; it must be an int"),
        (8, True, r"batch = True is a bool; it must be an int"),
    ],
)
def test_wrong_shapes_name_the_valid_ones(ranks: int, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(ranks, batch)


# ---- inputs ----


def test_inputs_are_the_seeds_own() -> None:
    first, again, other = (TP16.inputs(seed) for seed in (5, 5, 6))
    for a, b, c in zip(first, again, other, strict=True):
        assert a.tobytes() == b.tobytes() != c.tobytes()


def test_inputs_refuse_unknown_kinds_and_seeds() -> None:
    with pytest.raises(ValueError, match=r"kind = 'zeros' is unknown; choose one of random, negative_zero"):
        TP16.inputs(0, "zeros")
    with pytest.raises(ValueError, match=r"seed = -1 is negative; choose 0 or more"):
        TP16.inputs(-1)


@pytest.mark.parametrize("preset", [TP8, TP16], ids=lambda p: p.name)
def test_random_outputs_are_standard_normal_whatever_k_is(preset: Problem) -> None:
    ref = reference(*preset.inputs(1))
    assert ref.std() == pytest.approx(1, rel=0.05)
    assert abs(ref.mean()) < 0.02


def test_negative_zero_holds_values_tokens_and_rows_of_it() -> None:
    for array, step in zip(Problem(16, 9).inputs(2, "negative_zero"), (3, 16), strict=True):
        negative_zero = array.view(np.uint16) == 0x8000
        assert negative_zero[step - 1 :: step].all()
        assert 0.2 < negative_zero[0].mean() < 0.3


def test_subnormal_outputs_vanish_when_inputs_are_flushed() -> None:
    x, weight = TP16.inputs(3, "subnormal")
    bits = x.view(np.uint16)
    assert not (bits & 0x7F80).any() and (bits & 0x7F).any()  # exponent field 0 everywhere, fraction not
    assert ((weight.view(np.uint16) & 0x7F80) == 0).mean() > 0.05
    flushed = np.where((bits & 0x7F80) == 0, 0, x).astype(BF16)
    assert check(fp32_product(x, weight), x, weight).ok
    assert not check(fp32_product(flushed, weight), x, weight).ok
    ordinary_rows = np.abs(reference(x, weight)[:, 15::16])
    assert 0 < ordinary_rows.max() < 2.0**-120  # about the smallest normal number, 2**-126


def test_inf_inputs_give_inf_of_either_sign_nan_and_untouched_tokens() -> None:
    ref = reference(*TP16.inputs(4, "inf"))
    assert np.isposinf(ref).any() and np.isneginf(ref).any()
    assert np.isnan(ref[1, ::64]).all()  # Inf * 0
    assert np.isfinite(np.delete(ref[0], np.s_[31::32])).all()
    assert not np.isfinite(ref[1]).any()


def test_nan_inputs_spoil_their_own_tokens_and_rows_only() -> None:
    ref = reference(*Problem(16, 3).inputs(5, "nan"))
    expected = np.zeros((3, 7168), dtype=bool)
    expected[1] = True
    expected[:, 31::32] = True
    assert (np.isnan(ref) == expected).all()


def test_some_sums_round_to_negative_zero() -> None:
    x, weight = TP8.inputs(6, "rounds_to_negative_zero")
    ref = reference(x, weight)
    assert (ref[:, 3::8] == -(2.0**-140)).all()
    assert (fp32_product(x, weight)[:, 3::8].view(np.uint16) == 0x8000).all()


def test_cancellation_shows_partial_sums_that_lose_bits() -> None:
    x, weight = TP8.inputs(7, "cancellation")
    assert check(fp32_product(x, weight), x, weight).ok
    halves = [
        (x[:, part].astype(np.float32) @ weight[:, part].astype(np.float32).T).astype(BF16).astype(np.float32)
        for part in (slice(0, 768), slice(768, 1536))
    ]
    verdict = check((halves[0] + halves[1]).astype(BF16), x, weight)
    assert verdict.measures.relative_frobenius > 10 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", [Problem(8, 1), Problem(16, 9)], ids=lambda p: f"{p.name}-M{p.batch}")
def test_a_right_output_is_right_for_every_kind(preset: Problem, kind: str) -> None:
    x, weight = preset.inputs(8, kind)
    check(fp32_product(x, weight), x, weight).raise_if_wrong()


# ---- the reference ----


def test_reference_of_a_product_done_by_hand() -> None:
    x, weight = small([[1, 2, 3], [0.5, -1, 0]], [[1, 0, 2], [4, -0.25, 1]])
    assert reference(x, weight).tolist() == [[7.0, 6.5], [0.5, 2.25]]


def test_reference_follows_ieee_754() -> None:
    inf, nan = math.inf, math.nan
    x, weight = small([[inf, 1], [inf, -inf], [nan, 0]], [[1, 1], [0, 1], [-1, 1]])
    expected = [[inf, nan, -inf], [nan, nan, -inf], [nan, nan, nan]]
    np.testing.assert_array_equal(reference(x, weight), expected)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (np.zeros((2, 4), np.float32), np.zeros((3, 4), BF16), r"x is float32; it must be bfloat16"),
        (np.zeros((2, 4), BF16), np.zeros((3, 4), np.float16), r"weight is float16; it must be bfloat16"),
        (np.zeros(4, BF16), np.zeros((3, 4), BF16), r"x has shape \(4,\); it must have two axes"),
        (np.zeros((2, 4), BF16), np.zeros((3, 5), BF16), r"has K = 4 and weight \[N, K\] has K = 5"),
    ],
)
def test_reference_refuses_what_it_cannot_multiply(x: np.ndarray, weight: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference(x, weight)


# ---- measures and the verdict ----


def test_measures_of_errors_done_by_hand() -> None:
    nan, inf = math.nan, math.inf
    out = np.array([[3.0, 4.5, -0.0, nan, nan, inf, 2.0, -inf, inf]], dtype=BF16)
    ref = np.array([[3.0, 4.0, 0.0, nan, 1.0, inf, inf, inf, 1e39]])
    measures = error_measures(out, ref)
    assert (
        measures.relative_frobenius == 0.5 / 5
    )  # over the three first elements: |(0, 0.5, 0)| / |(3, 4, 0)|
    assert measures.max_abs == 0.5
    assert measures.nan_count == 1
    assert measures.special_mismatches == 3  # NaN for 1, 2 for Inf, -Inf for Inf; 1e39 is Inf in bfloat16
    assert (measures.negative_zeros, measures.elements) == (1, 9)


def test_measures_of_an_all_zero_reference() -> None:
    zeros = np.zeros((2, 3))
    assert error_measures(zeros.astype(BF16), zeros).relative_frobenius == 0
    assert error_measures(np.ones((2, 3), BF16), zeros).relative_frobenius == math.inf


def test_measures_refuse_other_dtypes_and_shapes() -> None:
    with pytest.raises(ValueError, match=r"out is float32; it must be bfloat16"):
        error_measures(np.zeros((1, 2), np.float32), np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"out has shape \(1, 2\) and the reference \(2, 1\)"):
        error_measures(np.zeros((1, 2), BF16), np.zeros((2, 1)))


def test_the_tolerance_is_what_its_derivation_says() -> None:
    rng = np.random.default_rng(9)
    just_above_one = 1 + rng.random(200_000) * 2.0**-4
    normal = rng.standard_normal(200_000)

    def rounding(values: np.ndarray) -> float:
        return error_measures(values.astype(BF16)[None], values[None]).relative_frobenius

    assert 2.0**-7 / math.sqrt(12) == pytest.approx(2.26e-3, rel=0.01)
    assert rounding(normal) == pytest.approx(1.66e-3, rel=0.01)
    assert rounding(just_above_one) == pytest.approx(2.26e-3 / 1.031, rel=0.01)
    assert rounding(just_above_one) < TOLERANCE
    truncated = (normal.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert error_measures(truncated.astype(BF16)[None], normal[None]).relative_frobenius > 3.2e-3


X, WEIGHT = Problem(16, 64).inputs(10)
RIGHT = fp32_product(X, WEIGHT)


def test_the_verdict_on_a_right_output() -> None:
    verdict = check(RIGHT, X, WEIGHT)
    assert verdict.ok and verdict.reasons == ()
    verdict.raise_if_wrong()


def test_one_wrong_element_of_458752_is_found() -> None:
    wrong = RIGHT.copy()
    wrong[37, 4711] += BF16(0.25)
    verdict = check(wrong, X, WEIGHT)
    assert verdict.measures.relative_frobenius < TOLERANCE  # the norm alone would let it pass
    assert not verdict.ok
    with pytest.raises(AssertionError, match=r"1 elements are off .* worst at token 37, column 4711: "):
        verdict.raise_if_wrong()


def test_one_missing_product_of_768_is_found() -> None:
    x = X.copy()
    x[:, 500] = 0
    verdict = check(fp32_product(x, WEIGHT), X, WEIGHT)
    assert any(
        "relative Frobenius error" in reason and "limit 2.50e-03" in reason for reason in verdict.reasons
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_special_value_is_found(value: float) -> None:
    wrong = RIGHT.copy()
    wrong[0, 0] = value
    (reason,) = check(wrong, X, WEIGHT).reasons
    assert reason.startswith("1 of 458752 elements are finite, Inf or NaN where the reference is not")
    assert f"({int(math.isnan(value))} unexpected NaN)" in reason


def test_negative_zeros_are_wrong_in_a_mailbox_only() -> None:
    x, weight = TP16.inputs(11, "rounds_to_negative_zero")
    out = fp32_product(x, weight)
    assert check(out, x, weight).ok
    assert check(out, x, weight, latent=True).reasons == ("7168 elements are -0.0, that is never written",)
    rewritten = np.where(out == 0, BF16(0), out)
    assert check(rewritten, x, weight, latent=True).ok
