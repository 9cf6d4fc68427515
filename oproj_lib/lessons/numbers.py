"""Exercises of notebook 13: rounding to BF16, -0.0, and the order of a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import bf16
from oproj_lib.lessons.exercise import Answer, Exercise, WrongAnswer, WrongTry, whole
from oproj_lib.problem import Array

# What to round, and what is special about it.
WORDS: dict[int, str] = {
    0x3F800000: "1.0 is a BF16 already",
    0x3F807FFF: "below the middle: down",
    0x3F808001: "above the middle: up",
    0x3F808000: "exactly the middle: to the even one of the two neighbours, which is below",
    0x3F818000: "exactly the middle: to the even one of the two neighbours, which is above",
    0x3FFF8000: "rounding up carries into the exponent",
    0x80000000: "-0.0 keeps its sign when it is rounded",
    0x00018000: "subnormals are rounded like all others",
    0x80008000: "the middle between -0.0 and the subnormal next to it: to the even one",
    0x80008001: "the smallest negative sum that survives",
    0xBF808001: "the sign has no say in rounding to nearest",
    0x7F7FFFFF: "the largest FP32 is nearer to what would be the next BF16: infinity",
    0xFF800000: "infinity stays",
    0x7F800001: "a NaN whose payload is in the lower half only",
    0x7FC00000: "a NaN",
    0x7FFFFFFF: "a NaN, as a GPU writes it",
    0xFFFFFFFF: "a NaN with its sign bit set",
}
_RANDOM_WORDS = np.random.default_rng(13).integers(0, 2**32, 500).tolist()


def _is_nan(word: int, exponent: int) -> bool:
    return word & exponent == exponent and word & (exponent & -exponent) - 1 != 0


def _rounded(word: int) -> int | None:
    """What ml_dtypes makes of a word; None for a NaN."""
    if _is_nan(word, 0x7F800000):
        return None
    value = np.array([word], np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        return int(value.astype(ml_dtypes.bfloat16).view(np.uint16)[0])


def _bits(answer: Answer, word: int) -> int:
    where = f"word {word:#010x}"
    try:
        bits = whole(answer(word), where)
    except (NotImplementedError, KeyboardInterrupt, WrongAnswer):
        raise
    except Exception as error:
        raise WrongAnswer(f"{where}: it raised {type(error).__name__}: {error}") from error
    if not 0 <= bits <= 0xFFFF:
        raise WrongAnswer(f"{where}: it returned {bits:#x}, which has not 16 bits")
    return bits


def _first_wrong_bit(got: int, expected: int) -> str:
    bit = (got ^ expected).bit_length() - 1
    field = "sign" if bit == 15 else "exponent" if bit >= 7 else "fraction"
    return f"bit {bit} ({field}) is the highest that differs"


def _compare(answer: Answer, word: int, expected: int | None, why: str) -> None:
    got = _bits(answer, word)
    where = f"word {word:#010x}: {got:#06x}"
    if expected is None:
        if not _is_nan(got, 0x7F80):
            raise WrongAnswer(f"{where}, which is no NaN: {why}")
    elif got != expected:
        raise WrongAnswer(f"{where}, expected {expected:#06x}: {why}; {_first_wrong_bit(got, expected)}")


def check_rounding(answer: Answer) -> None:
    """Every special word, then random ones."""
    for word, why in WORDS.items():
        _compare(answer, word, _rounded(word), why)
    for word in _RANDOM_WORDS:
        _compare(answer, word, _rounded(word), "an arbitrary word")


def check_latent(answer: Answer) -> None:
    """No -0.0 comes out, and nothing else has changed."""
    tiny = "a tiny negative sum rounds to -0.0, which means `never written`"
    cases = {
        0x80000000: "-0.0 means `never written`",
        0x80000001: tiny,
        0x80008000: tiny,
        0x00000000: "0.0 stays",
        0x80008001: "the smallest BF16 below zero is a value like any other",
        0x80010000: "the smallest BF16 below zero is a value like any other",
        **{word: WORDS[word] for word in (0x3F808000, 0xBF808001, 0xFF800000)},
        0x7FFFFFFF: "NaN must pass through",
    }
    for word, why in [*cases.items(), *((word, "an arbitrary word") for word in _RANDOM_WORDS)]:
        rounded = _rounded(word)
        _compare(answer, word, 0 if rounded == bf16.NEGATIVE_ZERO else rounded, why)


BF16_BITS = Exercise(
    name="bf16_bits",
    title="round to nearest even",
    problem="""\
