"""Measurements that say what was measured, where, and when."""
