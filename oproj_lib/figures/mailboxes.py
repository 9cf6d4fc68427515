"""Mailboxes: where a chunk lies, what every generation is used for in every call, and what one or two shots cost."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from oproj_lib.exchange_costs import SHOTS, RecordedExchange, break_even, cost
from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PARTS,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Picture,
    bare,
    plain,
)
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES
from oproj_lib.layouts.mailbox import CHUNK_WORDS, GENERATIONS
from oproj_lib.layouts.publish import mailbox_offset
from oproj_lib.measured_exchange import ALTERNATIVES, TARGET_BATCH, TARGET_US, ExchangeRow, MeasuredExchange
from oproj_lib.problem import CTAS, MAX_BATCH, ROWS_PER_CTA, N


def _frame(axes: Axes, left: float, top: float, width: float, height: float) -> None:
    """What is being talked about."""
    axes.add_patch(Rectangle((left, top), width, height, edgecolor=VERMILLION, facecolor="none", lw=2.2))


# ---- where a chunk lies ----


def mailbox_map(ranks: int, tokens: int, *, call: int, writer: int, token: int, column: int) -> Picture:
    """A one-shot mailbox [3 * ranks, tokens, 7168], one of its slots, and one chunk of that.

    Marked: the chunk that rank ``writer`` publishes in call number ``call`` for (token, column).

    Raises ValueError for a place that does not exist.
    """
    for name, value, count in (("writer", writer, ranks), ("token", token, tokens), ("column", column, N)):
        if not 0 <= value < count:
            raise ValueError(f"{name} = {value}: choose 0 to {count - 1}")
    generation = call % GENERATIONS
    slot = layout.slot(generation, writer, ranks)
    picture = Picture(11.5, 4.6)
    left, middle, right = picture.subplots(1, 3, gridspec_kw={"width_ratios": [2.6, 5.2, 4.2]})
    _slots(left, ranks, slot)
    _slot(middle, tokens, slot, token, column)
    byte = _chunk(right, tokens, slot, token, column)
    picture.alt = (
        f"Left: the {layout.slots_of(ranks)} slots of a mailbox for {ranks} ranks, one after another in memory, "
        f"coloured by generation; slot {slot}, generation {generation} of rank {writer}, is marked. Middle: that slot, "
        f"{tokens} tokens by {N} columns, in {CTAS} bands of {ROWS_PER_CTA} columns, one per CTA; the chunk of token "
        f"{token}, column {column} lies in the band of CTA {column // ROWS_PER_CTA}. Right: the chunk, columns "
        f"{column // CHUNK * CHUNK} to {column // CHUNK * CHUNK + CHUNK - 1}, as {CHUNK_WORDS} words of 4 bytes from "
        f"byte {byte:,} of the mailbox on."
    )
    return picture


def _slots(axes: Axes, ranks: int, chosen: int) -> None:
    bare(axes, title=f"{layout.slots_of(ranks)} slots")
    for generation in range(GENERATIONS):
        for rank in range(ranks):
            slot = layout.slot(generation, rank, ranks)
            axes.add_patch(Rectangle((0, slot), 1, 1, facecolor=PARTS[generation], edgecolor=PAPER, lw=1.5))
            size = 8 if ranks <= 4 else 6.5
            axes.text(0.5, slot + 0.5, f"slot {slot}: rank {rank}", ha="center", va="center", fontsize=size)
        middle = (generation + 0.5) * ranks
        axes.text(-0.06, middle, f"generation {generation}", rotation=90, ha="right", va="center", fontsize=8)
    _frame(axes, 0, chosen, 1, 1)
    axes.set(xlim=(-0.25, 1.02), ylim=(layout.slots_of(ranks) + 0.05, -0.05))


def _slot(axes: Axes, tokens: int, slot: int, token: int, column: int) -> None:
    bare(axes, title=f"slot {slot}: {tokens} tokens x {N} columns")
    axes.set_facecolor("#F1EFEA")
    axes.broken_barh(
        [(cta * ROWS_PER_CTA, ROWS_PER_CTA) for cta in range(1, CTAS, 2)], (0, tokens), facecolors=PALE
    )
    axes.hlines(range(tokens + 1), 0, N, color=PAPER, lw=1)
    cta = column // ROWS_PER_CTA
    axes.add_patch(Rectangle((cta * ROWS_PER_CTA, 0), ROWS_PER_CTA, tokens, facecolor=SKY, alpha=0.7))
    _frame(axes, cta * ROWS_PER_CTA, token, ROWS_PER_CTA, 1)
    axes.set(xlim=(0, N), ylim=(tokens, 0))
    axes.set_xticks([0, N // 2, N], ["0", str(N // 2), str(N)], fontsize=8)
    axes.set_xlabel(f"column; CTA {cta} publishes and consumes the blue band", fontsize=9)
    step = max(1, tokens // 8)
    axes.set_yticks(
        [row + 0.5 for row in range(0, tokens, step)],
        [f"token {r}" for r in range(0, tokens, step)],
        fontsize=8,
    )


def _chunk(axes: Axes, tokens: int, slot: int, token: int, column: int) -> int:
    """The chunk of (slot, token, column); returns its byte offset in the mailbox."""
    first = column // CHUNK * CHUNK
    byte = int(mailbox_offset(slot, token, first, tokens, N)) * BF16_BYTES
    bare(axes, title=f"one chunk: {CHUNK_BYTES} bytes")
    for word in range(CHUNK_WORDS):
        axes.add_patch(Rectangle((0, word), 2, 1, facecolor=YELLOW, edgecolor=PAPER, lw=3))
        axes.text(
            -0.08, word + 0.5, f"byte {byte + 4 * word:,}", ha="right", va="center", fontsize=8, color=MUTED
        )
        for half in range(2):
            place = first + 2 * word + half
            marked = place == column
            axes.text(
                half + 0.5,
                word + 0.36,
                f"column {place}",
                ha="center",
                va="center",
                fontsize=8.5,
                weight="bold" if marked else "normal",
                color=VERMILLION if marked else INK,
            )
        axes.text(1, word + 0.72, f"word {word}: armed as 8000 8000", ha="center", va="center", fontsize=7.5)
    _frame(axes, 0, 0, 2, CHUNK_WORDS)
    axes.set(xlim=(-1.05, 2.05), ylim=(CHUNK_WORDS + 0.05, -0.05))
    return byte


# ---- generations over calls ----


def generation_calendar(batches: Sequence[int], counts: Sequence[int] = (GENERATIONS, 2)) -> Picture:
    """For mailboxes of ``counts`` generations: what a rank does with each of them in calls 0, 1, ...

    Call n publishes into and polls generation n % count, and arms generation (n - 1) % count over the tokens of call
    n - 1. Hatched: where a peer that is one call ahead, as far as it can get, publishes. Red frame: it does so in
    what this rank is arming. batches: tokens of the calls.

    Raises ValueError for no calls, or fewer than 2 generations.
    """
    if not batches or min(counts) < 2:
        raise ValueError(
            f"{len(batches)} calls, generations {tuple(counts)}: at least 1 call and 2 generations"
        )
    picture = Picture(10.5, 1.1 + 0.62 * sum(counts) + 0.45 * len(counts))
    panels = picture.subplots(len(counts), 1, squeeze=False, gridspec_kw={"height_ratios": list(counts)})
    collisions = [_calendar(axes, batches, count) for axes, count in zip(panels[:, 0], counts, strict=True)]
    picture.legend(
        handles=[
            Patch(color=SKY, label="published by all ranks, polled"),
            Patch(color=GREEN, label="armed again"),
            Patch(color=PALE, label="armed, left alone"),
            Patch(facecolor=PAPER, edgecolor=ORANGE, hatch="////", label="a peer one call ahead publishes"),
            Patch(facecolor="none", edgecolor=VERMILLION, lw=2, label="both at once"),
        ],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    said = "; ".join(
        f"with {count} generations {'never' if not hits else f'in calls {hits[0]} to {hits[-1]}'}"
        for count, hits in zip(counts, collisions, strict=True)
    )
    picture.alt = (
        f"One panel per number of generations, {' and '.join(map(str, counts))}: a row per generation, a column per "
        f"call, of {', '.join(map(str, batches))} tokens. Each call publishes into and polls one generation and arms "
        "the one before over the last call's tokens; the next one may already receive what a peer one call ahead "
        f"publishes. That is the generation being armed: {said}."
    )
    return picture


def _calendar(axes: Axes, batches: Sequence[int], count: int) -> list[int]:
    """One panel; returns the calls in which a peer may publish into what is armed."""
    three = count == GENERATIONS
    bare(axes, title=f"{count} generations")
    collisions = []
    for call, tokens in enumerate(batches):
        current = call % count
        armed = int(layout.previous_generation(current)) if three else (current - 1) % count
        ahead = int(layout.next_generation(current)) if three else (current + 1) % count
        for generation in range(count):
            colour = {current: SKY, armed: GREEN}.get(generation, PALE)
            text = {
                current: f"publish and poll\n{tokens} token{'s' * (tokens != 1)}",
                armed: f"arm {batches[call - 1] if call else 0} of call {call - 1}"
                if call
                else "nothing yet",
            }.get(generation, "")
            _cell(axes, call, generation, colour if call or generation != armed else PALE, text)
        axes.add_patch(
            Rectangle((call + 0.74, ahead + 0.06), 0.22, 0.88, facecolor="none", edgecolor=ORANGE, hatch="////", lw=0)
        )  # fmt: skip
        if ahead == armed and call:
            collisions.append(call)
            _frame(axes, call + 0.03, armed + 0.05, 0.94, 0.9)
    axes.set(xlim=(0, len(batches)), ylim=(count, 0))
    axes.set_xticks([call + 0.5 for call in range(len(batches))], [f"call {c}" for c in range(len(batches))])
    axes.set_yticks([g + 0.5 for g in range(count)], [f"generation {g}" for g in range(count)])
    axes.tick_params(labelsize=8, length=0)
    return collisions


def _cell(axes: Axes, call: int, generation: int, colour: str, text: str) -> None:
    axes.add_patch(Rectangle((call, generation), 1, 1, facecolor=colour, edgecolor=PAPER, lw=3))
    axes.text(call + 0.38, generation + 0.5, text, ha="center", va="center", fontsize=7.5, color=INK)


# ---- one shot or two ----

COLOURS = {1: BLUE, 2: ORANGE}
NAMES = {1: "one shot", 2: "two shots"}


def shots_by_batch(ranks: int, batch: int, *, crossing_us: float, link_gb_s: float) -> Picture:
    """Computed for M = 1 to 64: bytes that leave and reach a rank, and a modelled time; M = ``batch`` is marked.

    Raises ValueError as ``exchange_costs.cost``, and unless crossing_us and link_gb_s are positive.
    """
    layout.check_batch(batch)
    tokens = range(1, MAX_BATCH + 1)
    picture = Picture(10.5, 3.9)
    left, right = picture.subplots(1, 2)
    plain(left, title=f"computed: KB per rank, {ranks} ranks", x="tokens M", y="KB", grid="both")
    plain(right, title="modelled: bytes and crossings, nothing else", x="tokens M", y="us", grid="both")
    for shots, colour in COLOURS.items():
        made = [cost(ranks, m, shots, "multicast") for m in tokens]
        name = NAMES[shots]
        arrives = [c.arrives / 1e3 for c in made]
        left.plot(tokens, arrives, color=colour, lw=2, label=f"{name}: arrives; leaves by unicast")
        right.plot(
            tokens, [c.microseconds(crossing_us, link_gb_s) for c in made], color=colour, lw=2, label=name
        )
    leaves = [cost(ranks, m, 1, "multicast").leaves / 1e3 for m in tokens]  # two shots: the same
    left.plot(tokens, leaves, "--", color=MUTED, lw=2, label="one or two: leaves by multicast")
    for axes in (left, right):
        axes.axvline(batch, color=MUTED, lw=1, ls=":")
        axes.set(xlim=(0, MAX_BATCH + 1))
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    even = break_even(ranks, crossing_us, link_gb_s)
    one, two = (cost(ranks, batch, shots, "multicast").arrives / 1e3 for shots in SHOTS)
    picture.alt = (
        f"Two line charts over M = 1 to 64 for {ranks} ranks, computed. Left: KB that leave and reach a rank; at "
        f"M = {batch}, {one:,.1f} arrive with one shot and {two:,.1f} with two. Right: modelled microseconds with "
        f"{crossing_us:g} us per crossing and {link_gb_s:g} GB/s; two shots take less "
        + (f"from M = {even} on." if even else "at no M up to 64.")
    )
    return picture


def recorded_exchanges(recorded: RecordedExchange) -> Picture:
    """Bars of a recorded session, a group per M."""
    picture = Picture(9.5, 3.7)
    title = f"recorded: {recorded.machine}, {recorded.date}, {recorded.software}"
    axes = plain(picture.subplots(), title=title, y="microseconds", grid="y")
    rows = [*recorded.us.items()]
    colours = (PURPLE, BLUE, ORANGE, MUTED, VERMILLION, GREEN)
    width = 0.8 / len(rows)
    for number, (name, times) in enumerate(rows):
        for group, batch in enumerate(recorded.batches):
            if batch not in times:
                continue
            left = group + (number - len(rows) / 2 + 0.5) * width
            axes.bar(
                left,
                times[batch],
                0.92 * width,
                color=colours[number % len(colours)],
                label=name if not group else None,
            )
            axes.text(left, times[batch], f"{times[batch]:.1f}", ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(range(len(recorded.batches)), [f"M = {m}" for m in recorded.batches])
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    listed = "; ".join(
        f"{name} {', '.join(f'{us:g} at M = {m}' for m, us in times.items())}" for name, times in rows
    )
    picture.alt = (
        f"Bar chart of recorded microseconds per exchange on {recorded.machine}, {recorded.date}: {listed}."
    )
    return picture


def exposed_exchanges(measured: MeasuredExchange) -> Picture:
    """Recorded microseconds that a layer waits for projection, exchange and reduction: a panel per K, a group per M,
    the least exposed of ours, named below, beside the alternatives, quartiles as whiskers."""
    picture = Picture(11.5, 4.4)
    panels = picture.subplots(1, len(measured.ks), squeeze=False)[0]
    colours, said = (GREEN, PURPLE, BLUE, ORANGE), []
    for axes, k in zip(panels, measured.ks, strict=True):
        where = f"{measured.ranks} x {measured.provenance.gpu}"
        plain(axes, title=f"K = {k}: recorded on {where}", y="microseconds exposed", grid="y")
        names = []
        for group, batch in enumerate(measured.batches(k)):
            rows = _beside(measured, k, batch)
            for number, row in enumerate(rows):
                _whiskered(axes, group + (number - len(rows) / 2 + 0.5) * 0.2, row, colours[number])
            listed = ", ".join(f"{measured.label(row.candidate)} {row.median_us:.2f}" for row in rows)
            said.append(f"K = {k}, M = {batch}: {listed}")
            names.append(f"M = {batch}\n" + "\n".join(measured.label(rows[0].candidate).rsplit(", ", 1)))
        axes.set_xticks(range(len(names)), names, fontsize=7.5)
        axes.set_ylim(0, 1.1 * max(row.q3_us for row in measured.rows))
    if 1536 in measured.ks:
        _target(panels[measured.ks.index(1536)], [m for m in measured.batches(1536) if m <= TARGET_BATCH])
    bars = ["ours, the least exposed (named below M)", *ALTERNATIVES.values()]
    for colour, name in zip(colours, bars, strict=True):
        panels[0].bar(0, 0, color=colour, label=name)
    picture.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    together = "; ".join(said)
    picture.alt = f"Bar charts of exposed microseconds, medians and quartiles, {measured.title}. {together}."
    return picture


def _target(axes: Axes, batches: Sequence[int]) -> None:
    """A line over the groups that the target is for."""
    label = f"target for ours at K = 1536, M <= {TARGET_BATCH}: under {TARGET_US:g} us"
    axes.hlines(TARGET_US, -0.45, len(batches) - 0.55, color=INK, lw=1.2, ls="--", label=label)


def _beside(measured: MeasuredExchange, k: int, batch: int) -> list[ExchangeRow]:
    """The best of ours and every alternative."""
    there = {row.candidate: row for row in measured.rows if (row.k, row.batch) == (k, batch)}
    return [measured.best(k, batch, ours=True), *(there[name] for name in ALTERNATIVES if name in there)]


def _whiskered(axes: Axes, left: float, row: ExchangeRow, colour: str) -> None:
    """One bar, its quartiles and its number."""
    axes.bar(left, row.median_us, 0.18, color=colour)
    whiskers = [[row.median_us - row.q1_us], [row.q3_us - row.median_us]]
    axes.errorbar([left], [row.median_us], yerr=whiskers, color=INK, lw=1, capsize=2)
    axes.text(left, row.q3_us, f"{row.median_us:.1f}", ha="center", va="bottom", fontsize=7)
