"""Instructions in which the lanes of a warp work together: shfl, vote, match, redux, elect, activemask."""

from __future__ import annotations

import numpy as np

from .case import Array, Case, Result, kernel_case, load_operand
from .operands import seed_of

FAMILY = "warp"
THREADS, GRID = 128, 8
FULL = "0xffffffff"


def cases() -> list[Case]:
    return [*shuffles(), *votes(), *matches(), *reductions(), *elections()]


def generator(text: str) -> np.random.Generator:
    return np.random.default_rng(seed_of(text))


def words(text: str, high: int = 1 << 32) -> Array:
    return generator(text).integers(0, high, THREADS * GRID, np.uint64).astype(np.uint32)


def member_masks() -> Array:
    """Per warp: everyone, one lane, halves, alternate lanes, random lanes (the same mask in all its lanes)."""
    masks = [0xFFFFFFFF, 1, 0x80000000, 0xFFFF, 0xFFFF0000, 0x55555555, 0xAAAAAAAA, 0x00010000]
    rest = generator("masks").integers(1, 1 << 32, THREADS * GRID // 32 - len(masks))
    return np.repeat(np.array([*masks, *rest], np.uint32), 32)


def group_masks() -> Array:
    """Per lane the mask of its group: every warp is divided into up to four disjoint groups."""
    group = generator("groups").integers(0, 4, (THREADS * GRID // 32, 32))
    same = group[:, :, None] == group[:, None, :]
    return (same << np.arange(32)).sum(axis=2).astype(np.uint32).reshape(-1)


def pred_words(text: str) -> Array:
    """0 or 1 per lane; some warps are unanimous."""
    rows = words(text, 2).reshape(-1, 32)
    rows[::5], rows[1::5] = 0, 1
    return rows.reshape(-1)


def with_masks(
    name: str, instructions: dict[str, str], inputs: dict[str, tuple[str, Array]], covers: str
) -> list[Case]:
    """The same instructions by whole warps, by the lanes that a mask names, and by disjoint groups.

    `instructions`: text with {d} and {mask} -> type of d (d|e: type of d, and a predicate).
    """
    found = []
    for title, masks in (("all lanes", None), ("some lanes", member_masks()), ("groups", group_masks())):
        arrays = {n: array for n, (_, array) in inputs.items()}
        body = [line for n, (kind, _) in inputs.items() for line in load_operand(n, kind)]
        declarations = [f".reg .{kind} %{n};" for n, (kind, _) in inputs.items()]
        results: list[Result] = []
        calls: list[str] = []
        for text, kind in instructions.items():
            d, e = f"%d{len(results)}", f"%d{len(results) + 1}"
            label = text.replace("{d}", "d").replace("{e}", "p").replace("{mask}", "mask").replace("%", "")
            calls.append(text.format(d=d, e=e, mask=FULL if masks is None else "%mask"))
            body.append(f"mov.{kind} {d}, 0;" if kind != "pred" else f"setp.ne.b32 {d}, %lane, %lane;")
            results.append(Result(d, kind, label))
            if "{e}" in text:
                body.append(f"setp.ne.b32 {e}, %lane, %lane;")
                results.append(Result(e, "pred", label + " (p)"))
        if masks is not None:
            arrays["mask"] = masks
            declarations.append(".reg .b32 %mask;")
            body += [*load_operand("mask", "b32"), "shr.b32 %t1, %mask, %lane;", "and.b32 %t1, %t1, 1;"]
            body += ["setp.eq.b32 %p0, %t1, 0;", "@%p0 bra STORE;", *calls, "STORE:"]
        else:
            body += calls
        found.append(
            kernel_case(
                f"{name}, {title}", FAMILY, body, results, covers=covers, inputs=arrays, grid=GRID,
                declarations=tuple(declarations),
            )
        )  # fmt: skip
    return found


def shuffles() -> list[Case]:
    """Operands b and c (lane and clamp/segment mask) vary per lane, far out of range too."""
    modes = ("up", "down", "bfly", "idx")
    inputs = {
        "a": ("b32", words("shfl a")),
        "b": ("b32", words("shfl b", 80)),
        "c": ("b32", words("shfl c", 1 << 13)),
    }
    texts = {f"shfl.sync.{mode}.b32 {{d}}|{{e}}, %a, %b, %c, {FULL};": "b32" for mode in modes}
    body = [line for n in "abc" for line in load_operand(n, "b32")]
    results: list[Result] = []
    for text in texts:
        d, e = f"%d{len(results)}", f"%d{len(results) + 1}"
        body.append(text.format(d=d, e=e))
        label = text.format(d="d", e="p").replace("%", "")
        results += [Result(d, "b32", label), Result(e, "pred", label + " (p)")]
    arrays = {n: array for n, (_, array) in inputs.items()}
    found = [
        kernel_case("shfl", FAMILY, body, results, covers="shfl", inputs=arrays, grid=GRID,
                    declarations=(".reg .b32 %a, %b, %c;",))
    ]  # fmt: skip
    # The usual literal operands, and a shuffle among the lanes of one half.
    usual = [
        f"shfl.sync.bfly.b32 {{d}}, %a, {distance}, 31, {FULL};" for distance in (1, 2, 4, 8, 16)
    ] + [f"shfl.sync.up.b32 {{d}}|{{e}}, %a, 1, 0, {FULL};", f"shfl.sync.down.b32 {{d}}|{{e}}, %a, 4, 0x181f, {FULL};",
         f"shfl.sync.idx.b32 {{d}}, %a, 0, 31, {FULL};"]  # fmt: skip
    body, results = load_operand("a", "b32"), []
    for text in usual:
        d, e = f"%d{len(results)}", f"%d{len(results) + 1}"
        label = text.format(d="d", e="p").replace("%", "")
        body.append(text.format(d=d, e=e))
        results.append(Result(d, "b32", label))
        if "{e}" in text:
            results.append(Result(e, "pred", label + " (p)"))
    found.append(
        kernel_case("shfl, usual forms", FAMILY, body, results, covers="shfl", inputs={"a": arrays["a"]}, grid=GRID,
                    declarations=(".reg .b32 %a;",))
    )  # fmt: skip
    halves = ["setp.ge.u32 %p0, %lane, 16;", *load_operand("a", "b32"), "@%p0 bra UPPER;",
              "shfl.sync.bfly.b32 %d0, %a, 3, 0x101f, 0x0000ffff;", "bra STORE;", "UPPER:",
              "shfl.sync.bfly.b32 %d0, %a, 5, 0x101f, 0xffff0000;", "STORE:"]  # fmt: skip
    label = "shfl.sync.bfly.b32 in the two branches of a warp"
    found.append(
        kernel_case("shfl in two branches", FAMILY, halves, [Result("%d0", "b32", label)], covers="shfl bra",
                    inputs={"a": arrays["a"]}, grid=GRID, declarations=(".reg .b32 %a;",))
    )  # fmt: skip
    return found


def votes() -> list[Case]:
    texts = {f"vote.sync.{mode}.pred {{d}}, %a, {{mask}};": "pred" for mode in ("all", "any", "uni")}
    texts |= {f"vote.sync.{mode}.pred {{d}}, !%a, {{mask}};": "pred" for mode in ("all", "any")}
    texts |= {"vote.sync.ballot.b32 {d}, %a, {mask};": "b32", "vote.sync.ballot.b32 {d}, !%a, {mask};": "b32"}
    return with_masks("vote", texts, {"a": ("pred", pred_words("vote"))}, "vote")


def matches() -> list[Case]:
    found = []
    rows = words("match", 5).reshape(-1, 32)
    rows[::4] = 7  # unanimous
    narrow = rows.reshape(-1)
    wide = narrow.astype(np.uint64) << np.uint64(31) | np.uint64(1)
    for kind, array in (("b32", narrow), ("b64", wide)):
        texts = {
            f"match.any.sync.{kind} {{d}}, %a, {{mask}};": "b32",
            f"match.all.sync.{kind} {{d}}|{{e}}, %a, {{mask}};": "b32",
        }
        found += with_masks(f"match {kind}", texts, {"a": (kind, array)}, "match")
    return found


def reductions() -> list[Case]:
    texts = {
        f"redux.sync.{op}.{kind} {{d}}, %a, {{mask}};": "b32"
        for kind in ("u32", "s32")
        for op in ("add", "min", "max")
    }
    texts |= {f"redux.sync.{op}.b32 {{d}}, %a, {{mask}};": "b32" for op in ("and", "or", "xor")}
    return with_masks("redux", texts, {"a": ("b32", words("redux"))}, "redux")


def elections() -> list[Case]:
    found = with_masks("elect", {"elect.sync {d}|{e}, {mask};": "b32"}, {}, "elect")
    label = "activemask.b32 d, by all lanes"
    found.append(
        kernel_case(
            "activemask", FAMILY, ["activemask.b32 %d0;"], [Result("%d0", "b32", label)], covers="activemask"
        )
    )
    return found
