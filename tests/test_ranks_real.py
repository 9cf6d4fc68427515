"""Ranks on real GPUs, without one: plans, agreement between ranks, the watchdog, and the whole run on a stand-in GPU
whose kernels are NumPy (`rank_kernels`)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest
import rank_kernels
import torch
from rank_kernels import RankKernels, replayed
from stand_in_driver import StandInGpu

from oproj_lib import cli
from oproj_lib.bench import exchange
from oproj_lib.cli_ranks import check_options
from oproj_lib.program import Program
from oproj_lib.ranks import agreement as rules
from oproj_lib.ranks import distributed as distributed_module
from oproj_lib.ranks import programs
from oproj_lib.ranks.agreement import EXIT_LOST, Agreement, Disagreement, RankLostError, Watchdog, end_process
from oproj_lib.ranks.distributed import DistributedRank, agree, announce, check_heartbeat, run_distributed
from oproj_lib.ranks.gpu_rank import new_mailbox, table_of
from oproj_lib.ranks.local import run_local
from oproj_lib.ranks.memory import bind
from oproj_lib.ranks.plan import Plan, few_batches
from oproj_lib.ranks.programs import Task, build_chains, built_plan, suite
from oproj_lib.ranks.result import RanksResult
from oproj_lib.ranks.world import place_of, set_multicast

PLAN = Plan(2, 7, engine="payload", transport="unicast", tokens=3, batches=(3, 1), payload="nasty")


class FakeStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


class FakeClock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def alone(store: FakeStore, rank: int = 0, ranks: int = 2, timeout: float = 5.0) -> Agreement:
    clock = FakeClock()
    return Agreement(store, rank, ranks, timeout, clock=lambda: clock.now, sleep=clock.sleep)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) of every rank in a thread of its own: results, or the exceptions."""
    results: list[Any] = [None] * count

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


# Plans


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks = 0: choose 1 to 72"),
        ({"ranks": 73}, "ranks = 73: choose 1 to 72"),
        ({"ranks": 2.0}, "ranks = 2.0 is a float"),
        ({"ranks": 6, "shots": 2}, "ranks = 6 does not divide the 7168 columns"),
        ({"shots": 3}, r"shots = 3 is unknown; choose one of \(1, 2\)"),
        ({"target": "sm_80"}, "target = 'sm_80' is unknown"),
        ({"engine": "wgmma", "target": "sm_100a"}, "engine 'wgmma' has no build for sm_100a"),
        ({"consumer": "nobody"}, "consumer = 'nobody' is unknown"),
        ({"tokens": 65}, "tokens = 65: choose 1 to 64"),
        ({"tokens": 8, "batches": (9,)}, "batch = 9 > tokens = 8: a slot must hold every token"),
        ({"batches": (0,)}, "batch = 0: choose 1 to 64"),
        ({"batches": ()}, "batches is empty"),
        ({"ctas": 113}, "ctas = 113: choose 1 to 112"),
        ({"ctas": 4, "shots": 2}, "CTAs depend on one another in two-shot and AttnRes"),
        ({"ctas": 4, "consumer": "attnres"}, "CTAs depend on one another in two-shot and AttnRes"),
        ({"engine": "payload", "fused": True}, "engine 'payload' is no engine to fuse"),
        ({"payload": "smoke"}, "payload = 'smoke' is unknown"),
    ],
)
def test_plans_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"ranks": 2, **options})


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="rank = 2: 2 ranks, choose 0 to 1"):
        PLAN.check_rank(2)


def test_batches_change_at_random_and_all_of_them_come_up() -> None:
    assert few_batches(0, 64)[:2] == (1, 64) and len(set(few_batches(0, 64))) == 4
    assert few_batches(0, 1) == (1,) and set(few_batches(0, 3)) == {1, 2, 3}
    plan = Plan(2, batches=(5, 1, 9))
    drawn = [plan.batch(number) for number in range(40)]
    assert drawn[:3] == [5, 1, 9] and drawn == [plan.batch(number) for number in range(40)]
    assert min(drawn[3:].count(batch) for batch in (1, 5, 9)) >= 6
    assert drawn != [replace(plan, seed=1).batch(number) for number in range(40)]


