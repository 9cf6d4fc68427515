"""`python -m oproj_lib.figures [FOLDER]`: draw the README's picture again."""

from __future__ import annotations

import sys
from pathlib import Path

from oproj_lib.figures.overview import readme_picture

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    print(readme_picture().save(folder / "kernel.png"))
