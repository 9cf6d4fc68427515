"""Residual attention over the outputs of earlier blocks: the consumer of the projection's partial sums.

For one token, with delta = bf16(sum of the R slots in rank order, FP32) out of the mailbox:

    P       = bf16(prefix + delta), or delta alone; stored back to prefix
    v_s     = earlier block outputs, s < NB; v_NB = P
    score_s = sum(v_s * norm_w * qk_w) / sqrt(mean(v_s^2) + eps)
    mix     = sum_s softmax(score)_s v_s                           (P where NB = 0)
    out     = bf16(mix / sqrt(mean(mix^2) + out_eps) * out_w)      (bf16(mix) without the last norm)

Shapes: mailbox [slots, tokens, 7168]; prefix and out [M, 7168]; blocks [M, NB, 7168]; norm_w, qk_w, out_w
[7168]; all BF16. One CTA per token: the two norms need the whole row, and what one SM reads after the
mailbox has arrived is 14 KB per rank.

    when            what                                                            waits for
    mix_blocks      w = norm_w * qk_w; scores of the NB blocks, e_s = exp(score_s   nothing
                    - max), their sum, and sum e_s v_s
    receive         poll the mailbox; delta; P, stored                              all ranks' producers
    mix             score of P; the blocks' sum scaled to the common maximum, P     CTA barrier
                    added, divided by the sum of all weights
    store_out       last norm, rounded, stored                                      CTA barrier

The softmax is the online one (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): P
is merged into what the blocks gave, so block rows are read, weighed and forgotten before the poll.

**Which memory may be read when.** In the split form this kernel is the producer's PDL dependent, and it runs
before the producer has completed. It polls the mailbox, which carries its own flags. All else it touches
(prefix, blocks, weights; out and prefix as outputs) was last used by kernels before the producer. Those are
complete: this grid starts when every CTA of the producer has triggered, a CTA triggers after its own
``griddepcontrol.wait``, and that wait returns when the producer's predecessor has completed and its writes
are visible; the predecessor in turn completes only after its own predecessor, since every kernel of the chain
waits once before it ends. This kernel does so last: it has nothing left to read then, but without it a
dependent could find this grid complete while the producer is not. Complete is not yet acquired: prefix and
blocks are read past L1 (``float_primitives.load_written_chunk``).

**Order of operations** (results are bit-reproducible, and a token's do not depend on other tokens). Sums over a
row: see ``row_sums``. sum e_s v_s runs over s in order; sum e_s adds e_s that are H / 2 apart, then H / 4, ...
(H: NB rounded up to a power of two, the missing e_s are 0). Every product is rounded or fused as the code says;
no instruction is approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from oproj_lib.kernels import float_primitives as fp32
from oproj_lib.kernels import mailbox_primitives, primitives
from oproj_lib.kernels.attnres_configuration import (
    DEFAULT_EPS,
    DEFAULT_THREADS,
    AttnResConfiguration,
)
from oproj_lib.kernels.attnres_lane import Arrays, Row, Thread
from oproj_lib.kernels.inputs import check_array, check_mailbox_shape
from oproj_lib.kernels.mailbox import Crew, MailboxReader, Turn
from oproj_lib.kernels.mailbox_primitives import widen
from oproj_lib.kernels.primitives import Words4, add_float
from oproj_lib.kernels.row_sums import RowSums
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.layouts import attnres as layout
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES, WARP_LANES
from oproj_lib.problem import N

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Mixed:
    """What the blocks amount to: largest score, and sum of e_s = exp(score_s - maximum). The sum of e_s v_s is in
    shared memory, see ``keep``."""

    maximum: Float32
    total: Float32


class AttnRes(RowSums):
    """Builds the residual attention kernel.

    blocks: earlier block outputs, NB, 0 to 8. ranks: slots that are summed (1 for the result mailbox of the
    two-shot form). tokens: M. replace_prefix: P is delta alone. out_norm: normalise the mix. eps, out_eps: of
    the two norms. threads: per CTA, 128, 224, 448 or 896; part of the summation order.

    Raises ValueError for a configuration that does not exist.
    """

    def __init__(
        self,
        blocks: int,
        *,
        ranks: int,
        tokens: int,
        replace_prefix: bool = False,
        out_norm: bool = True,
        eps: float = DEFAULT_EPS,
        out_eps: float = DEFAULT_EPS,
        threads: int = DEFAULT_THREADS,
    ) -> None:
        self.config = AttnResConfiguration(
            blocks, ranks, tokens, replace_prefix, out_norm, eps, out_eps, threads
        )
        self.reader = MailboxReader(ranks)

    # Host

    @cute.jit
    def __call__(
        self,
        mailbox: cute.Tensor,
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
        state: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the split kernel on ``stream``, as the PDL dependent of the producer.

        Raises ValueError while compiling, for tensors that this configuration cannot take.
        """
        self.check(mailbox, Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out))
        self.kernel(mailbox, prefix, blocks, norm_weight, qk_weight, out_weight, out, state).launch(
            grid=[self.config.tokens, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    def check(self, mailbox: Any, arrays: Arrays) -> None:
        """Raises ValueError unless these arrays (NumPy, torch or CuTe) are what the kernel is built for."""
        tokens = self.config.tokens
        self.reader.check(Mailbox(*check_mailbox_shape("mailbox", mailbox, "the kernel", tokens)))
        check_array("prefix", arrays.prefix, (tokens, N))
        check_array("blocks", arrays.blocks, (tokens, self.config.block_rows, N))
        for name in ("norm_weight", "qk_weight", "out_weight"):
            check_array(name, getattr(arrays, name), (N,))
        check_array("out", arrays.out, (tokens, N))

    # Device

    @cute.kernel
    def kernel(
        self,
        mailbox: cute.Tensor,
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
        state: Int64,
    ) -> None:
        """The split form: CTA t consumes token t."""
        # Dependents wait for this grid to complete, and it completes after its own wait.
        cute.arch.griddepcontrol_launch_dependents()
        arrays = Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out)
        self.consume(arrays, self.allocate(), mailbox, state)
        cute.arch.griddepcontrol_wait()

    def allocate(self) -> Int32:
        """Reserve the CTA's shared memory."""
        return SmemAllocator().allocate(self.config.shared_bytes, byte_alignment=CHUNK_BYTES).toint()

    def thread(self, arrays: Arrays, shared: Int32, index: Int32) -> Thread:
        """Thread number ``index`` of those that consume this CTA's token."""
        token, _, _ = cute.arch.block_idx()

        def first_chunk(tensor: cute.Tensor, row: Any) -> Int64:
            return tensor.iterator.toint() + Int64(layout.row_offset(row, index)) * BF16_BYTES

        return Thread(
            crew=Crew(token, index, self.config.tokens, self.config.threads),
            lane=index % WARP_LANES,
            warp=index // WARP_LANES,
            prefix=first_chunk(arrays.prefix, token),
            blocks=first_chunk(arrays.blocks, token * self.config.block_rows),
            norm_weight=first_chunk(arrays.norm_weight, 0),
            qk_weight=first_chunk(arrays.qk_weight, 0),
            out_weight=first_chunk(arrays.out_weight, 0),
            out=first_chunk(arrays.out, token),
            shared=shared,
        )

    def consume(self, arrays: Arrays, shared: Int32, mailbox: cute.Tensor, state: Int64) -> None:
        """A CTA's part of the split form: re-arm, one token, count on."""
        token, _, _ = cute.arch.block_idx()
        crew = Crew(token, primitives.thread_index(), self.config.tokens, self.config.threads)
        turn = self.reader.generations.consuming(state, token)
        self.reader.rearm(mailbox.iterator.toint(), Mailbox(*mailbox.shape), turn, crew)
        self.consume_token(arrays, shared, mailbox, turn)
        self.reader.barrier(crew)
        self.reader.generations.consumed(state, turn, self.config.tokens, crew)

    def consume_token(
        self,
        arrays: Arrays,
        shared: Int32,
        mailbox: cute.Tensor,
        turn: Turn,
        index: Callable[[], Int32] = primitives.thread_index,
    ) -> None:
        """Everything for one token: before the poll, the poll, and after it.

        shared: address of ``shared_bytes`` bytes of shared memory. ``threads`` threads of each of the first M
        CTAs must come here, and no other; index numbers them from 0. Named barrier 4 must be free.
        """
        me = self.thread(arrays, shared, index())
        weights = self.score_weights(me)
        mixed = self.mix_blocks(me, weights) if self.config.scored else None
        rows, out_weights = self.receive(me, mailbox.iterator.toint(), Mailbox(*mailbox.shape), turn)
        me = self.thread(arrays, shared, index())  # anew: during the poll, registers are full of words
        mix = self.mix(me, mixed, rows, weights) if mixed else [widen(words) for words in rows]
        self.store_out(me, mix, out_weights)

    def load_row(self, address: Int64) -> list[Words4]:
        """This thread's chunks of a row of weights, which no kernel writes."""
        return [primitives.load_global_chunk(address, offset) for offset in self.row_offsets()]

    def load_written_row(self, address: Int64, row: int = 0) -> list[Words4]:
        """This thread's chunks of the row that is ``row`` rows below ``address``, which an earlier kernel wrote."""
        return [fp32.load_written_chunk(address, offset) for offset in self.row_offsets(row)]

    def row_offsets(self, row: int = 0) -> list[int]:
        """Bytes from this thread's first chunk of a row to its chunks ``row`` rows below."""
        chunks = range(self.config.chunks)
        return [row * layout.row_bytes() + layout.chunk_bytes(chunk, self.config.threads) for chunk in chunks]

    # Before the poll

    def score_weights(self, me: Thread) -> Row:
        """norm_w * qk_w of this thread's columns: exact, 8 by 8 significant bits. Nothing where NB = 0."""
        if not self.config.scored:
            return []
        norms, qks = self.load_row(me.norm_weight), self.load_row(me.qk_weight)
        return [
            [fp32.multiply(a, b) for a, b in zip(widen(norm), widen(qk), strict=True)]
            for norm, qk in zip(norms, qks, strict=True)
        ]

    def mix_blocks(self, me: Thread, weights: Row) -> Mixed:
        """Scores of the blocks and their weighted sum, relative to the largest score among them."""
        config = self.config
        rows = [self.load_written_row(me.blocks, s) for s in range(config.blocks)]
        pairs = [self.score_sums(row, weights) for row in rows]
        slots = layout.sum_slots(config.blocks)
        missing = [Float32(0.0)] * (slots - config.blocks)
        self.share(me, 0, [*(p[0] for p in pairs), *missing, *(p[1] for p in pairs), *missing])
        # Lane s computes for source s, and so do the lanes that are a multiple of H above it.
        source = me.lane % slots
        score = self.score(self.shared_sum(me, 0, source), self.shared_sum(me, slots, source))
        if missing:
            score = fp32.float_if(source < config.blocks, score, Float32(MINUS_INFINITY))
        maximum = self.over_sources(score, fp32.larger)
        exponential = self.exponential(score, maximum)
        total = self.over_sources(exponential, add_float)
        values: Row = []
        for s in range(config.blocks):
            # Words, not what the scores made of them: twice as many registers.
            row = rows[s] if config.holds_blocks else self.load_written_row(me.blocks, s)
            weight = fp32.of_lane(exponential, s)
            values = self.add_source(values, weight, row)
        self.keep(me, values)
        return Mixed(maximum, total)

    def keep(self, me: Thread, values: Row) -> None:
        """Put this thread's values into shared memory until P has come: registers are needed for the poll."""
        address = me.shared + me.crew.thread * CHUNK_BYTES
        for chunk, columns in enumerate(values):
            for vector in range(0, CHUNK, layout.VECTOR):
                fp32.store_shared_floats(
                    address, self.kept_offset(chunk, vector), columns[vector : vector + layout.VECTOR]
                )

    def kept(self, me: Thread) -> Row:
        """What ``keep`` put away."""
        address = me.shared + me.crew.thread * CHUNK_BYTES
        return [
            [
                value
                for vector in range(0, CHUNK, layout.VECTOR)
                for value in primitives.load_shared_floats(address, self.kept_offset(chunk, vector))
            ]
            for chunk in range(self.config.chunks)
        ]

    def kept_offset(self, chunk: int, column: int) -> int:
        """Bytes from this thread's first kept value to that of a chunk's column (0 or 4)."""
        return layout.kept_offset(chunk, column, self.config.blocks, self.config.threads)

    def over_sources(self, value: Float32, combine: Any) -> Float32:
        """The combination of the values of H neighbouring lanes, in each of them."""
        distance = layout.sum_slots(self.config.blocks) // 2
        while distance:
            value = combine(value, fp32.from_lane(value, distance))
            distance //= 2
        return value

    def add_source(self, values: Row, weight: Float32, row: Sequence[Words4]) -> Row:
        """values + weight * row, an empty ``values`` being zero."""
        if not values:
            return [[fp32.multiply(weight, v) for v in fp32.widen_again(words)] for words in row]
        return [
            [fp32.multiply_add(weight, v, old) for v, old in zip(fp32.widen_again(words), olds, strict=True)]
            for words, olds in zip(row, values, strict=True)
        ]

    # The poll

    def receive(self, me: Thread, base: Int64, box: Mailbox, turn: Turn) -> tuple[list[Words4], list[Words4]]:
        """P of this thread's columns, once every rank's sums have arrived, and stored to prefix; and out_w, which
        like the old prefix is read before the poll."""
        config = self.config
        before = [] if config.replace_prefix else self.load_written_row(me.prefix)
        out_weights = self.load_row(me.out_weight) if config.out_norm else []
        # Holds nobody up. Without it ptxas polls before it has mixed the blocks, and reads prefix after that.
        self.meet(me)
        rows = []
        for chunk, sums in self.receive_sums(me.crew, base, box, turn):
            row = primitives.pack8(sums, "plain")
            if before:
                row = self.add_prefix(before[chunk], row)
            self.store_prefix(me, chunk, row)
            rows.append(row)
        return rows, out_weights

    def receive_sums(
        self, crew: Crew, base: Int64, box: Mailbox, turn: Turn
    ) -> Iterator[tuple[int, list[Float32]]]:
        """(chunk, the ranks' words of it added in rank order), as many chunks per poll as registers hold."""
        config = self.config
        row = Int64(layout.row_offset(crew.cta, crew.thread)) * BF16_BYTES
        address = base + self.reader.generation_offset(turn.generation, box) + row
        for chunks in pieces(range(config.chunks), config.polled_chunks // config.ranks):
            sums: dict[int, list[Float32]] = {}
            for ranks in pieces(range(config.ranks), config.polled_chunks // len(chunks)):
                where = [(chunk, rank) for chunk in chunks for rank in ranks]
                offsets = [
                    rank * self.reader.slot_bytes(box) + layout.chunk_bytes(chunk, config.threads)
                    for chunk, rank in where
                ]
                for (chunk, _), words in zip(where, self.reader.poll(address, offsets), strict=True):
                    values = widen(words)
                    total = sums.get(chunk)
                    sums[chunk] = (
                        [add_float(a, b) for a, b in zip(total, values, strict=True)] if total else values
                    )
            yield from sums.items()

    def store_prefix(self, me: Thread, chunk: int, row: Words4) -> None:
        """A chunk of P, for the next layer."""
        mailbox_primitives.store_result(me.prefix + layout.chunk_bytes(chunk, self.config.threads), row)

    def add_prefix(self, before: Words4, delta: Words4) -> Words4:
        """bf16(prefix + delta)."""
        sums = [add_float(a, b) for a, b in zip(widen(before), widen(delta), strict=True)]
        return primitives.pack8(sums, "plain")

    # After the poll

    def mix(self, me: Thread, mixed: Mixed, rows: Sequence[Words4], weights: Row) -> Row:
        """The mix of the blocks and P."""
        first = layout.token_row(self.config.blocks)
        self.share(me, first, self.token_sums(rows, weights))
        score = self.score(self.shared_sum(me, first), self.shared_sum(me, first + 1))
        maximum = fp32.larger(mixed.maximum, score)
        kept = self.exponential(mixed.maximum, maximum)
        weight = self.exponential(score, maximum)
        scale = fp32.reciprocal(fp32.multiply_add(kept, mixed.total, weight))
        values = [[fp32.multiply(kept, v) for v in chunk] for chunk in self.kept(me)]
        values = self.add_source(values, weight, rows)
        return [[fp32.multiply(v, scale) for v in chunk] for chunk in values]

    def store_out(self, me: Thread, mix: Row, out_weights: Sequence[Words4]) -> None:
        """The last norm, if there is one; rounded and stored."""
        if self.config.out_norm:
            row = layout.mix_row(self.config.blocks)
            self.share(me, row, [self.thread_sum(mix, mix)])
            scale = self.inverse_norm(self.shared_sum(me, row), self.config.out_eps)
            mix = [
                [
                    fp32.multiply(fp32.multiply(v, scale), weight)
                    for v, weight in zip(values, widen(words), strict=True)
                ]
                for values, words in zip(mix, out_weights, strict=True)
            ]
        for chunk, values in enumerate(mix):
            offset = layout.chunk_bytes(chunk, self.config.threads)
            mailbox_primitives.store_result(me.out + offset, primitives.pack8(values, "plain"))

    def token_sums(self, rows: Sequence[Words4], weights: Row) -> list[Float32]:
        """The sums of P's score."""
        return self.score_sums(rows, weights)

    def exponential(self, score: Float32, maximum: Float32) -> Float32:
        """exp(score - maximum): at most 1, so neither it nor a sum of nine can overflow."""
        return fp32.exponential(add_float(score, -maximum))

    def score(self, square: Float32, dot: Float32) -> Float32:
        """sum(v w) / sqrt(mean(v^2) + eps)."""
        return fp32.multiply(self.inverse_norm(square, self.config.eps), dot)

    def inverse_norm(self, square: Float32, eps: float) -> Float32:
        """1 / sqrt(square / 7168 + eps)."""
        return fp32.reciprocal_root(fp32.multiply_add(square, Float32(1 / N), Float32(eps)))


def pieces(numbers: range, size: int) -> list[range]:
    """``numbers`` cut into ranges of ``size`` (at least 1), the last one shorter."""
    step = max(1, size)
    return [numbers[i : i + step] for i in range(0, len(numbers), step)]


AttnRes.kernel.set_name_prefix("attnres", remove_cutlass_symbol=True, keep_mangled_name=False)
