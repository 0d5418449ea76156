"""Benchmarks: every figure is a ratio against a baseline measured beside it."""
