"""An exchange between tensor-parallel ranks: virtual ones in one process, or one process per GPU."""

from __future__ import annotations

from oproj_lib.ranks.grid_times import GridRow, table, timeline

__all__ = ["GridRow", "table", "timeline"]
