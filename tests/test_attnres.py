"""The residual attention kernel: its reference against torch in float64, its bits against its own order of
operations in numpy, and broken versions of it.

A kernel that matches `fp32_reference` bit for bit is batch invariant (the reference treats tokens one by one),
the same on both targets, and within the tolerance, since the reference is. What is right is decided by `reference`
(float64, the formula) and by torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from oproj_lib.attnres_programs import build_attnres
from oproj_lib.attnres_reference import (
    KINDS,
    AttnResInputs,
    exponential,
    findings,
    fma,
    fp32_reference,
    half_step,
    make_inputs,
    new_prefix,
    reference,
)
from oproj_lib.attnres_run import run_attnres
from oproj_lib.kernels.attnres import AttnRes
from oproj_lib.kernels.attnres_configuration import (
    MAX_BLOCKS,
    THREAD_CHOICES,
    AttnResConfiguration,
    registers_per_thread,
)
from oproj_lib.lessons.broken_attnres import BROKEN_ATTNRES
from oproj_lib.problem import N
from oproj_lib.sass import disassemble

SEED = 2026
SMALL = AttnResConfiguration(3, ranks=4, tokens=3)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, NaNs of any payload being equal."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(np.uint16) == b.view(np.uint16)) | nan).all())


# ---- the reference ----


def torch_formula(config: AttnResConfiguration, inputs: AttnResInputs) -> tuple[np.ndarray, np.ndarray]:
    """(P, out) by torch: delta and P with torch's own FP32 and BF16, the rest with float64 library functions."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()

    total = torch.zeros(config.tokens, N)
    for slot in inputs.slots:
        total += tensor(slot).float()
    token = total.bfloat16()
    if not config.replace_prefix:
        token = token + tensor(inputs.prefix)  # torch adds BF16 in FP32 and rounds once
    rows = [tensor(inputs.blocks[:, s]).double() for s in range(config.blocks)] + [token.double()]
    values = torch.stack(rows, dim=1)
    weight = tensor(inputs.norm_weight).double() * tensor(inputs.qk_weight).double()
    scores = torch.nn.functional.rms_norm(values, (N,), weight, config.eps).sum(-1)
    mix = torch.einsum("ts,tsn->tn", scores.softmax(-1), values) if config.blocks else values[:, 0]
    if config.out_norm:
        mix = torch.nn.functional.rms_norm(mix, (N,), tensor(inputs.out_weight).double(), config.out_eps)
    return token.float().numpy().astype(ml_dtypes.bfloat16), mix.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, blocks=0),
        replace(SMALL, blocks=8, replace_prefix=True, eps=1e-5, out_norm=False),
    ],
    ids=["NB3", "NB0", "NB8"],
)
def test_reference_is_the_formula(config: AttnResConfiguration, kind: str) -> None:
    inputs = make_inputs(config, SEED, kind)
    prefix, out = torch_formula(config, inputs)
    expected = reference(config, inputs)
    assert same_bits(expected.prefix, prefix)
    np.testing.assert_allclose(expected.out, out, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
@pytest.mark.parametrize("threads", [128, 448])
def test_fp32_in_the_kernels_order_passes_the_check(kind: str, blocks: int, threads: int) -> None:
    """So the tolerance has room for FP32 arithmetic, in every kind of input."""
    config = replace(SMALL, blocks=blocks, threads=threads, replace_prefix=blocks == 8)
    inputs = make_inputs(config, SEED, kind)
    assert findings(config, inputs, *fp32_reference(config, inputs)) == ()


def test_kinds_are_what_they_say() -> None:
    config = replace(SMALL, tokens=4)
    scores = {kind: reference(config, make_inputs(config, SEED, kind)).scores for kind in KINDS}
    assert 1 < scores["random"].std() < 3
    assert (scores["equal_scores"] == 0).all()
    assert (scores["dominant"].max(axis=1) > 100).all()
    assert scores["dominant"][0].argmax() == 3 and scores["dominant"][1].argmax() == 2
    assert (scores["large_negative"] < -100).all()
    assert (scores["zero_rows"][1::2] == 0).all() and (scores["zero_rows"][:, 0] == 0).all()
    for kind in ("nan", "inf"):
        assert np.isnan(scores[kind][1::2, 3]).all() and np.isfinite(scores[kind][::2]).all()


def test_nobody_publishes_negative_zero() -> None:
    for kind in KINDS:
        assert not (make_inputs(SMALL, SEED, kind).slots.view(np.uint16) == 0x8000).any()


def test_prefix_rounds_twice() -> None:
    """delta = 1 + 2**-8 rounds to 1 (ties to even) before prefix = 2**-8 is added: 1, and not 1 + 2**-7."""
    config = AttnResConfiguration(0, ranks=2, tokens=1)
    inputs = make_inputs(config, 0)
    inputs.slots[0], inputs.slots[1], inputs.prefix[:] = 1, 2.0**-8, 2.0**-8
    assert (new_prefix(config, inputs) == 1).all()
    assert (new_prefix(replace(config, replace_prefix=True), inputs) == 1).all()


def test_sum_is_in_rank_order() -> None:
    """(2**30 - 2**30) + 1 = 1, (2**30 + 1) - 2**30 = 0 in FP32."""
    config = AttnResConfiguration(0, ranks=3, tokens=1, replace_prefix=True)
    inputs = make_inputs(config, 0)
    for order, expected in (((2.0**30, -(2.0**30), 1.0), 1), ((2.0**30, 1.0, -(2.0**30)), 0)):
        for slot, value in zip(inputs.slots, order, strict=True):
            slot[:] = value
        assert (new_prefix(config, inputs) == expected).all()


def test_exponential_is_within_two_steps() -> None:
    x = -np.linspace(0, 86.9, 200_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exponential(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    special = np.array([0, -87.5, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(exponential(special), np.array([1, 0, 0, 0, np.nan], np.float32))


def test_fma_rounds_once() -> None:
    """(1 + 2**-12)**2 - 1 = 2**-11 + 2**-24; and a sum that float64 alone would round twice."""
    a = np.array([1 + 2.0**-12], np.float32)
    assert fma(a, a, np.array([-1], np.float32))[0] == 2.0**-11 + 2.0**-24
    # 1 + 2**-23 + 2**-24 - 2**-60: float64 would lose the last term, and the tie would round up.
    b, c = np.array([1 + 2.0**-18, 1 - 2.0**-18], np.float32) * np.float32(2.0**-12)
    assert fma(b, c, np.float32(1 + 2.0**-23)) == 1 + 2.0**-23


def test_half_step_of_bf16() -> None:
    np.testing.assert_array_equal(
        half_step(np.array([1.0, 1.99, 2.0, 0.0])), [2.0**-8, 2.0**-8, 2.0**-7, 2.0**-134]
    )


# ---- the kernel ----


@dataclass(frozen=True)
class Case:
    """One build. Every pair of (blocks, replace_prefix, out_norm, M) values occurs somewhere, and every number of
    threads, both targets, and polls of one and of several pieces."""

    blocks: int
    replace_prefix: bool
    out_norm: bool
    tokens: int
    ranks: int = 8
    threads: int = 448
    target: str = "sm_90a"
    kind: str = "random"

    def kernel(self) -> AttnRes:
        return AttnRes(
            self.blocks,
            ranks=self.ranks,
            tokens=self.tokens,
            replace_prefix=self.replace_prefix,
            out_norm=self.out_norm,
            threads=self.threads,
        )


CASES = (
    Case(0, False, False, 1),
    Case(0, True, True, 5, ranks=1, threads=128),
    Case(1, True, False, 5, threads=224, ranks=3),
    Case(1, False, True, 1, target="sm_100a", ranks=1),
    Case(3, False, False, 5, ranks=2),
    Case(3, True, True, 1, threads=896),
    Case(8, False, True, 5, ranks=8),
    Case(8, True, False, 1, target="sm_100a", ranks=16),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_and_machine_code(case: Case) -> None:
    check_bits(case)
    check_order(case)


def check_bits(case: Case) -> None:
    kernel = case.kernel()
    inputs = make_inputs(kernel.config, SEED, case.kind)
    run = run_attnres(kernel, target=case.target, inputs=inputs, checks=True)
    assert run.ok, run.findings
    prefix, out = fp32_reference(kernel.config, inputs)
    assert same_bits(run.prefix, prefix) and same_bits(run.out, out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("out_norm", [False, True])
@pytest.mark.parametrize("replace_prefix", [False, True])
@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_every_bit(blocks: int, replace_prefix: bool, out_norm: bool, tokens: int, target: str) -> None:
    for kind in KINDS:
        check_bits(Case(blocks, replace_prefix, out_norm, tokens, target=target, kind=kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random"])
def test_nasty_inputs(kind: str) -> None:
    check_bits(Case(3, False, True, 2, ranks=2, kind=kind))


def test_random_order_of_warps() -> None:
    kernel = Case(3, False, True, 2, ranks=2).kernel()
    inputs = make_inputs(kernel.config, SEED)
    run = run_attnres(kernel, inputs=inputs, checks=True, schedule=3)
    assert run.ok, run.findings
    assert same_bits(run.out, fp32_reference(kernel.config, inputs)[1])


def test_batch_invariance() -> None:
    """Token 1 of two is, bit for bit, the only token of one: whatever the other one is."""
    two = Case(3, False, True, 2, ranks=2).kernel()
    inputs = make_inputs(two.config, SEED, "nan")
    inputs = replace(inputs, slots=inputs.slots[:, ::-1].copy())  # the NaN is in token 0 now
    one = Case(3, False, True, 1, ranks=2).kernel()
    alone = replace(
        inputs,
        slots=inputs.slots[:, 1:].copy(),
        prefix=inputs.prefix[1:].copy(),
        blocks=inputs.blocks[1:].copy(),
    )
    both, single = run_attnres(two, inputs=inputs), run_attnres(one, inputs=alone)
    assert np.isnan(both.out[0]).all() and not np.isnan(both.out[1]).any()
    np.testing.assert_array_equal(both.out[1].view(np.uint16), single.out[0].view(np.uint16))
    np.testing.assert_array_equal(both.prefix[1].view(np.uint16), single.prefix[0].view(np.uint16))


@pytest.mark.parametrize("name", BROKEN_ATTNRES)
def test_broken_versions_are_rejected(name: str) -> None:
    broken = BROKEN_ATTNRES[name]
    kernel = broken.build()
    inputs = make_inputs(kernel.config, SEED, broken.kind)
    run = run_attnres(kernel, inputs=inputs, checks=True)
    assert any(broken.finding in finding for finding in run.findings), run.findings


def test_the_settings_of_the_broken_versions_are_sound() -> None:
    kernel = AttnRes(1, ranks=2, tokens=2)
    for kind in sorted({broken.kind for broken in BROKEN_ATTNRES.values()}):
        run = run_attnres(kernel, inputs=make_inputs(kernel.config, SEED, kind), checks=True)
        assert run.ok, run.findings


# ---- the machine code ----


def check_order(case: Case) -> None:
    """Everything that does not need the mailbox is on its way before the first poll, and the dependents are
    released before that. Two weights, NB blocks (or more, if they are read again), prefix and out_w."""
    kernel = case.kernel()
    built = build_attnres(kernel, target=case.target, mailbox_tokens=case.tokens)
    code = disassemble(built.cubin)[built.entry]
    names = [instruction.name for instruction in code]
    chunk_loads = [c for c in code if c.name == "LDG" and "128" in c.opcode]
    first_poll = next(i for i, c in enumerate(code) if c in chunk_loads and "STRONG.SYS" in c.opcode)
    chunk_loads = [c for c in chunk_loads if "STRONG.SYS" not in c.opcode]
    rows = (2 + case.blocks if case.blocks else 0) + (not case.replace_prefix) + case.out_norm
    assert len(chunk_loads) >= kernel.config.chunks * rows
    written = [c for c in chunk_loads if "STRONG.GPU" in c.opcode]  # past L1: prefix and blocks
    assert len(written) >= kernel.config.chunks * (case.blocks + (not case.replace_prefix))
    assert all(load.address < code[first_poll].address for load in chunk_loads)
    assert names.index("PREEXIT") < first_poll < names.index("ACQBULK")
    assert max(i for i, name in enumerate(names) if name == "STG") < names.index("ACQBULK")


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("ranks", [1, 8, 16, 72])
@pytest.mark.parametrize("threads", THREAD_CHOICES)
@pytest.mark.parametrize("blocks", range(MAX_BLOCKS + 1))
def test_nothing_spills(blocks: int, threads: int, ranks: int, target: str) -> None:
    """`build_program` refuses a build that spills."""
    check_order(Case(blocks, False, True, 2, ranks, threads, target))


def test_registers_per_thread() -> None:
    """CUDA C++ Programming Guide, "Technical Specifications": 64 K registers per SM, 255 per thread."""
    assert {threads: registers_per_thread(threads) for threads in (*THREAD_CHOICES, 512)} == {
        128: 255, 224: 255, 448: 128, 896: 72, 512: 128,
    }  # fmt: skip


# ---- errors ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 9}, "blocks = 9: earlier block outputs; choose 0 to 8"),
        ({"blocks": -1}, "choose 0 to 8"),
        ({"blocks": 2.0}, "blocks = 2.0 is a float; it must be an int"),
        ({"ranks": 0}, "ranks = 0: slots to sum; choose 1 to 72"),
        ({"ranks": 73}, "choose 1 to 72"),
        ({"tokens": 0}, "tokens = 0: one CTA per token; choose 1 to 64"),
        ({"tokens": 65}, "choose 1 to 64"),
        ({"threads": 512}, r"896 / 512 is not a whole number .* choose from \(128, 224, 448, 896\)"),
        ({"out_norm": 1}, "out_norm = 1: choose True or False"),
        ({"eps": 0.0}, "eps = 0.0: .* a row of zeros"),
        ({"out_eps": float("nan")}, "out_eps = nan"),
        ({"eps": 1e-40}, "at least 2"),
    ],
)
def test_wrong_configurations(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"blocks": 3, "ranks": 4, "tokens": 3, **changes}
    with pytest.raises(ValueError, match=message):
        AttnRes(arguments.pop("blocks"), **arguments)


def test_wrong_arrays() -> None:
    from oproj_lib.kernels.attnres_lane import Arrays

    kernel = AttnRes(3, ranks=4, tokens=3)
    inputs = make_inputs(kernel.config, 0)
    good = Arrays(
        inputs.prefix,
        inputs.blocks,
        inputs.norm_weight,
        inputs.qk_weight,
        inputs.out_weight,
        inputs.prefix.copy(),
    )
    box = np.zeros((12, 3, N), ml_dtypes.bfloat16)
    kernel.check(box, good)
    for name, array, message in (
        (
            "blocks",
            inputs.blocks[:, :2].copy(),
            r"blocks has shape \(3, 2, 7168\): .* built for \(3, 3, 7168\)",
        ),
        ("blocks", inputs.blocks[:, ::-1], "contiguous"),
        ("prefix", inputs.prefix.astype(np.float32), "prefix has dtype float32"),
        ("out_weight", inputs.out_weight[:-1], r"out_weight has shape \(7167,\)"),
        ("out", inputs.prefix[:2].copy(), r"out has shape \(2, 7168\)"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.check(box, replace(good, **{name: array}))
    for slots, tokens, message in ((4, 3, "mailbox of 4 slots: 3 generations"), (12, 2, "2 tokens per slot")):
        with pytest.raises(ValueError, match=message):
            kernel.check(np.zeros((slots, tokens, N), ml_dtypes.bfloat16), good)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind = 'odd' is unknown; choose one of random"):
        make_inputs(SMALL, 0, "odd")
    with pytest.raises(ValueError, match="seed = -1 is negative"):
        make_inputs(SMALL, -1)
