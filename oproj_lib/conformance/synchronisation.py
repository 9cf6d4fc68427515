"""mbarriers, named barriers, fences, programmatic launch control, control flow and special registers."""

from __future__ import annotations

import numpy as np

from .case import Case, Result, entry_name, entry_text, kernel_case, load_operand, register_type, row_pointer
from .memory import octets
from .operands import seed_of

THREADS = 128
BARRIER = ".shared .align 8 .b64 barrier;"
SHARED_WORDS = f".shared .align 16 .b32 words[{THREADS}];"


def cases() -> list[Case]:
    return [*mbarriers(), *copy_arrivals(), *barriers(), *fences(), *control(), *special_registers()]


# -- mbarrier --------------------------------------------------------------------------------------


class Steps:
    """A single thread's dealings with one mbarrier: after each step, whether phases 0 and 1 have completed."""

    def __init__(self) -> None:
        self.body = ["setp.ne.u32 %p7, %thread, 0;", "@%p7 bra STORE;"]
        self.results: list[Result] = []

    def do(self, line: str, *, tests: bool = True) -> None:
        self.body.append(line)
        if not tests:
            return
        for parity in (0, 1):
            register = f"%d{len(self.results)}"
            self.body.append(f"mbarrier.test_wait.parity.shared.b64 {register}, [barrier], {parity};")
            self.results.append(
                Result(register, "pred", f"test_wait.parity {parity} after {line.rstrip(';')}")
            )

    def ask(self, line: str, label: str) -> None:
        """A line with {0} for a predicate result."""
        register = f"%d{len(self.results)}"
        self.body.append(line.format(register))
        self.results.append(Result(register, "pred", label))

    def case(self, name: str, covers: str = "mbarrier") -> Case:
        clear = [f"setp.ne.u32 {result.register}, %thread, %thread;" for result in self.results]
        return kernel_case(
            name, "mbarrier", [*clear, *self.body, "STORE:"], self.results, covers=covers, block=32,
            declarations=(BARRIER, ".reg .b64 %state<4>;"),
        )  # fmt: skip


def mbarriers() -> list[Case]:
    return [counts(), transactions(), states(), again(), *phases()]


def counts() -> Case:
    steps = Steps()
    steps.do("mbarrier.init.shared.b64 [barrier], 3;")
    for line in ("mbarrier.arrive.shared.b64 _, [barrier];", "mbarrier.arrive.shared.b64 _, [barrier], 1;",
                 "mbarrier.arrive.shared::cta.b64 %state0, [barrier];",
                 "mbarrier.arrive.release.cta.shared::cta.b64 _, [barrier], 2;",
                 "mbarrier.arrive.release.cta.shared::cta.b64 _, [barrier];",
                 "mbarrier.arrive.shared::cta.b64 _, [barrier], 3;"):  # fmt: skip
        steps.do(line)
    return steps.case("mbarrier counts")


def transactions() -> Case:
    """Bytes expected and completed: before, after and together with the arrivals."""
    steps = Steps()
    steps.do("mbarrier.init.shared.b64 [barrier], 1;")
    for line in ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barrier], 64;",
                 "mbarrier.arrive.shared::cta.b64 _, [barrier];",
                 "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [barrier], 48;",
                 "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [barrier], 16;",
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 1024;",
                 "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [barrier], 1024;",
                 "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barrier], 16;",
                 "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [barrier], 16;",
                 "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [barrier], 0;"):  # fmt: skip
        steps.do(line)
    return steps.case("mbarrier transactions")


