"""`python -m oproj_lib.conformance build DIR | record DIR OUT | table`."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from . import cubins, hardware
from .case import expected
from .document import document
from .record import record
from .registry import cases


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m oproj_lib.conformance", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="write cubins, inputs and the runner")
    build.add_argument("directory", type=Path)
    keep = actions.add_parser("record", help="keep what a hardware run brought back")
    keep.add_argument("out", type=Path, help="the directory with conformance.json and conformance.npz")
    actions.add_parser("table", help="print docs/conformance.md")
    arguments = parser.parse_args()
    if arguments.action == "build":
        start = time.perf_counter()
        results = {case.name: expected(case) for case in cases()}
        cubins.build(arguments.directory, cases(), results)
        shutil.copy(hardware.__file__, arguments.directory / "hardware.py")
        print(f"{len(results)} cases in {arguments.directory}, {time.perf_counter() - start:.0f} s")
    elif arguments.action == "record":
        print(record(arguments.out))
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