def test_a_digest_covers_plan_and_programs() -> None:
    assert (
        PLAN.digest("a") == replace(PLAN).digest("a") != PLAN.digest("b") != replace(PLAN, seed=1).digest("b")
    )


@pytest.fixture(scope="module")
def chains() -> dict[int, programs.Chain]:
    return build_chains(PLAN)


def test_what_a_kernel_needs_and_a_rank_lacks(chains: dict[int, programs.Chain]) -> None:
    with pytest.raises(
        ValueError, match=r"payload_m3_sm_90a needs payload, state: this rank has first, first_mc, rank"
    ):
        bind(chains[3][0], {"first": 1, "first_mc": 2, "rank": 3}, lambda value, parameter: value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 3}, "was built for ranks = 2, this run has 3"),
        ({"batches": (3, 2)}, r"was built for batches \[3, 1\]: this run has \[3, 2\]"),
        ({"batches": (1,)}, "the largest included"),
    ],
)
def test_programs_of_another_plan(
    options: dict[str, Any], message: str, tmp_path: Any, chains: dict[int, programs.Chain]
) -> None:
    programs.save(PLAN, tmp_path)
    assert programs.load(replace(PLAN, rounds=99, seed=7), tmp_path) == chains
    with pytest.raises(ValueError, match=message):
        programs.load(replace(PLAN, **options), tmp_path)


def test_folders_without_programs(tmp_path: Any) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"no ranks\.json in .*: make it with `python -m oproj_lib ranks --device cuda --local --build",
    ):
        programs.load(PLAN, tmp_path)
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and holds no programs of ranks"):
        programs.save(PLAN, tmp_path)


# Agreement


def test_ranks_exchange_values() -> None:
    store = FakeStore()
    results = together(3, lambda rank: Agreement(store, rank, 3, 5.0).exchange("colour", f"c{rank}"))
    assert results == [["c0", "c1", "c2"]] * 3


def test_different_plans_are_an_error_on_every_rank(chains: dict[int, programs.Chain]) -> None:
    store = FakeStore()

    def start(rank: int) -> None:
        agree(Agreement(store, rank, 3, 5.0), replace(PLAN, rounds=7 + (rank == 1)), chains)

    for error in together(3, start):
        assert isinstance(error, Disagreement) and isinstance(error, ValueError)
        assert "the plan must be the same on every rank, nothing was launched: ranks 0, 2: {" in str(error)
        assert '"rounds": 8' in str(error).partition("; rank 1: ")[2]


def test_another_number_of_tokens_is_an_error_before_the_launch() -> None:
    store = FakeStore()
    results = together(2, lambda rank: announce(Agreement(store, rank, 2, 5.0), 40, [8, 1 + rank]))
    for error in results:
        assert "tokens of rounds 40 to 41 must be the same on every rank" in str(error)
        assert "rank 0: [8, 1]; rank 1: [8, 2]" in str(error)


def test_a_rank_that_does_not_come_is_named() -> None:
    mine = alone(FakeStore(), ranks=4)
    mine.store.set("plan/2", "x")
    with pytest.raises(RankLostError, match="rank 0 waited 5 s for all ranks' plan; missing: ranks 1, 3"):
        mine.exchange("plan", "x")


def test_a_rank_that_failed_ends_the_others_at_once() -> None:
    store = FakeStore()
    alone(store, rank=1).fail("no memory")
    mine = alone(store)
    with pytest.raises(RankLostError, match="rank 0 waited for its GPU: rank 1 failed: no memory"):
        mine.wait(lambda: False, "its GPU")
    assert mine.clock() == 0.0


def test_a_timeout_is_a_number_of_seconds() -> None:
    with pytest.raises(ValueError, match="timeout = 0: seconds, more than 0"):
        alone(FakeStore(), timeout=0)


class Left(Exception):
    """In place of the end of the process."""


def leave(code: int) -> NoReturn:
    raise Left(code)


def test_the_end_tells_why_and_tells_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    store = FakeStore()
    with pytest.raises(Left, match=str(EXIT_LOST)):
        end_process(alone(store, rank=1), RankLostError("missing: rank 0"), leave)
    assert "error: rank 1 ends the run: RankLostError: missing: rank 0" in capsys.readouterr().err
    assert alone(store).failed() == "rank 1 failed: RankLostError: missing: rank 0"


