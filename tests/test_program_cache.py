"""Programs on disk: found again, never stale, never half written, readable without the compiler."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from oproj_lib import program as programs
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.program import CorruptEntryError, Program, build_producer, program_key

SETTINGS: dict[str, Any] = {"target": "sm_90a", "batch": 8, "mailbox_slots": 1, "mailbox_tokens": 8}
CONFIG: dict[str, int | str] = {"engine": "producer", "k": 768}


def build(cache: Path | str | None, **changes: Any) -> Program:
    return build_producer(OprojProducer(768, staged_blocks=0), cache=cache, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def compiled() -> Program:
    return build(None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling fails the test."""
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled instead of using the cache"))


def entry_of(cache: Path) -> Path:
    (metadata,) = cache.glob("*/*/program.json")
    return metadata.parent


def test_a_program_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path)
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build(tmp_path) == first
    assert [path.name for path in entry_of(tmp_path).parent.iterdir()] == [first.key]  # no scratch left


def test_the_environment_chooses_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPROJ_CACHE", str(tmp_path / "chosen"))
    assert programs.cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("OPROJ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert programs.cache_directory() == tmp_path / "oproj_lib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert programs.cache_directory() == Path.home() / ".cache" / "oproj_lib"


def test_save_and_load_round_trip(tmp_path: Path, compiled: Program) -> None:
    compiled.save(tmp_path)
    assert Program.load(tmp_path) == compiled
    with pytest.raises(FileNotFoundError, match="no program at"):
        Program.load(tmp_path / "nothing")


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        program_key(CONFIG, "sm_90a"),
        program_key(CONFIG, "sm_100a"),
        program_key({**CONFIG, "k": 1536}, "sm_90a"),
        program_key({**CONFIG, "batch": 8}, "sm_90a"),
    ]
    assert program_key(dict(reversed(CONFIG.items())), "sm_90a") == keys[0]
    monkeypatch.setattr(programs, "compiler_version", lambda: "another compiler")
    keys.append(program_key(CONFIG, "sm_90a"))
    monkeypatch.setattr(programs.sys, "version_info", sys.version_info.__class__ and _Version(3, 99))
    keys.append(program_key(CONFIG, "sm_90a"))
    hashes = programs.source_hashes()
    assert {"kernels/producer.py", "kernels/primitives.py", "layouts/fragments.py", "problem.py"} <= set(
        hashes
    )
    monkeypatch.setattr(programs, "source_hashes", lambda: {**hashes, "kernels/producer.py": "edited"})
    keys.append(program_key(CONFIG, "sm_90a"))
    assert len(set(keys)) == len(keys)


@dataclasses.dataclass
class _Version:
    major: int
    minor: int


@pytest.mark.parametrize(
    "change", [{"batch": 7}, {"mailbox_slots": 2}, {"mailbox_tokens": 9}, {"target": "sm_100a"}]
)
def test_other_arguments_are_other_programs(change: dict[str, Any], compiled: Program) -> None:
    assert build(None, **change).key != compiled.key


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("kernel.ptx", b"// nothing", "kernel.ptx is not the file that was written: its SHA-256 differs"),
        ("kernel.cubin", b"", "kernel.cubin is not the file that was written"),
        ("kernel.cubin", None, "is not a complete program: FileNotFoundError"),
        ("program.json", b"{", "is not a complete program: JSONDecodeError"),
        ("program.json", b"[]", "is not a complete program"),
        ("program.json", b'{"format": 1}', "is not a complete program: KeyError"),
        ("program.json", b'{"format": 0}', "written by another version"),
    ],
)
def test_a_damaged_entry_is_rebuilt_with_a_warning(
    tmp_path: Path,
    compiled: Program,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: bytes | None,
    message: str,
) -> None:
    monkeypatch.setattr(programs, "_compile", lambda *_: None)
    monkeypatch.setattr(programs, "_program", lambda *_: compiled)
    build(tmp_path)
    damaged = entry_of(tmp_path) / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content)
    with pytest.raises(CorruptEntryError, match=message):
        Program.load(damaged.parent)
    with pytest.warns(RuntimeWarning, match="rebuilding a cached program: .*" + message):
        assert build(tmp_path) == compiled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(tmp_path) == compiled


