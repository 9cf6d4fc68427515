"""Notebook 11's exercises: where a chunk lies, which generation does what, and which polling loops are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK
from oproj_lib.layouts.publish import mailbox_offset
from oproj_lib.lessons.exercise import (
    Answer,
    Exercise,
    WrongAnswer,
    WrongTry,
    call,
    pair,
    place,
    whole,
)
from oproj_lib.problem import N

# ---- where a chunk lies ----

PLACE_NAMES = ("call", "rank", "token", "column", "ranks", "tokens")


def chunk_place(n: int, rank: int, token: int, column: int, ranks: int, tokens: int) -> tuple[int, int]:
    """(slot, byte offset of the chunk) of what ``rank`` publishes in call ``n`` for (token, column).

    The mailbox is one-shot, BF16 [3 * ranks, tokens, 7168].
    """
    slot = int(layout.slot(n % layout.GENERATIONS, rank, ranks))
    first = column // CHUNK * CHUNK
    return slot, int(mailbox_offset(slot, token, first, tokens, N)) * BF16_BYTES


def check_place(answer: Answer) -> None:
    """First, last and some places in between, in the order in which mistakes show one at a time."""
    rng = np.random.default_rng(0)
    places = [
        (0, 0, 0, 0, 2, 4),
        (0, 0, 0, 8, 2, 4),
        (0, 0, 0, 13, 2, 4),
        (0, 0, 1, 0, 2, 4),
        (0, 1, 0, 0, 2, 4),
    ]
    places += [(1, 0, 0, 0, 2, 4), (2, 1, 3, 7167, 2, 4), (3, 1, 0, 0, 2, 4), (100, 7, 63, 7160, 8, 64)]
    for _ in range(40):
        ranks, tokens = int(rng.choice((2, 4, 8, 16))), int(rng.integers(1, 65))
        chosen = (rng.integers(0, high) for high in (1000, ranks, tokens, N))
        places.append((*(int(value) for value in chosen), ranks, tokens))  # type: ignore[arg-type]
    for at in places:
        where = place(PLACE_NAMES, at)
        got, expected = pair(call(answer, *at, names=PLACE_NAMES), where), chunk_place(*at)
        if got != expected:
            raise WrongAnswer(f"{where}: it returned {got}. {_why_there(at, got, expected)}")


def _why_there(at: tuple[int, ...], got: tuple[int, int], expected: tuple[int, int]) -> str:
    n, rank, token, column, _, tokens = at
    slot, byte = expected
    if got[0] != slot:
        return f"Call {n} publishes into generation {n % 3}, and rank {rank} has slot {slot} of it"
    if byte < got[1] < byte + 16:
        return f"Byte {got[1]:,} is inside the chunk, which begins at byte {byte:,}"
    if got[1] * BF16_BYTES == byte:
        return f"Slot {slot} is right; {got[1]:,} counts elements, of {BF16_BYTES} bytes each"
    first = column // CHUNK * CHUNK
    return (
        f"Slot {slot} is right; the chunk of token {token} begins with column {first}, element "
        f"({slot} * {tokens} + {token}) * {N} + {first}, byte {byte:,}"
    )


CHUNK_PLACE = Exercise(
    name="chunk_place",
    title="where does a chunk lie?",
    problem="""\
