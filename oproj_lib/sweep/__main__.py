"""`python -m oproj_lib.sweep expect`: simulate what every configuration must publish, and keep its SHA-256."""

from __future__ import annotations

import argparse
from pathlib import Path

from oproj_lib.sweep import expected


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m oproj_lib.sweep", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    expect = actions.add_parser("expect", help="some minutes; needs CuTe DSL and no GPU")
    expect.add_argument("--out", type=Path, default=expected.DATA)
    print(expected.make(parser.parse_args().out, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
