"""Runs a bundle of unit kernels on a GPU: `python3 hardware.py BUNDLE OUT` (see `oproj_lib.conformance`).

Stands alone, so that the GPU's machine needs only numpy and cuda-bindings. Writes OUT/conformance.json (machine,
driver, date, command, and the SHA-256 of each case's results) and OUT/conformance.npz (whole results, by entry, where
the hash differs from the virtual GPU's or the case is compared with a tolerance). Every kernel runs twice, and results
that differ between the runs are marked. The kernels run in a child process: if one hangs or faults, that case
becomes an error and a new child goes on with the next.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE_S = 60.0  # without a finished case: the child hangs
DEFAULT_SHARED_BYTES = 48 * 1024  # of dynamic shared memory that needs no opt-in


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError for an error code."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error!r}")
    return values[0] if len(values) == 1 else tuple(values) or None


class Gpu:
    """The first GPU, through the driver API."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        checked(driver.cuInit(0))
        self.device = checked(driver.cuDeviceGet(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(self.device))))
        self.modules: dict[str, Any] = {}

    def name(self) -> str:
        raw = checked(self.driver.cuDeviceGetName(128, self.device))
        return raw.split(b"\0")[0].decode()

    def driver_version(self) -> int:
        return int(checked(self.driver.cuDriverGetVersion()))

    def function(self, key: str, cubin: bytes, entry: str) -> Any:
        if key not in self.modules:
            self.modules[key] = checked(self.driver.cuModuleLoadData(cubin))
        return checked(self.driver.cuModuleGetFunction(self.modules[key], entry.encode()))

    def run(self, function: Any, row: dict[str, Any], inputs: list[np.ndarray]) -> np.ndarray:
        """Launches a kernel on its inputs and a zeroed result; returns the result."""
        driver = self.driver
        output = np.zeros(row["output_shape"], row["output_dtype"])
        arrays = [*inputs, output]
        pointers = [checked(driver.cuMemAlloc(max(array.nbytes, 16))) for array in arrays]
        try:
            for pointer, array in zip(pointers, arrays):  # noqa: B905
                host = np.ascontiguousarray(array)
                checked(driver.cuMemcpyHtoD(pointer, host.ctypes.data, host.nbytes))
            self.launch(function, row, [int(pointer) for pointer in pointers])
            checked(driver.cuMemcpyDtoH(output.ctypes.data, pointers[-1], output.nbytes))
        finally:
            for pointer in pointers:
                driver.cuMemFree(pointer)
        return output

    def launch(self, function: Any, row: dict[str, Any], pointers: list[int]) -> None:
        driver, shared = self.driver, row["dynamic_shared_bytes"]
        if shared > DEFAULT_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, shared))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = row["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = row["block"]
        config.sharedMemBytes = shared
        config.hStream = driver.CUstream(0)
        config.numAttrs = 0
        values = [ctypes.c_uint64(pointer) for pointer in pointers]
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))
        checked(driver.cuCtxSynchronize())


def digest(output: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(output).tobytes()).hexdigest()


def run_cases(bundle: Path, out: Path, first: int) -> None:
    """The child: runs cases from number `first`, a line of JSON for each as soon as it is done."""
    rows = json.loads((bundle / "cases.json").read_text(encoding="utf-8"))
    stored = dict(np.load(bundle / "inputs.npz"))
    gpu = Gpu()
    with (out / "lines.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"machine": gpu.name(), "cuda_driver": gpu.driver_version()}) + "\n")
        for number in range(first, len(rows)):
            row = rows[number]
            log.write(json.dumps({"begin": number}) + "\n")
            log.flush()
            function = gpu.function(row["cubin"], (bundle / row["cubin"]).read_bytes(), row["entry"])
            inputs = [stored[key] for key in row["inputs"]]
            output, again = (gpu.run(function, row, inputs) for _ in range(2))
            line = {"number": number, "sha256": digest(output), "stable": bool((output == again).all())}
            if row["keep"] or line["sha256"] != row["expected"]:
                np.save(out / f"{row['entry']}.npy", output)
            log.write(json.dumps(line) + "\n")
            log.flush()


def lines_of(out: Path) -> list[dict[str, Any]]:
    path = out / "lines.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def supervise(bundle: Path, work: Path, count: int) -> dict[int, str]:
    """Runs children until every case has been tried; returns the errors by case number."""
    errors: dict[int, str] = {}
    first = 0
    while first < count:
        command = [sys.executable, __file__, str(bundle), str(work), str(first)]
        messages = (work / "stderr.txt").open("w+", encoding="utf-8")
        child = subprocess.Popen(command, stderr=messages)
        seen, since = -1, time.monotonic()
        while child.poll() is None:
            time.sleep(0.1)
            now = len(lines_of(work)) if (work / "lines.jsonl").exists() else 0
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                child.kill()
                child.wait()
        if child.returncode == 0:
            break
        messages.seek(0)
        tail = messages.read().strip().splitlines()[-1:] or ["killed: no progress"]
        begun = [line["begin"] for line in lines_of(work) if "begin" in line]
        if not begun or begun[-1] < first:
            raise RuntimeError(f"the child failed before its first case: {tail[0]}")
        errors[begun[-1]] = tail[0]
        first = begun[-1] + 1
    return errors


def main(bundle: Path, out: Path) -> None:
    rows = json.loads((bundle / "cases.json").read_text(encoding="utf-8"))
    work = out / "work"
    work.mkdir(parents=True)
    errors = supervise(bundle, work, len(rows))
    lines = lines_of(work)
    done = {line["number"]: line for line in lines if "number" in line}
    machine = next(line for line in lines if "machine" in line)
    found: dict[str, Any] = {}
    for number, row in enumerate(rows):
        line = done.get(number)
        found[row["name"]] = {"fingerprint": row["fingerprint"]}
        if line is None:
            found[row["name"]]["error"] = errors.get(number, "not run")
        else:
            found[row["name"]] |= {"sha256": line["sha256"], "stable": line["stable"]}
    record = {
        "machine": machine["machine"],
        "cuda_driver": machine["cuda_driver"],
        "kernel_driver": kernel_driver(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python3 hardware.py BUNDLE OUT",
        "python": platform.python_version(),
        "cases": found,
    }
    (out / "conformance.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    arrays = {path.stem: np.load(path) for path in sorted(work.glob("*.npy"))}
    np.savez_compressed(out / "conformance.npz", **arrays)
    for path in work.iterdir():
        path.unlink()
    work.rmdir()
    same = sum(found[row["name"]].get("sha256") == row["expected"] for row in rows)
    unstable = [name for name, item in found.items() if not item.get("stable", True)]
    print(
        f"{len(rows)} cases on {record['machine']}: {same} equal the virtual GPU bit for bit, {len(errors)} errors"
    )
    print("unstable:", unstable or "none")
    for row in rows:
        item = found[row["name"]]
        if "error" in item:
            print("ERROR", row["name"], item["error"])
        elif item["sha256"] != row["expected"]:
            print("differs" + (" (approximate)" if row["keep"] else ""), row["name"])


def kernel_driver() -> str:
    """The kernel module's version, as the system states it; empty if it does not."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0].strip() if path.exists() else ""


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run_cases(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) == 3:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    else:
        sys.exit("usage: python3 hardware.py BUNDLE OUT")