def test_an_entry_under_a_wrong_key_is_rebuilt(
    tmp_path: Path, compiled: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_compile", lambda *_: None)
    monkeypatch.setattr(programs, "_program", lambda *_: compiled)
    build(tmp_path)
    path = entry_of(tmp_path) / "program.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": "0" * 64}))
    with pytest.warns(RuntimeWarning, match="holds the program 0000"):
        assert build(tmp_path) == compiled


def test_the_loser_of_a_race_replaces_the_winner(tmp_path: Path, compiled: Program) -> None:
    """Another process puts the same entry there between the look-up and the rename."""
    entry = tmp_path / "ab" / compiled.key

    def build_slowly() -> Program:
        entry.mkdir(parents=True)
        compiled.save(entry)
        return compiled

    assert programs._cached(entry, compiled.key, build_slowly) == compiled
    assert Program.load(entry) == compiled
    assert [path.name for path in entry.parent.iterdir()] == [compiled.key]


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    code = (
        "import sys; from oproj_lib.kernels.producer import OprojProducer; "
        "from oproj_lib.program import build_producer; producer = OprojProducer(768, staged_blocks=1); "
        "print(build_producer(producer, target='sm_90a', batch=1, mailbox_slots=1, mailbox_tokens=1, "
        "cache=sys.argv[1]).key)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    keys = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert keys == {Program.load(entry_of(tmp_path)).key}


def test_a_cached_program_needs_no_compiler(tmp_path: Path, compiled: Program) -> None:
    compiled.save(tmp_path)
    code = (
        "import sys; sys.modules['cutlass'] = None; from pathlib import Path; "
        "from oproj_lib.program import Program; print(Program.load(Path(sys.argv[1])).key)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == compiled.key


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(programs.importlib.metadata, "version", missing)
    with pytest.raises(RuntimeError, match=r"compiling needs CuTe DSL: pip install 'nvidia-cutlass-dsl==4.8"):
        programs.compiler_version()


def test_source_names_are_relative(compiled: Program) -> None:
    root = programs.PACKAGE.parent
    assert str(root) not in compiled.ptx
    text = f'\t.file\t1 "{root}/oproj_lib/kernels/producer.py"\n\t.file\t2 "/elsewhere/{root.name}/x.py"\n'
    relative = programs.relative_sources(text)
    assert (
        relative == f'\t.file\t1 "oproj_lib/kernels/producer.py"\n\t.file\t2 "/elsewhere/{root.name}/x.py"\n'
    )
    assert programs.source_path("oproj_lib/kernels/producer.py").is_file()


def test_launch_facts_come_from_the_host_code(compiled: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        compiled.dynamic_shared_bytes == 4 * 4 * 8 * 20 * 4
    )  # partial sums only: x and weights are in registers
    assert compiled.pdl
    with pytest.raises(RuntimeError, match="found 0 launch configurations"):
        programs.launch_facts("llvm.func @cutlass___call__()")
    real = programs.launch_facts
    monkeypatch.setattr(programs, "launch_facts", lambda module: (real(module)[0] + 16, True))
    with pytest.raises(
        RuntimeError, match="asks for 10256 bytes of dynamic shared memory, the plan says 10240"
    ):
        build(None)


def test_a_launch_without_pdl_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attribute is read back, not assumed: with another attribute id in its place the answer is no."""
    modules: list[str] = []
    real = programs.launch_facts

    def keep(module: str) -> tuple[int, bool]:
        modules.append(module)
        return real(module)

    monkeypatch.setattr(programs, "launch_facts", keep)
    assert build(None).pdl
    assert "llvm.mlir.constant(6 : i32)" in modules[0]
    assert real(modules[0].replace("constant(6 : i32)", "constant(7 : i32)")) == (10240, False)