def states() -> Case:
    """Waiting with the state that an arrival returned: complete once that arrival's phase is."""
    steps = Steps()
    steps.do("mbarrier.init.shared.b64 [barrier], 2;")
    steps.do("mbarrier.arrive.shared.b64 %state0, [barrier];")
    test = "mbarrier.test_wait.shared.b64 {0}, [barrier], %state"
    steps.ask(test + "0;", "test_wait of the first arrival's state, one missing")
    steps.do("mbarrier.arrive.shared.b64 %state1, [barrier];")
    steps.ask(test + "0;", "test_wait of the first arrival's state, complete")
    steps.ask(test + "1;", "test_wait of the second arrival's state, complete")
    steps.ask(
        "mbarrier.try_wait.shared.b64 {0}, [barrier], %state1;", "try_wait of the second arrival's state"
    )
    steps.ask("mbarrier.try_wait.parity.shared.b64 {0}, [barrier], 0;", "try_wait.parity 0, complete")
    steps.do("mbarrier.arrive.shared.b64 %state2, [barrier];")
    steps.ask(test + "2;", "test_wait in the next phase, one missing")
    return steps.case("mbarrier states")


def again() -> Case:
    """An mbarrier that is invalidated and made anew begins with phase 0."""
    steps = Steps()
    steps.do("mbarrier.init.shared.b64 [barrier], 1;", tests=False)
    steps.do("mbarrier.arrive.shared.b64 _, [barrier];")
    steps.do("mbarrier.inval.shared.b64 [barrier];", tests=False)
    steps.do("mbarrier.init.shared.b64 [barrier], 2;")
    steps.do("mbarrier.arrive.shared.b64 _, [barrier], 2;")
    return steps.case("mbarrier invalidated")


def wait(form: str, parity: str, label: str) -> list[str]:
    return [f"{label}:", f"{form}.shared::cta.b64 %p1, [barrier], {parity};", f"@!%p1 bra {label};"]


def phases() -> list[Case]:
    """Four warps hand words round through shared memory, four phases of one mbarrier."""
    found = []
    for form in (
        "mbarrier.try_wait.parity",
        "mbarrier.try_wait.parity.acquire.cta",
        "mbarrier.test_wait.parity",
    ):
        body = ["setp.ne.u32 %p0, %thread, 0;", f"@!%p0 mbarrier.init.shared::cta.b64 [barrier], {2 * THREADS};",
                "fence.mbarrier_init.release.cluster;", "bar.sync 0;", "mov.u32 %t2, words;",
                "mad.lo.u32 %t3, %thread, 4, %t2;", "add.u32 %t4, %thread, 37;", f"and.b32 %t4, %t4, {THREADS - 1};",
                "mad.lo.u32 %t4, %t4, 4, %t2;", "mad.lo.u32 %t5, %index, 12345, 678;"]  # fmt: skip
        results = []
        for phase in range(4):
            register = f"%d{phase}"
            body += ["st.shared.b32 [%t3], %t5;", "mbarrier.arrive.shared::cta.b64 _, [barrier], 2;",
                     *wait(form, str(phase % 2), f"WAIT{phase}"), f"ld.shared.b32 {register}, [%t4];",
                     f"mad.lo.u32 %t5, {register}, 3, %thread;", "bar.sync 0;"]  # fmt: skip
            results.append(Result(register, "b32", f"{form}: a neighbour's word in phase {phase}"))
        found.append(
            kernel_case(f"{form}, phases", "mbarrier", body, results, covers="mbarrier fence", grid=2,
                        declarations=(BARRIER, SHARED_WORDS))
        )  # fmt: skip
    return found


