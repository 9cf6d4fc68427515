"""Kernels that the virtual GPU must execute and that no compiler of this project produced."""