Complete `bf16_bits(word)`: the 16 bits of the BF16 nearest to an FP32 value that is given as its 32 bits. From the
middle between two BF16, go to the one whose last bit is 0. Too large becomes infinity; any NaN must stay a NaN
(which one is free). Use integers only: no float, no numpy.""",
    skeleton='''def bf16_bits(word: int) -> int:
    """16 bits of the nearest BF16: word 0..2**32 - 1."""
    raise NotImplementedError''',
    hints=(
        "The upper half of the word is a BF16, the next one toward zero. Adding 1 to it is the next one away from "
        "zero, also where the fraction overflows into the exponent. Which of the two?",
        "Let an addition decide: `word + 0x8000` carries into the upper half from the middle on. It must not do so "
        "from the middle if the upper half is even.",
        "Add `0x7fff` and bit 16 of the word, then shift by 16. Before that, catch NaN: all ones in bits 23 to 30 "
        "and something below.",
    ),
    solution='''def bf16_bits(word: int) -> int:
    """16 bits of the nearest BF16: word 0..2**32 - 1."""
    if word & 0x7FFFFFFF > 0x7F800000:  # NaN: the addition below could carry it to infinity, or to -0.0
        return 0x7FFF
    last = word >> 16 & 1
    return word + 0x7FFF + last >> 16''',
    check=check_rounding,
    wrong_tries=(
        WrongTry(
            "def bf16_bits(w): return w >> 16", "word 0x3f808001: 0x3f80, expected 0x3f81: above the middle"
        ),
        WrongTry(
            "def bf16_bits(w): return (w + 0x8000) >> 16 & 0xFFFF",
            "word 0x3f808000: 0x3f81, expected 0x3f80: exactly the middle: to the even one of the two neighbours, "
            "which is below; bit 0 (fraction) is the highest that differs",
        ),
        WrongTry(
            "def bf16_bits(w): return w + 0x7FFF >> 16 & 0xFFFF",
            "word 0x3f818000: 0x3f81, expected 0x3f82: exactly the middle: to the even one of the two neighbours, "
            "which is above",
        ),
        WrongTry(
            "def bf16_bits(w): return w + 0x7FFF + (w >> 16 & 1) >> 16 & 0xFFFF",
            "word 0x7f800001: 0x7f80, which is no NaN: a NaN whose payload is in the lower half only",
        ),
        WrongTry(
            "def bf16_bits(w):\n"
            " if w & 0x7FFFFFFF > 0x7F800000: return w >> 16\n"
            " return w + 0x7FFF + (w >> 16 & 1) >> 16",
            "word 0x7f800001: 0x7f80, which is no NaN",
        ),
        WrongTry(
            "def bf16_bits(w):\n"
            " if w & 0x7FFFFFFF > 0x7F800000: return 0x7FFF\n"
            " up = w & 0xFFFF > 0x8000 or w & 0x1FFFF == 0x18000\n"
            " return w >> 16 & 0xFF80 | ((w >> 16) + up & 0x7F)",
            "word 0x3fff8000: 0x3f80, expected 0x4000: rounding up carries into the exponent; bit 14 (exponent)",
        ),
        WrongTry(
            "def bf16_bits(w):\n"
            " if w & 0x7F800000 == 0: return w >> 31 << 15\n"
            " if w & 0x7FFFFFFF > 0x7F800000: return 0x7FFF\n"
            " return w + 0x7FFF + (w >> 16 & 1) >> 16",
            "word 0x00018000: 0x0000, expected 0x0002: subnormals are rounded like all others",
        ),
        WrongTry(
            "def bf16_bits(w): return w + 0x7FFF + (w >> 16 & 1) >> 16",
            "word 0x7f800001: 0x7f80, which is no NaN",
        ),
        WrongTry("def bf16_bits(w): return w / 65536", "it returned 16256.0; a whole number is needed"),
        WrongTry("def bf16_bits(w): return w", "it returned 0x3f800000, which has not 16 bits"),
    ),
)

LATENT_BITS = Exercise(
    name="latent_bits",
    title="no -0.0 in the mailbox",
    problem="""\