def copy_arrivals() -> list[Case]:
    """cp.async.mbarrier.arrive: warps wait for other threads' copies through an mbarrier."""
    found = []
    for noinc in (False, True):
        text = f"cp.async.mbarrier.arrive{'.noinc' if noinc else ''}.shared.b64"
        count = 2 * THREADS if noinc else THREADS
        body = ["setp.ne.u32 %p0, %thread, 0;", f"@!%p0 mbarrier.init.shared.b64 [barrier], {count};", "bar.sync 0;",
                *row_pointer("a", 32), "mov.u32 %t2, rows;", "mad.lo.u32 %t3, %thread, 16, %t2;",
                "cp.async.ca.shared.global [%t3], [%address], 8;",
                "cp.async.ca.shared.global [%t3+8], [%address+16], 8;",
                f"{text} [barrier];", "mbarrier.arrive.shared.b64 _, [barrier];",
                *wait("mbarrier.try_wait.parity", "0", "WAIT"), "xor.b32 %t4, %thread, 77;",
                "mad.lo.u32 %t4, %t4, 16, %t2;", "ld.shared.v2.b64 {%d0, %d1}, [%t4];",
                "mbarrier.test_wait.parity.shared.b64 %d2, [barrier], 0;",
                "mbarrier.test_wait.parity.shared.b64 %d3, [barrier], 1;"]  # fmt: skip
        results = [Result("%d0", "b64", f"{text}: another thread's copy"), Result("%d1", "b64", "its second copy"),
                   Result("%d2", "pred", "test_wait.parity 0"),
                   Result("%d3", "pred", "test_wait.parity 1")]  # fmt: skip
        found.append(
            kernel_case(text, "mbarrier", body, results, covers="cp mbarrier", inputs={"a": octets("cp")}, grid=2,
                        declarations=(BARRIER, f".shared .align 16 .b8 rows[{16 * THREADS}];"))
        )  # fmt: skip
    return found


# -- barriers and fences ---------------------------------------------------------------------------


def exchange(name: str, barrier: list[str], covers: str, family: str = "barriers") -> Case:
    """Every thread reads the word of the thread 37 further, after `barrier`."""
    body = [*load_operand("a", "b32"), "mov.u32 %t2, words;", "mad.lo.u32 %t3, %thread, 4, %t2;",
            "add.u32 %t4, %thread, 37;", f"and.b32 %t4, %t4, {THREADS - 1};", "mad.lo.u32 %t4, %t4, 4, %t2;",
            "st.shared.b32 [%t3], %a;", *barrier, "ld.shared.b32 %d0, [%t4];"]  # fmt: skip
    a = np.random.default_rng(seed_of(name)).integers(0, 1 << 32, 2 * THREADS, np.uint64).astype(np.uint32)
    return kernel_case(
        name, family, body, [Result("%d0", "b32", f"a neighbour's word after {name}")], covers=covers,
        inputs={"a": a}, grid=2, declarations=(".reg .b32 %a;", SHARED_WORDS),
    )  # fmt: skip


def barriers() -> list[Case]:
    forms = ("bar.sync 0", "bar.sync 5", f"bar.sync 3, {THREADS}", "barrier.sync 2",
             f"barrier.sync.aligned 2, {THREADS}",
             "barrier.cta.sync 1", f"barrier.cta.sync.aligned 1, {THREADS}")  # fmt: skip
    found = [exchange(form, [form + ";"], form.split(".")[0]) for form in forms]
    found.append(exchange("bar.sync twice", ["bar.sync 1;", "bar.sync 1;", "bar.sync 1;"], "bar"))
    found += [producers(), pairs(), warp_sync()]
    return found


def producers() -> Case:
    """Two warps store and arrive, the other two wait (bar.arrive, bar.sync), then the other way round."""
    body = ["mov.u32 %t2, words;", "mad.lo.u32 %t3, %thread, 4, %t2;", "xor.b32 %t4, %thread, 64;",
            "mad.lo.u32 %t4, %t4, 4, %t2;", "mad.lo.u32 %t5, %index, 99, 7;", "mov.b32 %d0, 1;",
            "setp.ge.u32 %p0, %thread, 64;", "@%p0 bra CONSUME;", "st.shared.b32 [%t3], %t5;",
            f"bar.arrive 1, {THREADS};", f"bar.sync 2, {THREADS};", "ld.shared.b32 %d0, [%t4];", "bra STORE;",
            "CONSUME:",
            f"bar.sync 1, {THREADS};", "ld.shared.b32 %d0, [%t4];", "st.shared.b32 [%t3], %t5;",
            f"bar.arrive 2, {THREADS};", "STORE:"]  # fmt: skip
    result = Result("%d0", "b32", "the other side's word after bar.arrive and bar.sync")
    return kernel_case(
        "bar.arrive", "barriers", body, [result], covers="bar", grid=2, declarations=(SHARED_WORDS,)
    )


