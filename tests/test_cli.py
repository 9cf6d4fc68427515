"""The command line: what it prints, what it returns, and that a mistake is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from oproj_lib.cli import EXIT_FOUND, EXIT_OK, EXIT_USAGE, main

PTX = Path(__file__).parent.parent / "docs" / "add.ptx"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_bare_run_picks_a_good_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", "--device", "vgpu")
    assert (code, err) == (EXIT_OK, "")
    for text in ("producer", "sm_90a", "virtual GPU", "TP8, 1536", "thread-instructions", "none"):
        assert text in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "run", "--engine", "producer", "--device", "vgpu",
        "--target", "sm_100a", "--ranks", "16", "--batch", "9",
        "--rows", "2", "--staged-blocks", "1", "--group-tiles", "1", "--seed", "4", "--exact", "--checks", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert code == EXIT_OK
    wanted = {
        "engine": "producer", "target": "sm_100a", "device": "vgpu", "ranks": 16, "batch": 9, "arithmetic": "exact",
        "checks": True, "findings": [], "ok": True,
    }  # fmt: skip
    assert {name: result[name] for name in wanted} == wanted
    assert {name: result["configuration"][name] for name in ("staged_blocks", "rows", "group_tiles")} == {
        "staged_blocks": 1, "rows": 2, "group_tiles": 1,
    }  # fmt: skip
    assert (
        0 < result["error"] < 2.5e-3 and result["seconds"] > 0 and result["thread_instructions"] > 1_000_000
    )


def test_both_transports_and_a_seeded_schedule_give_the_same_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = set()
    for extra in ((), ("--transport", "unicast"), ("--schedule", "3")):
        code, out, _ = run(capsys, "run", "-d", "vgpu", "-r", "16", "-m", "3", "--json", *extra)
        assert code == EXIT_OK
        errors.add(json.loads(out)["error"])
    assert len(errors) == 1


def test_findings_make_the_exit_code_non_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command with a broken producer in the engine's place."""
    import oproj_lib.bench.vgpu  # noqa: F401  (first imported now, it would keep the broken producer for good)
    from oproj_lib import run as runner
    from oproj_lib.lessons.broken import NoBarrierBeforePublish

    monkeypatch.setattr(
        runner, "producer_for", lambda k, batch, **_: NoBarrierBeforePublish(k, staged_blocks=4)
    )
    code, out, _ = run(capsys, "run", "-d", "vgpu", "--checks")
    assert code == EXIT_FOUND
    assert "race: read of shared memory" in out and "producer.py:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "0"), "batch = 0 is outside 1..64"),
        (("--batch", "65"), "batch = 65 is outside 1..64"),
        (("--ranks", "7"), "choose 8 (K = 1536) or 16 (K = 768)"),
        (("--target", "sm_80"), "target = 'sm_80'"),
        (("--device", "tpu"), "device = 'tpu' is unknown; choose one of auto, vgpu, cuda"),
        (("--engine", "gemm"), "engine = 'gemm' is unknown; choose one of producer, umma, wgmma"),
        (("--rows", "3"), "rows = 3"),
        (("--staged-blocks", "13"), "staged_blocks = 13"),
        (("--group-tiles", "9"), "group_tiles = 9"),
        (("--staged-blocks", "0"), "has no x path"),
        (("--rows", "4", "--ranks", "16"), "not a positive multiple of 32 * parts"),
        (("--transport", "pigeon"), "transport = 'pigeon'"),
        (("--inputs", "zeros"), "kind = 'zeros' is unknown"),
        (("--schedule", "chaos"), 'choose "program" or an integer seed'),
        (("--seed", "-1"), "seed = -1 is negative"),
    ],
)
def test_impossible_runs_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, "run", "-d", "vgpu", *arguments)
    assert (code, out) == (EXIT_USAGE, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


def test_cuda_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", "--device", "cuda", "--target", "sm_100a")
    assert code == EXIT_USAGE and "choose device = 'vgpu' or 'auto'" in err


def test_ptx_runs_anybodys_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x, y = np.arange(1000, dtype=np.float32), np.full(1000, 0.5, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    out = tmp_path / "sum.npy"
    code, text, _ = run(
        capsys, "ptx", str(PTX), "--entry", "add", "--grid", "4", "--block", "256", "--arg", str(tmp_path / "x.npy"),
        "--arg", str(tmp_path / "y.npy"), "--arg", "empty:f32:1000", "--arg", "i32:1000", "--save", f"2={out}",
    )  # fmt: skip
    assert code == EXIT_OK and "no findings" in text
    np.testing.assert_array_equal(np.load(out), x + y)


def test_ptx_findings_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "ptx",
        str(PTX),
        "--grid",
        "4",
        "--block",
        "256",
        "--arg",
        "arange:f32:1000",
        "--arg",
        "zeros:f32:1000",
    ]
    code, text, _ = run(capsys, *arguments, "--arg", "empty:f32:1000", "--arg", "i32:1024", "--json")
    found = json.loads(text)["findings"]
    assert code == EXIT_FOUND and {finding["kind"] for finding in found} == {"out of bounds"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.ptx",), "nowhere.ptx"),
        ((str(PTX), "--entry", "sub"), "this module has add"),
        ((str(PTX), "--grid", "x"), "expected whole numbers"),
        ((str(PTX), "--grid", "0"), "dimensions are positive"),
        ((str(PTX), "--arg", "f31:2"), "type 'f31' is unknown"),
        ((str(PTX), "--arg", "i8:300"), "--arg i8:300"),
        ((str(PTX), "--arg", "hello"), "expected TYPE:NUMBER, FILE.npy, or FILL:TYPE:SHAPE"),
        ((str(PTX), "--arg", "gone.npy"), "no such file"),
        ((str(PTX), "--arg", "i32:1"), "takes 4 arguments, 1 given"),
        ((str(PTX), "--arg", "i32:1", "--save", "3=x.npy"), "expected INDEX=FILE.npy with INDEX 0..0"),
        ((str(PTX), "--arg", "i32:1", "--save", "0=x.npy"), "only arrays can be saved"),
        ((__file__,), "this is not PTX"),
    ],
)
def test_impossible_ptx_runs_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, "ptx", *arguments)
    assert code == EXIT_USAGE and message in err and err.startswith("error: ") and err.count("\n") == 1


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    machine = json.loads(out)
    assert code == EXIT_OK and {p["engine"] for p in machine["placements"]} >= {"producer"}
    assert run(capsys, "doctor")[0] == EXIT_OK


