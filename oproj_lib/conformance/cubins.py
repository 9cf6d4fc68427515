"""Machine code of the unit kernels: one cubin per family, made by ptxas, so that the GPU's machine needs no
compiler."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .case import HEADER, TARGET, Array, Case, digest

BUNDLE = "cases.json"
INPUTS = "inputs.npz"


def ptxas() -> Path:
    """The assembler: of the PyPI package nvidia-cuda-nvcc, or on the PATH.

    Raises FileNotFoundError if there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(root).glob("cu*/bin/ptxas"), reverse=True):
            return found
    on_path = shutil.which("ptxas")
    if on_path is None:
        raise FileNotFoundError(
            "ptxas: install nvidia-cuda-nvcc (the `test` extra), or put ptxas on the PATH"
        )
    return Path(on_path)


def family_file(family: str) -> str:
    return re.sub(r"\W+", "_", family) + ".cubin"


def by_family(cases: Sequence[Case]) -> dict[str, list[Case]]:
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    return families


def module_ptx(cases: Sequence[Case]) -> str:
    """One module with the kernels of all these cases."""
    return HEADER + "".join(case.kernel for case in cases)


def assemble(cases: Sequence[Case], cubin: Path) -> None:
    """Raises RuntimeError with ptxas's words if it refuses the module."""
    source = cubin.with_suffix(".ptx")
    source.write_text(module_ptx(cases), encoding="utf-8")
    command = [str(ptxas()), f"-arch={TARGET}", "-o", str(cubin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[:4000]}")


def build(directory: Path, cases: Sequence[Case], results: Mapping[str, Array] | None = None) -> None:
    """Writes all that a run on hardware needs: cubins, inputs and a table of launches.

    `results`: the virtual GPU's results by case name; their SHA-256 goes into the table, and the hardware run
    then brings back whole arrays only where the hash differs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for family, members in by_family(cases).items():
        assemble(members, directory / family_file(family))
    stored: dict[str, Array] = {}
    rows = [launch_row(case, stored, results) for case in cases]
    np.savez_compressed(directory / INPUTS, **stored)  # type: ignore[arg-type]  # not its flag allow_pickle
    (directory / BUNDLE).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def launch_row(
    case: Case, stored: dict[str, Array], results: Mapping[str, Array] | None
) -> dict[str, object]:
    """What the hardware run must know of a case. Arrays that several cases share are stored once."""
    inputs = []
    for array in case.inputs.values():
        key = digest(array)[:16]
        stored[key] = array
        inputs.append(key)
    return {
        "name": case.name,
        "family": case.family,
        "cubin": family_file(case.family),
        "entry": case.entry,
        "grid": case.grid,
        "block": case.block,
        "dynamic_shared_bytes": case.dynamic_shared_bytes,
        "inputs": inputs,
        "output_shape": case.output_shape,
        "output_dtype": case.output_dtype.name,
        "fingerprint": case.fingerprint,
        "keep": case.tolerance is not None,
        "expected": digest(results[case.name]) if results is not None else None,
    }


def load(directory: Path) -> dict[str, bytes]:
    """The cubins that `build` wrote, by family.

    Raises FileNotFoundError if there are none.
    """
    rows = json.loads((directory / BUNDLE).read_text(encoding="utf-8"))
    return {row["family"]: (directory / row["cubin"]).read_bytes() for row in rows}
