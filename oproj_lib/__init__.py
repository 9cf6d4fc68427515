"""Attention output-projection kernels, and everything the workbook's notebooks stand on.

Importing the package is free: numpy, CuTe DSL and Jupyter are loaded by the modules that use them.
"""

from __future__ import annotations

__version__ = "0.1.0"