Complete `chunk_place(call, rank, token, column, ranks, tokens)`. The mailbox of a one-shot exchange is BF16
[3 * ranks, tokens, 7168]. In call number `call`, counted from 0, rank `rank` publishes the chunk that holds (token,
column). Return its slot, and the byte at which the chunk begins, counted from the start of the mailbox: `(slot,
byte)`.""",
    skeleton='''def chunk_place(call: int, rank: int, token: int, column: int, ranks: int, tokens: int):
    """(slot, first byte of the chunk) in a mailbox [3 * ranks, tokens, 7168] of BF16."""
    raise NotImplementedError''',
    hints=(
        "Which generation does call 0 publish into, which call 1, which call 3? And which slots does a generation "
        "have?",
        "Slots of a generation are neighbours: generation 1 begins with slot `ranks`. A chunk has 8 columns, and "
        "begins with a multiple of 8.",
        "`slot = call % 3 * ranks + rank`; the element is `(slot * tokens + token) * 7168 + first`, with `first = "
        "column // 8 * 8`; a BF16 has 2 bytes.",
    ),
    solution='''def chunk_place(call: int, rank: int, token: int, column: int, ranks: int, tokens: int):
    """(slot, first byte of the chunk) in a mailbox [3 * ranks, tokens, 7168] of BF16."""
    slot = call % 3 * ranks + rank
    first = column // 8 * 8  # 8 columns of 2 bytes: a chunk of 16
    return slot, 2 * ((slot * tokens + token) * 7168 + first)''',
    check=check_place,
    wrong_tries=(
        WrongTry(
            "def chunk_place(c, r, t, n, R, M): s = c % 3 * R + r; return s, 2 * ((s * M + t) * 7168 + n)",
            "call 0, rank 0, token 0, column 13, ranks 2, tokens 4: it returned (0, 26). Byte 26 is inside the chunk",
        ),
        WrongTry(
            "def chunk_place(c, r, t, n, R, M): s = c % 3 * R + r; return s, (s * M + t) * 7168 + n // 8 * 8",
            "column 8, ranks 2, tokens 4: it returned (0, 8). Slot 0 is right; 8 counts elements",
        ),
        WrongTry(
            "def chunk_place(c, r, t, n, R, M): s = r * 3 + c % 3; return s, 2 * ((s * M + t) * 7168 + n // 8 * 8)",
            "call 0, rank 1, token 0, column 0, ranks 2, tokens 4: it returned (3, 172032). Call 0 publishes into "
            "generation 0, and rank 1 has slot 1 of it",
        ),
        WrongTry(
            "def chunk_place(c, r, t, n, R, M): s = c * R + r; return s, 2 * ((s * M + t) * 7168 + n // 8 * 8)",
            "call 3, rank 1, token 0, column 0, ranks 2, tokens 4: it returned (7, 401408). Call 3 publishes into "
            "generation 0",
        ),
        WrongTry(
            "def chunk_place(c, r, t, n, R, M): s = c % 3 * R + r; return s, 2 * ((t * 3 * R + s) * 7168 + n // 8 * 8)",
            "call 0, rank 0, token 1, column 0, ranks 2, tokens 4: it returned (0, 86016). Slot 0 is right; the chunk "
            "of token 1 begins with column 0, element (0 * 4 + 1) * 7168 + 0, byte 14,336",
        ),
        WrongTry("def chunk_place(*at): return 0", "it returned 0; a pair"),
    ),
)


# ---- which generation does what ----

TURN_NAMES = ("call", "tokens", "previous_tokens")
TURN_PARTS = ("publish", "arm", "tokens_to_arm", "poll", "tokens_to_poll")


def turn(n: int, tokens: int, previous_tokens: int) -> tuple[int, int, int, int, int]:
    """What a rank does in call ``n``: ``TURN_PARTS``."""
    generation = n % layout.GENERATIONS
    armed = int(layout.previous_generation(generation))
    return generation, armed, previous_tokens, generation, tokens


def check_turn(answer: Answer) -> None:
    """Calls with as many, more and fewer tokens than the one before."""
    for at in ((0, 4, 0), (1, 4, 4), (2, 4, 4), (3, 4, 4), (4, 1, 4), (5, 9, 1), (6, 64, 9), (300, 2, 64)):
        where = place(TURN_NAMES, at)
        got = call(answer, *at, names=TURN_NAMES)
        if not isinstance(got, tuple | list) or len(got) != len(TURN_PARTS):
            raise WrongAnswer(f"{where}: it returned {got!r}; {len(TURN_PARTS)} numbers are needed")
        for part, value, expected in zip(TURN_PARTS, got, turn(*at), strict=True):
            if whole(value, f"{where}, {part}") != expected:
                raise WrongAnswer(f"{where}: {part} is {value}, it must be {expected}. {_why_turn(part, at)}")


def _why_turn(part: str, at: tuple[int, int, int]) -> str:
    n, tokens, previous = at
    if part == "arm":
        ahead = int(layout.next_generation(n % layout.GENERATIONS))
        return f"Generation {ahead} may already hold what a faster peer publishes in call {n + 1}"
    if part == "tokens_to_arm":
        return (
            f"Call {n - 1} had {previous} tokens: what it left, and no more, has to go"
            if n
            else "There was no call before"
        )
    if part == "tokens_to_poll":
        return f"This call has {tokens} tokens; nobody publishes others"
    return f"Call {n} uses generation {n} % 3"


TURN = Exercise(
    name="turn",
    title="which generation does what?",
    problem="""\