Complete `latent_bits(word)`: the 16 bits that the kernel publishes for a sum given as its 32 FP32 bits, under the
policy "latent": what rounding makes of it (`bf16.round_word(word)` does that), except that no -0.0 is ever published.
Everything else stays as it is, NaN included.""",
    skeleton='''def latent_bits(word: int) -> int:
    """16 bits to publish: word 0..2**32 - 1. `bf16.round_word(word)` rounds."""
    raise NotImplementedError''',
    hints=(
        "Which 16 bits are -0.0? Only the sign.",
        "-0.0 can go in, and it can also be what comes *out* of rounding. After which step do you know?",
        "Round first; if the result is 0x8000, return 0.",
    ),
    solution='''def latent_bits(word: int) -> int:
    """16 bits to publish: word 0..2**32 - 1. `bf16.round_word(word)` rounds."""
    bits = bf16.round_word(word)
    return 0 if bits == 0x8000 else bits''',
    check=check_latent,
    wrong_tries=(
        WrongTry(
            "def latent_bits(w): return bf16.round_word(w)",
            "word 0x80000000: 0x8000, expected 0x0000: -0.0 means `never written`; bit 15 (sign)",
        ),
        WrongTry(
            "def latent_bits(w): return bf16.round_word(0 if w == 0x80000000 else w)",
            "word 0x80000001: 0x8000, expected 0x0000: a tiny negative sum rounds to -0.0",
        ),
        WrongTry(
            "def latent_bits(w): return bf16.round_word(0 if 0x80000000 <= w < 0x80008000 else w)",
            "word 0x80008000: 0x8000, expected 0x0000: a tiny negative sum rounds to -0.0",
        ),
        WrongTry(
            "def latent_bits(w): return bf16.round_word(w if w & 0x7F800000 else 0)",
            "word 0x80008001: 0x0000, expected 0x8001: the smallest BF16 below zero",
        ),
        WrongTry(
            "def latent_bits(w): return bf16.round_word(w) & 0x7FFF",
            "word 0x80008001: 0x0001, expected 0x8001: the smallest BF16 below zero is a value like any other; "
            "bit 15 (sign)",
        ),
        WrongTry("def latent_bits(w): return -0.0", "it returned -0.0; a whole number is needed"),
        WrongTry(
            "def latent_bits(w):\n b = bf16.round_word(w)\n return 0 if b == 0x8000 or b & 0x7F80 == 0x7F80 else b",
            "word 0xff800000: 0x0000, expected 0xff80: infinity stays",
        ),
    ),
    names=(("bf16", bf16),),
)


# ---- the order of a sum ----


def _in_turn(terms: Array) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _tree(terms: Array) -> Any:
    while len(terms) > 1:
        terms = terms[::2] + terms[1::2]
    return terms[0]


def _reference(
    terms: Array,
    chains: int,
    *,
    cut: str = "round robin",
    chain_sum: Callable[[Array], Any] = _tree,
    part_sum: Callable[[Array], Any] = _in_turn,
) -> Any:
    sums = []
    for part in terms:
        pieces = part.reshape(-1, chains).T if cut == "round robin" else part.reshape(chains, -1)
        sums.append(chain_sum(np.stack([_in_turn(piece) for piece in pieces])))
    return part_sum(np.stack(sums))


# What a wrong sum would be, so that the check can say which step it comes from.
MISTAKES: dict[str, Callable[[Array, int], Any]] = {
    "all the MMAs of a part were added one after the other, without chains": lambda terms, chains: _reference(
        terms, 1
    ),
    "each chain got neighbouring MMAs; MMA i goes to chain i % chains": lambda terms, chains: _reference(
        terms, chains, cut="blocks"
    ),
    "the chains were added one after the other, not pairwise": lambda terms, chains: _reference(
        terms, chains, chain_sum=_in_turn
    ),
    "the parts were added pairwise, not one after the other": lambda terms, chains: _reference(
        terms, chains, part_sum=_tree
    ),
    "the parts were added from the last to the first": lambda terms, chains: _reference(terms[::-1], chains),
    "the sum was computed in float64": lambda terms, chains: np.float32(
        _reference(terms.astype(np.float64), chains)
    ),
}
# (parts, MMAs per part, chains): one step at a time, then the kernel's own shapes.
SHAPES = ((1, 8, 1), (1, 16, 2), (1, 24, 4), (4, 2, 1), (4, 24, 4), (8, 12, 2), (16, 6, 1))


_SAMPLES = 16  # of every shape: two orders often agree by chance in one of them, hardly in all


def sum_terms(parts: int, mmas: int, sample: int) -> Array:
    """FP32 terms [parts, mmas] of very different sizes, whose sum depends on the order."""
    rng = np.random.default_rng([parts, mmas, sample])
    sizes = np.exp2(rng.integers(-6, 7, (parts, mmas)))
    return (rng.standard_normal((parts, mmas)) * sizes).astype(np.float32)


def check_sum(answer: Answer) -> None:
    """Bit for bit, for every shape; a wrong sum is compared with what known mistakes give."""
    for parts, mmas, chains in SHAPES:
        where = f"{parts} part(s) of {mmas} MMAs, {chains} chain(s)"
        samples = [sum_terms(parts, mmas, sample) for sample in range(_SAMPLES)]
        sums = [_sum(answer, terms, chains, where) for terms in samples]
        for got, terms in zip(sums, samples, strict=True):
            expected = np.float32(_reference(terms, chains))
            if got != expected:
                bits, wanted = (int(value.view(np.uint32)) for value in (got, expected))
                raise WrongAnswer(
                    f"{where}: {got} = {bits:#010x}, expected {expected} = {wanted:#010x}"
                    + _why(sums, samples, chains)
                )


def _sum(answer: Answer, terms: Array, chains: int, where: str) -> np.float32:
    try:
        got = answer(terms.copy(), chains)
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WrongAnswer(f"{where}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(got, np.float32):
        raise WrongAnswer(f"{where}: it returned {got!r}; an np.float32 is needed, as all sums are FP32")
    return got


def _why(sums: list[np.float32], samples: list[Array], chains: int) -> str:
    """The known mistake that gives just these sums, if there is one."""
    for name, wrong in MISTAKES.items():
        if all(np.float32(wrong(terms, chains)) == got for got, terms in zip(sums, samples, strict=True)):
            return f"; that is what comes out if {name}"
    return ""


CONTRACT_SUM = Exercise(
    name="contract_sum",
    title="the kernel's order",
    problem="""\
