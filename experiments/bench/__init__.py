"""Benchmarks: every figure is a ratio against a baseline measured beside it."""

from .harness import Row, alternate
from .run import BENCHMARKS, main_bench, run_benchmarks

__all__ = ["BENCHMARKS", "Row", "alternate", "main_bench", "run_benchmarks"]
