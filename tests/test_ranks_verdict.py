"""Judging a round: bounds and findings on arrays made by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oproj_lib.ranks import verdict


def test_a_wrong_sum_is_off_from_all_reduce() -> None:
    exact = np.full((2, 1, 8), 1.5)
    right = exact.sum(axis=0).astype(ml_dtypes.bfloat16)
    assert verdict.reduced_findings("here", right, exact, exact.sum(axis=0)) == []
    (line,) = verdict.reduced_findings("here", right * ml_dtypes.bfloat16(1.0625), exact, exact.sum(axis=0))
    assert line.startswith("here: off from torch.distributed.all_reduce by 6.25e-02, limit 3.0")


def test_the_tolerance_is_two_roundings() -> None:
    """Four equal partials: |partials| is half of |sum|, so 2.5e-3 * sqrt(1 + 1/4)."""
    assert verdict.Tolerance(partials=2.0, sum=4.0).relative == pytest.approx(2.5e-3 * 1.25**0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "1 of 64 elements are finite, Inf or NaN where float64 is not"),
        (
            3.0625,
            "1 elements are off by more than rounding explains, worst at token 0, column 5: 3.0625, float64 3",
        ),
    ],
)
def test_one_wrong_element_is_found(value: float, message: str) -> None:
    exact = np.full((2, 1, 64), 1.5)
    out = exact.sum(axis=0).astype(ml_dtypes.bfloat16)
    assert verdict.float64_findings("here", out, exact, k=1) == []
    out[0, 5] = value
    assert message in "; ".join(verdict.float64_findings("here", out, exact, k=1))


def test_an_overflow_on_the_way_is_right() -> None:
    """3e38 + 3e38 is beyond FP32, and -3e38 does not bring it back."""
    exact = np.array([3e38, 3e38, -3e38]).reshape(3, 1, 1)
    infinite = np.array([[np.inf]], ml_dtypes.bfloat16)
    assert verdict.float64_findings("here", infinite, exact, k=1) == []
    assert verdict.float64_findings("here", infinite, exact[::-1], k=1) != []


def test_memory_after_a_round() -> None:
    words = np.full((3, 4, 2), 0x80008000, np.uint32)
    words[1, :3] = 7
    assert verdict.memory_findings("here", words, 1, 3) == []
    assert verdict.memory_findings("here", words, 1, 2) == ["here: generation 1: 2 words are not armed again"]
    assert verdict.memory_findings("here", words, 1, 4) == [
        "here: generation 1: 2 words were never published"
    ]
    words[2, 3, 1] = 0
    assert verdict.memory_findings("here", words, 1, 3) == ["here: generation 2: 1 words are not armed again"]


def test_unwritten_outputs_and_other_bits() -> None:
    first = np.zeros((1, 4), ml_dtypes.bfloat16)
    second = first.copy()
    second.view(np.uint16)[0, 2] = verdict.UNWRITTEN
    assert verdict.rank_findings("here", [first, second]) == [
        "here: unwritten output: 1 of 4 elements of rank 1",
        "here: ranks 0 and 1 differ: 1 of 4 elements, first token 0, column 2: 0x0000 and 0xffff",
    ]
    probes = [("round 0", first[0]), ("round 4", second[0])]
    (line,) = verdict.probe_findings(probes)
    assert line.startswith("batch invariance: round 4 and round 0: 1 of 4 elements")