Complete `contract_sum(terms, chains)`: `terms` is an FP32 array [parts, MMAs]; element (p, i) stands for what MMA
number i of K part p adds. MMA i adds to chain i % chains of its part (there are 1, 2 or 4, each starting with its
first term). A part's chains are added pairwise, as a tree; the parts are then added in turn, from part 0 on.
Return the np.float32 that comes out, to the bit. Index and slice `terms` as you like, its elements add in FP32.""",
    skeleton='''def contract_sum(terms: np.ndarray, chains: int) -> np.float32:
    """The sum in the kernel's order: terms [parts, MMAs] float32, chains 1, 2 or 4."""
    raise NotImplementedError''',
    hints=(
        "`terms[p, c::chains]` are the terms of chain c of part p, in order.",
        "Adding element by element (`total = total + term`) is strictly from left to right. `np.sum` is not: it has "
        "an order of its own.",
        "Pairwise: `while len(sums) > 1: sums = [a + b for a, b in zip(sums[::2], sums[1::2])]`.",
    ),
    solution='''def contract_sum(terms: np.ndarray, chains: int) -> np.float32:
    """The sum in the kernel's order: terms [parts, MMAs] float32, chains 1, 2 or 4."""
    def in_turn(values):
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    parts = []
    for part in terms:
        sums = [in_turn(part[chain::chains]) for chain in range(chains)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        parts.append(sums[0])
    return in_turn(parts)''',
    check=check_sum,
    wrong_tries=(
        WrongTry(
            "def contract_sum(t, c):\n"
            " total = np.float32(0)\n"
            " for v in t.ravel(): total = total + v\n"
            " return total",
            "that is what comes out if all the MMAs of a part were added one after the other, without chains",
        ),
        WrongTry(
            "def contract_sum(t, c):\n"
            " return in_turn([tree([in_turn(p.reshape(c, -1)[i]) for i in range(c)]) for p in t])",
            "if each chain got neighbouring MMAs; MMA i goes to chain i % chains",
        ),
        WrongTry(
            "def contract_sum(t, c): return in_turn([in_turn([in_turn(p[i::c]) for i in range(c)]) for p in t])",
            "1 part(s) of 24 MMAs, 4 chain(s)",
        ),
        WrongTry(
            "def contract_sum(t, c): return tree([tree([in_turn(p[i::c]) for i in range(c)]) for p in t])",
            "that is what comes out if the parts were added pairwise, not one after the other",
        ),
        WrongTry(
            "def contract_sum(t, c): return in_turn([tree([in_turn(p[i::c]) for i in range(c)]) for p in t][::-1])",
            "that is what comes out if the parts were added from the last to the first",
        ),
        WrongTry("def contract_sum(t, c): return t.sum()", "1 part(s) of 8 MMAs, 1 chain(s)"),
        WrongTry("def contract_sum(t, c): return float(t.sum())", "an np.float32 is needed"),
        WrongTry(
            "def contract_sum(t, c):\n"
            " t = t.astype(np.float64)\n"
            " return np.float32(in_turn([tree([in_turn(p[i::c]) for i in range(c)]) for p in t]))",
            "that is what comes out if the sum was computed in float64",
        ),
        WrongTry("def contract_sum(t, c): return t[c]", "it raised IndexError"),
    ),
    names=(("np", np), ("in_turn", _in_turn), ("tree", lambda sums: _tree(np.array(sums)))),
)
