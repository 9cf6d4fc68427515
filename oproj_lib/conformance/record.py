"""What hardware answered, kept as data (`data/conformance_h200.json`)."""

from __future__ import annotations

import base64
import json
import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np

from .case import Array, Case, digest, expected, mismatches
from .differences import known
from .registry import cases

DATA = Path(__file__).resolve().parents[1] / "data" / "conformance_h200.json"


def recorded(path: Path = DATA) -> dict[str, Any]:
    """The recorded hardware run: machine, driver, date, command, and per case the SHA-256 of the results.

    Raises FileNotFoundError if there is none.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def filters(itemsize: int) -> list[dict[str, int]]:
    """Differences from word to word (neighbouring operands have neighbouring results), then LZMA."""
    return [{"id": lzma.FILTER_DELTA, "dist": itemsize}, {"id": lzma.FILTER_LZMA2, "preset": 9}]


def encode(output: Array) -> str:
    raw = np.ascontiguousarray(output).tobytes()
    packed = lzma.compress(raw, format=lzma.FORMAT_RAW, filters=filters(output.dtype.itemsize))
    return base64.b64encode(packed).decode()


def decode(case: Case, text: str) -> Array:
    """Whole results, kept where a hash would not do."""
    chain = filters(case.output_dtype.itemsize)
    raw = lzma.decompress(base64.b64decode(text), format=lzma.FORMAT_RAW, filters=chain)
    return np.frombuffer(raw, case.output_dtype).reshape(case.output_shape)


def record(out: Path, path: Path = DATA) -> str:
    """Keeps a hardware run as the data file; returns a summary.

    Whole results are kept of the cases that differ from the virtual GPU or have a tolerance.

    Raises ValueError if the run lacks a case, failed in one, or ran other kernels than today's.
    """
    run = json.loads((out / "conformance.json").read_text(encoding="utf-8"))
    arrays = np.load(out / "conformance.npz")
    kept, differing = {}, []
    for case in cases():
        item = run["cases"].get(case.name, {"error": "not run"})
        if "error" in item or not item["stable"] or item["fingerprint"] != case.fingerprint:
            raise ValueError(f"{case.name}: {item.get('error') or 'unstable, or another kernel than today'}")
        kept[case.name] = {"fingerprint": item["fingerprint"][:16], "sha256": item["sha256"]}
        if case.entry not in arrays:
            continue
        output = expected(case)
        if case.tolerance is not None or digest(output) != item["sha256"]:
            kept[case.name]["values"] = encode(arrays[case.entry])
        if mismatches(case, arrays[case.entry], output, known(case)).any():
            differing.append(case.name)
    head = {name: value for name, value in run.items() if name != "cases"}
    version = re.search(r"\d+\.\d+(\.\d+)?", head["kernel_driver"])
    head["kernel_driver"] = version.group() if version else ""
    lines = [f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in kept.items()]
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": {\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")
    return f"{len(kept)} cases recorded in {path.name}; differing: {', '.join(differing) or 'none'}"