def test_the_end_comes_also_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(FakeStore):
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("store is gone")

    with pytest.raises(Left):
        end_process(alone(Gone()), ValueError("x"), leave)
    assert re.search(
        "the other ranks could not be told: .*which kept it: store is gone", capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the exit of the thread
def test_the_watchdog_ends_a_process_that_is_stuck() -> None:
    left = threading.Event()

    def note(code: int) -> NoReturn:
        left.set()
        raise SystemExit

    with Watchdog(Agreement(FakeStore(), 0, 1, 0.05), note):
        assert left.wait(5)
    left.clear()
    agreement = Agreement(FakeStore(), 0, 1, 0.2)
    with Watchdog(agreement, note):
        for step in range(8):  # 0.4 s, but with steps
            agreement.exchange(f"step {step}", "")
            threading.Event().wait(0.1)
    assert not left.is_set() and rules.EXIT_LOST == 3


# torchrun


def test_torchruns_variables() -> None:
    place = place_of({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert (place.rank, place.world, place.local_rank) == (5, 8, 1)
    with pytest.raises(ValueError, match="RANK, LOCAL_RANK not set: start with torchrun"):
        place_of({"WORLD_SIZE": "8"})
    with pytest.raises(ValueError, match="heartbeat = 0"):
        check_heartbeat(0)


def test_a_world_that_is_not_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank = 2: 2 ranks"):
        run_distributed([Task(PLAN)])
    with pytest.raises(ValueError, match="a suite has one transport"):
        run_distributed([Task(replace(PLAN, ranks=3)), Task(replace(PLAN, ranks=3, transport="multicast"))])


def test_multicast_is_off_unless_it_is_wanted() -> None:
    environment: dict[str, str] = {}
    set_multicast(environment, False)
    assert environment == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    with pytest.raises(
        ValueError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST = 1 in this environment forbids it"
    ):
        set_multicast(environment, True)
    environment = {}
    set_multicast(environment, True)
    assert environment == {}


# Whole runs on a stand-in GPU


def all_programs(chains: dict[int, programs.Chain]) -> list[Program]:
    return [program for chain in chains.values() for program in chain]


def local(
    chains: dict[int, programs.Chain], plan: Plan = PLAN, **options: Any
) -> tuple[RanksResult, list[str]]:
    driver = RankKernels(all_programs(chains), **options)
    return run_local(plan, gpu=StandInGpu(driver), record=replayed), driver.launched


def test_local_ranks_producers_come_before_consumers(chains: dict[int, programs.Chain]) -> None:
    result, launched = local(chains)
    assert result.findings == () and (result.rounds, result.exact, result.batches) == (7, 7, (1, 3))
    assert launched == ["payload", "payload", "mailbox_reduce", "mailbox_reduce"] * 7
    assert result.device == "NVIDIA stand-in"


def test_local_ranks_notice_a_word_that_was_lost(chains: dict[int, programs.Chain]) -> None:
    """Before the fifth consumer one published word becomes another."""
    seen: list[str] = []
    boxes: list[Any] = []
    original = new_mailbox

    def spoil(entry: str) -> None:
        seen.append(entry)
        if len(seen) == 4 * 2 + 3:  # round 2, the first consumer
            boxes[0].view(torch.int32)[2 * 2 + 1, 0, 5] = 0x3F803F80

    def remember(*arguments: Any) -> Any:
        boxes.append(original(*arguments))
        return boxes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oproj_lib.ranks.local.new_mailbox", remember)
        result, _ = local(chains, late=spoil)
    assert not result.ok and all("round 2" in line for line in result.findings)
    assert any("ranks 0 and 1 differ" in line for line in result.findings)
    assert any("partial sums of rank 1" in line for line in result.findings)


def test_what_one_gpu_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"2 \* 112 = 224 CTAs at once"):
        run_local(replace(PLAN, engine="producer", fused=True))
    with pytest.raises(ValueError, match="--multicast needs several GPUs"):
        run_local(replace(PLAN, transport="multicast"))


class ThreadRank(DistributedRank):
    """A rank in a thread: memory and reductions are shared through Python."""

    shared: dict[tuple[int, tuple[int, ...]], Any]

    def _symmetric(self, shape: tuple[int, ...], multicast: bool) -> tuple[Any, Any]:
        box = new_mailbox(shape, "cpu")
        self.shared[self.agreement.rank, shape] = box  # keeps it alive
        addresses = self.agreement.exchange(f"address {shape}", str(box.data_ptr()))
        return box, table_of([int(address) for address in addresses], "cpu")

    def finish(self, doing: str) -> None:
        self.agreement.exchange(f"finished {doing}", "done")

    def reduced(self, numbers: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        made = []
        for number in numbers:
            partials = np.stack([self.inputs.exact(number, rank) for rank in range(self.plan.ranks)])
            with np.errstate(invalid="ignore"):
                made.append((partials, partials.sum(axis=0)))
        return made


def distributed(
    chains: dict[int, programs.Chain], plan: Plan, late: Callable[[int, str], object], timeout: float = 20.0
) -> list[Any]:
    store = FakeStore()
    kind = type("ThreadRank", (ThreadRank,), {"shared": {}})

    def work(rank: int) -> RanksResult:
        gpu = StandInGpu(RankKernels(all_programs(chains), lambda entry: late(rank, entry)))
        agreement = Agreement(store, rank, plan.ranks, timeout)
        agree(agreement, plan, chains)
        result: RanksResult = kind(plan, chains, gpu, agreement, None, record=replayed).rounds(3)
        return result

    return together(plan.ranks, work)


def test_ranks_in_threads(chains: dict[int, programs.Chain]) -> None:
    """Each polls for what the other publishes when it likes."""
    rng = np.random.default_rng(0)
    results = distributed(chains, PLAN, lambda rank, entry: threading.Event().wait(0.01 * rng.random()))
    for rank, result in enumerate(results):
        assert result.findings == () and (result.rounds, result.exact, result.rank) == (7, 7, rank)


def test_a_rank_that_fails_in_a_round_ends_the_others(
    chains: dict[int, programs.Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0, 0]

    def fail(rank: int, entry: str) -> None:
        count[rank] += 1
        if rank == 1 and count[1] == 9:
            raise MemoryError("rank 1 is out of memory")

    monkeypatch.setattr(rank_kernels, "PATIENCE", 0.2)
    first, second = distributed(chains, PLAN, fail, timeout=1.0)
    assert isinstance(second, MemoryError)
    assert isinstance(first, RankLostError) and "missing: rank 1" in str(first)


def test_hashes_show_ranks_that_differ() -> None:
    store = FakeStore()

    def work(rank: int) -> list[str]:
        run = object.__new__(DistributedRank)
        run.agreement = Agreement(store, rank, 2, 5.0)
        outs = [np.zeros((1, 8), np.uint16), np.full((1, 8), rank, np.uint16)]
        return run.hash_findings(20, outs)

    assert together(2, work) == [["round 21: ranks 0 and 1 differ"], ["round 21: ranks 1 and 0 differ"]]


def test_shards_of_a_two_shot_exchange_are_put_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes travel, since NCCL has no 16-bit integers; here "the other rank" has the same shard, doubled."""
    run = object.__new__(DistributedRank)
    run.plan = Plan(2, shots=2, transport="unicast")
    waited: list[str] = []
    monkeypatch.setattr(run, "finish", waited.append, raising=False)
    view = torch.tensor([[[1.0, 2.0]], [[3.0, -0.0]]]).bfloat16()

    def gathered(mine: Any, ranks: int) -> list[Any]:
        assert (mine.dtype, mine.shape, ranks) == (torch.uint8, (2, 1, 4), 2)
        return [mine, (2 * mine.view(torch.bfloat16)).view(torch.uint8)]

    monkeypatch.setattr(distributed_module, "all_gathered", gathered)
    (whole,) = run.gathered([5], [view])
    assert whole.astype(float).tolist() == [[[1, 2, 2, 4]], [[3, 0, 6, 0]]]
    assert np.signbit(whole[1, 0].astype(float)).tolist() == [False, True, False, True]
    assert waited == ["gathering rounds 5 to 5"]


# Suites


def test_a_suite_is_folders_in_order(tmp_path: Any) -> None:
    plans = {"b": PLAN, "a": replace(PLAN, rounds=3), "alone": replace(PLAN, seed=4)}
    for name, plan in plans.items():
        folder = tmp_path / ("" if name == "alone" else "inside") / name
        folder.mkdir(parents=True)
        (folder / "ranks.json").write_text(json.dumps(plan.as_dict()))
    tasks = suite([tmp_path / "inside", tmp_path / "alone"])
    assert [(task.name, task.plan) for task in tasks] == [(name, plans[name]) for name in ("a", "b", "alone")]
    with pytest.raises(FileNotFoundError, match=r"no ranks\.json in .*nothing or in a folder inside it"):
        suite([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="two folders are called b: results are told apart by name"):
        suite([tmp_path / "inside", tmp_path / "inside" / "b"])


def test_a_suite_runs_as_it_was_built() -> None:
    def check(*options: str) -> None:
        check_options(cli.parser().parse_args(["ranks", *options]))

    check("-d", "cuda", "--suite", "x", "y", "--timeout", "5", "--heartbeat", "7", "--json")
    for options, message in (
        (
            ["--rounds", "300"],
            "--rounds beside --suite: every folder is run as it was built; give it with --build",
        ),
        (["--local"], "--local beside --suite"),
        (["--programs", "z"], "--programs beside --suite"),
    ):
        with pytest.raises(ValueError, match=message):
            check("-d", "cuda", "--suite", "x", *options)
    with pytest.raises(ValueError, match="--suite does not belong to ranks --device vgpu"):
        check("--suite", "x")


# The store


def test_a_store_that_is_gone_is_told_from_a_silent_rank() -> None:
    class Gone(FakeStore):
        def check(self, keys: list[str]) -> bool:
            raise torch.distributed.DistNetworkError("connection was closed\nException raised from ...")

    text = "rank 0 lost the key-value store, and so rank 0 or torchrun, which kept it: connection was closed$"
    with pytest.raises(RankLostError, match=text):
        alone(Gone()).exchange("plan", "x")


# The benchmark of an exchange


def test_what_the_benchmark_refuses(tmp_path: Any) -> None:
    with pytest.raises(
        ValueError, match="alternative 'smoke' is unknown; choose from nccl, one_shot, two_shot, or none"
    ):
        exchange.chosen("nccl,smoke")
    assert exchange.chosen("none") == [] and exchange.chosen("two_shot") == ["two_shot"]
    with pytest.raises(FileNotFoundError, match=r"no ranks\.json"):
        built_plan(tmp_path)
    engine = replace(PLAN, engine="producer")
    for plan, world, message in (
        (PLAN, 2, "holds engine 'payload', which projects nothing"),
        (engine, 4, "was built for 2 ranks, torchrun started 4"),
        (
            replace(engine, consumer="attnres"),
            2,
            "holds the consumer 'attnres': the alternatives end in a sum",
        ),
        (replace(engine, transport="multicast"), 2, "was built for multicast: only unicast is measured"),
    ):
        with pytest.raises(ValueError, match=message):
            exchange.check_task(Task(plan, "folder"), world)
    task = exchange.check_task(Task(engine, "folder"), 2)
    assert exchange.chosen_batches("1,3", [task]) == [1, 3]
    with pytest.raises(ValueError, match=r"--batches: no program for M in \[8\]; choose from \[1, 3\]"):
        exchange.chosen_batches("8,1", [task])


def test_what_is_exposed_is_counted_on_the_slowest_rank() -> None:
    """By hand: replay by replay the slower rank, chain minus predecessor, then quartiles of the differences."""
    store = FakeStore()
    mine = [{"predecessor": [9.0, 9.0, 9.2], "ours": [12.0, 15.0, 13.0]},
            {"predecessor": [9.1, 8.0, 9.1], "ours": [11.0, 16.0, 14.2]}]  # fmt: skip

    def work(rank: int) -> dict[str, float]:
        bench = object.__new__(exchange.Bench)
        bench.agreement, bench.steps = Agreement(store, rank, 2, 5.0), 0
        slowest = bench.slowest(mine[rank])
        return exchange.quartiles(slowest["ours"] - slowest["predecessor"])

    for result in together(2, work):  # differences 2.9, 7.0, 5.0
        assert result == pytest.approx({"median_us": 5.0, "q1_us": 3.95, "q3_us": 6.0})