Complete `turn(call, tokens, previous_tokens)`: call number `call`, counted from 0, has `tokens` tokens, and the call
before it had `previous_tokens` (0 before the first). Return five numbers: the generation to publish into, the
generation to arm again, over how many tokens, the generation to poll, and over how many tokens.""",
    skeleton='''def turn(call: int, tokens: int, previous_tokens: int):
    """(publish, arm, tokens to arm, poll, tokens to poll); generations are 0, 1, 2."""
    raise NotImplementedError''',
    hints=(
        "Who polls reads what was published in the *same* call. So two of the five numbers are the same.",
        "Armed is what has been read and will be written next: that of the last call, neither this one's nor the "
        "next one's.",
        "`(call - 1) % 3`; in Python that is 2 for call 0. Its data are as many tokens as the *last* call had.",
    ),
    solution='''def turn(call: int, tokens: int, previous_tokens: int):
    """(publish, arm, tokens to arm, poll, tokens to poll); generations are 0, 1, 2."""
    return call % 3, (call - 1) % 3, previous_tokens, call % 3, tokens''',
    check=check_turn,
    wrong_tries=(
        WrongTry(
            "def turn(call, tokens, previous): return call % 3, (call + 1) % 3, previous, call % 3, tokens",
            "call 0, tokens 4, previous_tokens 0: arm is 1, it must be 2. Generation 1 may already hold",
        ),
        WrongTry(
            "def turn(call, tokens, previous): return call % 3, (call - 1) % 3, tokens, call % 3, tokens",
            "call 0, tokens 4, previous_tokens 0: tokens_to_arm is 4, it must be 0. There was no call before",
        ),
        WrongTry(
            "def turn(call, tokens, previous):\n"
            "    return call % 3, (call - 1) % 3, min(tokens, previous), call % 3, tokens",
            "call 4, tokens 1, previous_tokens 4: tokens_to_arm is 1, it must be 4. Call 3 had 4 tokens",
        ),
        WrongTry(
            "def turn(call, tokens, previous): return call % 3, (call - 1) % 3, previous, (call - 1) % 3, tokens",
            "call 0, tokens 4, previous_tokens 0: poll is 2, it must be 0",
        ),
        WrongTry(
            "def turn(call, tokens, previous): return call % 2, (call - 1) % 2, previous, call % 2, tokens",
            "call 0, tokens 4, previous_tokens 0: arm is 1, it must be 2",
        ),
        WrongTry(
            "def turn(call, tokens, previous): return call % 3, (call - 1) % 3, previous",
            "5 numbers are needed",
        ),
    ),
)


# ---- polling loops ----

WRONG_LOOPS: Mapping[str, str] = {
    "B": "only the last word is tested, and words may arrive in any order",
    "C": (
        "the load is weak: against a store of another GPU that is a data race, and in the machine code nothing keeps "
        "it from finding the same old line in L1 every time"
    ),
    "E": "it goes on only while *all* words are armed, so it stops when the first one has arrived",
    "F": "one chunk is tested and two are used: nothing may be inferred from an arrived word but itself",
    "H": "the address is one that has no rank to load from: only `multimem` instructions may use it",
}
RIGHT_LOOPS: Mapping[str, str] = {
    "A": "It loads 16 bytes past L1, and stops when none of the four words is armed",
    "D": "To the memory model two loads of 8 bytes are no less than one of 16, and all four words are tested",
    "G": "To the memory model volatile is relaxed at system scope, and it gives the same machine code",
}


def check_loops(answer: Answer) -> None:
    """Says about one letter at a time why it belongs into the answer, or not."""
    got: Any = call(answer, names=())
    if not isinstance(got, str | set | frozenset | list | tuple) or not all(
        isinstance(letter, str) for letter in got
    ):
        raise WrongAnswer(f"it returned {got!r}; letters are needed, as in 'AB'")
    letters = {letter.upper() for letter in got}
    if unknown := sorted(letters - WRONG_LOOPS.keys() - RIGHT_LOOPS.keys()):
        raise WrongAnswer(f"there is no loop {unknown[0]!r}, only A to H")
    for letter, reason in RIGHT_LOOPS.items():
        if letter in letters:
            raise WrongAnswer(f"loop {letter} is in your answer, but it is right. {reason}")
    if missing := sorted(WRONG_LOOPS.keys() - letters):
        raise WrongAnswer(f"{len(missing)} not found yet. In one of them, {WRONG_LOOPS[missing[0]]}")


WRONG_POLLS = Exercise(
    name="wrong_polls",
    title="which of these loops are wrong?",
    problem="""\
