"""A bundle: compiled programs, and what each must publish, made where CuTe DSL is and carried to where a GPU is.

    bundle.json        what was built, with which versions; per program the inputs (kind, seed) and SHA-256 of
                       inputs and output
    programs/<label>/  a saved Program: program.json, kernel.ptx, kernel.cubin

The expected output is the virtual GPU's with exact arithmetic, so that hardware can be compared bit for bit.
Inputs are not carried: `Problem.inputs` draws them again, and their hashes say that they are the same.
Reading a bundle needs neither CuTe DSL nor a GPU.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib import doctor
from oproj_lib.bundle_recipes import Recipe, build_program, recipes
from oproj_lib.problem import Problem
from oproj_lib.program import PACKAGE, Program

FORMAT = 1
INDEX = "bundle.json"
PROGRAMS = "programs"


@dataclass(frozen=True)
class Expected:
    """One launch and what it must publish. error: relative Frobenius against float64."""

    kind: str
    seed: int
    x_sha256: str
    weight_sha256: str
    out_sha256: str
    error: float


@dataclass(frozen=True)
class Entry:
    """One program of a bundle. label: its folder; timed: `bench` measures it."""

    label: str
    engine: str
    target: str
    ranks: int
    batch: int
    k: int
    settings: dict[str, int]
    transport: str
    timed: bool
    expected: tuple[Expected, ...]


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk. versions: of the packages that made it."""

    directory: Path
    target: str
    date: str
    versions: dict[str, str | None]
    entries: tuple[Entry, ...]

    def program(self, entry: Entry) -> Program:
        """The entry's program. Raises FileNotFoundError or CorruptEntryError (a ValueError)."""
        return Program.load(self.directory / PROGRAMS / entry.label)

    def timed(self) -> tuple[Entry, ...]:
        """The entries that `bench` measures."""
        return tuple(entry for entry in self.entries if entry.timed)


def load(directory: Path | str) -> Bundle:
    """Read a bundle.

    Raises FileNotFoundError where there is none, with the command that makes one; ValueError where it does
    not hold together.
    """
    directory = Path(directory)
    index = directory / INDEX
    if not index.exists():
        raise FileNotFoundError(
            f"no {INDEX} in {directory}: make one with `python -m oproj_lib build --target sm_90a --out "
            f"{directory}`, which needs CuTe DSL and no GPU"
        )
    try:
        fields = json.loads(index.read_text(encoding="utf-8"))
        found = fields.pop("format")
        if found != FORMAT:
            raise ValueError(f"format {found}, this version reads {FORMAT}")
        entries = tuple(
            Entry(**{**entry, "expected": tuple(Expected(**case) for case in entry["expected"])})
            for entry in fields.pop("entries")
        )
        return Bundle(directory, entries=entries, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no bundle of this version: {error}") from error


def build(
    target: str,
    directory: Path | str,
    *,
    quick: bool = False,
    chosen: Sequence[Recipe] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Compile every program of ``recipes(target)`` (or of ``chosen``), run each on the virtual GPU, write it all.

    directory: new, empty, or with a bundle. A program that is in it already, compiled from the same sources and
    expected by the same virtual GPU, is kept, so an interrupted build goes on and an unchanged one costs little. The
    index is written after every program.

    Raises ValueError for a directory with other files in it or an unknown target, RuntimeError where CuTe DSL is
    missing or the virtual GPU finds something wrong: a wrong expectation is never written.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / INDEX).exists():
        raise ValueError(f"{directory} is not empty and holds no bundle: give a new directory")
    plan = tuple(chosen) if chosen is not None else recipes(target, quick=quick)
    bundle = Bundle(directory, target, datetime.date.today().isoformat(), versions(), ())
    old = _entries_of(bundle)
    directory.mkdir(parents=True, exist_ok=True)
    write(bundle)
    for number, recipe in enumerate(plan, 1):
        entry, how = _entry(bundle, recipe, old.get(recipe.label))
        bundle = replace(bundle, entries=(*bundle.entries, entry))
        write(bundle)
        progress(f"{number} of {len(plan)}: {recipe.label} ({how})")
    return bundle


def _entries_of(bundle: Bundle) -> dict[str, Entry]:
    """What a bundle of the same target and versions in that directory holds, by label."""
    if not (bundle.directory / INDEX).exists():
        return {}
    there = load(bundle.directory)
    same = (there.target, there.versions) == (bundle.target, bundle.versions)
    return {entry.label: entry for entry in there.entries} if same else {}


def _entry(bundle: Bundle, recipe: Recipe, old: Entry | None) -> tuple[Entry, str]:
    """(entry with its program in place, "kept" or "built")."""
    program = build_program(recipe, bundle.target)
    kinds = tuple(case.kind for case in old.expected) if old else ()
    if old and kinds == recipe.kinds and bundle.program(old).key == program.key:
        return old, "kept"
    folder = bundle.directory / PROGRAMS / recipe.label
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program.save(folder)
    entry = Entry(
        label=recipe.label,
        engine=recipe.engine,
        target=bundle.target,
        ranks=recipe.ranks,
        batch=recipe.batch,
        k=recipe.k,
        settings=recipe.settings,
        transport=recipe.transport,
        timed=recipe.timed,
        expected=tuple(expect(program, recipe, kind) for kind in recipe.kinds),
    )
    return entry, "built"


def write(bundle: Bundle) -> None:
    """Write the index. The programs are in place already."""
    fields: dict[str, Any] = {"format": FORMAT, **asdict(bundle)}
    del fields["directory"]
    text = json.dumps(fields, indent=1) + "\n"
    (bundle.directory / INDEX).write_text(text, encoding="utf-8")


def expect(program: Program, recipe: Recipe, kind: str) -> Expected:
    """What the virtual GPU publishes for one kind of inputs, with exact arithmetic.

    Raises RuntimeError where it finds anything wrong with the run or the result.
    """
    from oproj_lib.delivery import SLOT, judge
    from oproj_lib.run import launch_on_vgpu, one_line

    seed = recipe.seed(kind)
    x, weight = Problem(recipe.ranks, recipe.batch).inputs(seed, kind)
    mailboxes, report, _ = launch_on_vgpu(program, x, weight, ranks=recipe.mailboxes, exact=True)
    error, findings = judge(mailboxes, x, weight, str(program.config["policy"]))
    if wrong := [*map(one_line, report.findings), *findings]:
        raise RuntimeError(f"{recipe.label}, {kind}: the virtual GPU found {wrong[0]}")
    out = mailboxes[0].array[SLOT, : recipe.batch]
    return Expected(kind, seed, sha256(x), sha256(weight), sha256(out), error)


def sha256(array: np.ndarray) -> str:
    """Of an array's bytes, row by row."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def versions() -> dict[str, str | None]:
    """Of the packages that a bundle depends on, and the virtual GPU's sources, by their SHA-256."""
    packages = ("oproj-workbook", "nvidia-cutlass-dsl", "numpy", "ml_dtypes")
    found = {name: doctor.version(name) for name in packages}
    sources = sorted((PACKAGE / "vgpu").glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    return {**found, "virtual GPU": hashlib.sha256(text).hexdigest()[:16]}