def pairs() -> Case:
    """Pairs of warps with a barrier number each, held in a register."""
    body = ["mov.u32 %t2, words;", "mad.lo.u32 %t3, %thread, 4, %t2;", "xor.b32 %t4, %thread, 47;",
            "mad.lo.u32 %t4, %t4, 4, %t2;", "mad.lo.u32 %t5, %index, 99, 7;", "shr.u32 %t6, %thread, 6;",
            "add.u32 %t6, %t6, 14;", "st.shared.b32 [%t3], %t5;", "bar.sync %t6, 64;",
            "ld.shared.b32 %d0, [%t4];"]  # fmt: skip
    result = Result("%d0", "b32", "the word of the pair's other warp after bar.sync of a register")
    return kernel_case(
        "bar.sync, pairs of warps",
        "barriers",
        body,
        [result],
        covers="bar",
        grid=2,
        declarations=(SHARED_WORDS,),
    )


def warp_sync() -> Case:
    body = ["mov.u32 %t2, words;", "mad.lo.u32 %t3, %thread, 4, %t2;", "xor.b32 %t4, %thread, 19;",
            "mad.lo.u32 %t4, %t4, 4, %t2;", "mad.lo.u32 %t5, %index, 99, 7;", "st.shared.b32 [%t3], %t5;",
            "bar.warp.sync 0xffffffff;", "ld.shared.b32 %d0, [%t4];"]  # fmt: skip
    result = Result("%d0", "b32", "another lane's word after bar.warp.sync")
    return kernel_case(
        "bar.warp.sync", "barriers", body, [result], covers="bar", grid=2, declarations=(SHARED_WORDS,)
    )


def fences() -> list[Case]:
    """Fences and launch control change no value; the exchange around them must still be right."""
    lines = ["membar.cta", "membar.gl", "membar.sys", "fence.acq_rel.cta", "fence.acq_rel.gpu", "fence.acq_rel.sys",
             "fence.acq_rel.cluster", "fence.sc.cta", "fence.sc.gpu", "fence.sc.sys", "fence.proxy.async",
             "fence.proxy.async.global",
             "fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster"]  # fmt: skip
    fenced = [f"{line};" for line in lines]
    found = [exchange("fences", [*fenced, "bar.sync 0;", *fenced], "membar fence", "fences")]
    dependent = [
        "griddepcontrol.launch_dependents;",
        "griddepcontrol.wait;",
        "bar.sync 0;",
        "griddepcontrol.wait;",
    ]
    found.append(exchange("griddepcontrol without a predecessor", dependent, "griddepcontrol", "fences"))
    registers = ["setmaxnreg.dec.sync.aligned.u32 40;", "bar.sync 0;", "setmaxnreg.inc.sync.aligned.u32 64;"]
    case = exchange("setmaxnreg", registers, "setmaxnreg", "fences")
    kernel = case.kernel.replace(") \n{", f") .reqntid {THREADS} .maxnreg 64\n{{", 1)
    return [*found, replaced(case, kernel)]


def replaced(case: Case, kernel: str) -> Case:
    return Case(**{**case.__dict__, "kernel": kernel})


# -- control flow ----------------------------------------------------------------------------------


def control() -> list[Case]:
    return [loops(), tables(), early_exit()]


def loops() -> Case:
    """The number of rounds differs by lane, and a branch inside diverges (the Collatz sequence)."""
    body = ["mov.u32 %t1, %index;", "add.u32 %t1, %t1, 1;", "mov.u32 %d0, 0;", "LOOP:", "setp.le.u32 %p0, %t1, 1;",
            "@%p0 bra STORE;", "and.b32 %t2, %t1, 1;", "setp.eq.u32 %p1, %t2, 0;", "@%p1 bra EVEN;",
            "mad.lo.u32 %t1, %t1, 3, 1;", "bra.uni NEXT;", "EVEN:", "shr.u32 %t1, %t1, 1;", "NEXT:",
            "add.u32 %d0, %d0, 1;",
            "bra LOOP;", "STORE:"]  # fmt: skip
    result = Result("%d0", "b32", "rounds of a loop with divergent branches")
    return kernel_case("divergent loop", "control flow", body, [result], covers="bra", grid=4)