def test_bench_reports_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--ranks", "16", "--batch", "1", "--repeat", "1", "--json")
    result = json.loads(out)
    assert code == EXIT_OK
    assert [mode["name"] for mode in result["modes"]] == [
        "fast",
        "exact",
        "fast, all checks",
        "exact, all checks",
    ]
    assert all(mode["seconds"] > 0 and mode["thread_instructions"] > 1_000_000 for mode in result["modes"])
    assert run(capsys, "bench", "--repeat", "0")[0] == EXIT_USAGE


def test_book_and_demo_outside_the_repository(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("demo", "book"):
        code, _, err = run(capsys, command)
        assert code == EXIT_USAGE and "run this from the repository's top folder" in err


def test_the_tcgen05_engine_runs_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "run", "-e", "umma", "-d", "vgpu", "-r", "16", "-m", "9", "--budget", "40000", "--json"
    )
    result = json.loads(out)
    assert code == EXIT_OK and (result["engine"], result["target"]) == ("umma", "sm_100a")
    assert result["configuration"]["budget"] == 40000 and result["error"] < 2.5e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-e", "umma", "--rows", "1"), "--rows does not belong to engine umma; it has --budget"),
        (
            ("--budget", "1"),
            "--budget does not belong to engine producer; it has --rows, --staged-blocks, --group-tiles",
        ),
        (("-e", "umma", "-t", "sm_90a"), "sm_90a"),
        (("-e", "umma", "--budget", "100"), "budget"),
    ],
)
def test_engines_refuse_what_is_not_theirs(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, "run", "-d", "vgpu", *arguments)
    assert code == EXIT_USAGE and message in err and err.count("\n") == 1