`a` is the address of a chunk in this rank's own copy, `m` the multicast address of the same chunk, `a0` and `a1` the
chunks of rank 0 and 1. `S` is 0x80008000; `any` and `all` go over the words loaded. After the loop the chunk is used.

| | loop |
|---|---|
| A | `do ld.relaxed.sys.global.v4.b32 {w0,w1,w2,w3}, [a] while any(w == S)` |
| B | `do ld.relaxed.sys.global.v4.b32 {w0,w1,w2,w3}, [a] while w3 == S` |
| C | `do ld.global.v4.b32 {w0,w1,w2,w3}, [a] while any(w == S)` |
| D | `do ld.relaxed.sys.global.v2.b32 {w0,w1}, [a]` and `{w2,w3}, [a+8] while any(w == S)` |
| E | `do ld.relaxed.sys.global.v4.b32 {w0,w1,w2,w3}, [a] while all(w == S)` |
| F | load both: `do ld.relaxed.sys.global.v4.b32` of `[a0]` and `[a1] while any(w == S for w of a1)` |
| G | `do ld.volatile.global.v4.b32 {w0,w1,w2,w3}, [a] while any(w == S)` |
| H | `do ld.relaxed.sys.global.v4.b32 {w0,w1,w2,w3}, [m] while any(w == S)` |

Complete `wrong_polls()`: the letters of the wrong ones, as one string.""",
    skeleton='''def wrong_polls() -> str:
    """Letters of the loops that are wrong."""
    raise NotImplementedError''',
    hints=(
        "Three questions for each: is every word tested that is used? Does the load really look at memory again? "
        "Whose memory is it?",
        "To the memory model a vector access is several accesses in no particular order. So more, narrower loads are "
        "no worse than one wide load, and a word that has arrived says nothing about another.",
        "Five are wrong. Two test too few words, one stops too early, one load is weak, one address is not one to "
        "load from.",
    ),
    solution='''def wrong_polls() -> str:
    """Letters of the loops that are wrong."""
    return "BCEFH"  # one word; a weak load; all instead of any; the other rank; multicast''',
    check=check_loops,
    wrong_tries=(
        WrongTry(
            "def wrong_polls(): return 'BCDEFH'", "loop D is in your answer, but it is right. To the memory"
        ),
        WrongTry(
            "def wrong_polls(): return 'BCEFGH'", "loop G is in your answer, but it is right. To the memory"
        ),
        WrongTry(
            "def wrong_polls(): return 'BCEF'",
            "1 not found yet. In one of them, the address is one that has no rank",
        ),
        WrongTry("def wrong_polls(): return 'BEH'", "2 not found yet. In one of them, the load is weak"),
        WrongTry("def wrong_polls(): return 'abc'", "loop A is in your answer, but it is right"),
        WrongTry("def wrong_polls(): return 'BX'", "there is no loop 'X'"),
        WrongTry("def wrong_polls(): return 3", "letters are needed"),
    ),
)