def tables() -> Case:
    body = ["rem.u32 %t1, %thread, 3;", "targets: .branchtargets FIRST, SECOND, THIRD;", "brx.idx %t1, targets;",
            "FIRST:",
            "mov.b32 %d0, 11;", "bra STORE;", "SECOND:", "mov.b32 %d0, 22;", "bra STORE;", "THIRD:", "mov.b32 %d0, 33;",
            "STORE:"]  # fmt: skip
    return kernel_case(
        "brx.idx",
        "control flow",
        body,
        [Result("%d0", "b32", "the branch taken by brx.idx")],
        covers="brx bra",
    )


def early_exit() -> Case:
    """Some lanes and a whole warp leave; the others go on through a barrier that counts only who is left. Those who
    left keep the zeros of the result array."""
    body = ["and.b32 %t1, %thread, 3;", "setp.eq.u32 %p0, %t1, 1;", "@%p0 exit;", "setp.ge.u32 %p1, %thread, 96;",
            "@%p1 ret;", "bar.sync 0;", "mov.b32 %d0, 7;"]  # fmt: skip
    return kernel_case(
        "exit and ret",
        "control flow",
        body,
        [Result("%d0", "b32", "7 where the thread stayed")],
        covers="exit ret",
    )


# -- special registers -----------------------------------------------------------------------------

GRID, BLOCK, SHARED_BYTES = (3, 2, 4), (8, 3, 5), 1024
AXES = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
LANES = ("laneid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge", "nwarpid",
         "cluster_ctarank",
         "cluster_nctarank", "dynamic_smem_size", "total_smem_size")  # fmt: skip
MACHINE_DEPENDENT = {
    "%warpid": "the warp's slot in the SM, which may change while it runs",
    "%smid": "which SM, decided at launch",
    "%nsmid": "SM identifiers of the machine",
    "%nwarpid": "warps that an SM can hold (recorded, and a known difference)",
    "%gridid": "a counter of launches",
    "%clock": "time",
    "%clock64": "time",
    "%globaltimer": "time",
}


def special_registers() -> list[Case]:
    """Three-dimensional grid and block, 24 CTAs of 120 threads: the last warp has 24 lanes."""
    names = [f"{name}.{axis}" for name in AXES for axis in "xyz"] + list(LANES)
    linear = ["mov.u32 %t0, %ctaid.z;", "mov.u32 %t1, %nctaid.y;", "mov.u32 %t2, %ctaid.y;",
              "mad.lo.u32 %t0, %t0, %t1, %t2;",
              "mov.u32 %t1, %nctaid.x;", "mov.u32 %t2, %ctaid.x;", "mad.lo.u32 %t0, %t0, %t1, %t2;"]  # fmt: skip
    for axis in "zyx":
        linear += [
            f"mov.u32 %t1, %ntid.{axis};",
            f"mov.u32 %t2, %tid.{axis};",
            "mad.lo.u32 %t0, %t0, %t1, %t2;",
        ]
    results = [Result(f"%d{i}", "b32", f"%{name}") for i, name in enumerate(names)]
    body = [*linear, "mov.u32 %index, %t0;", *row_pointer("output", 4 * len(names), "%slot")]
    body += [f"mov.u32 %d{i}, %{name};" for i, name in enumerate(names)]
    body += [f"st.global.b32 [%slot+{4 * i}], {result.register};" for i, result in enumerate(results)]
    declared = [f".reg .{register_type('b32')} {result.register};" for result in results]
    name = "special registers"
    case = Case(
        name, name, entry_text(name, body, [], declared), entry_name(name), GRID, BLOCK, SHARED_BYTES, {},
        tuple(result.label for result in results), np.dtype(np.uint32), frozenset({"mov"}),
    )  # fmt: skip
    return [case]
