"""`python -m oproj_lib`."""

from __future__ import annotations

import sys

from oproj_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
