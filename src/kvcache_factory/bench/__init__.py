"""Benchmarks behind ``kvcache-factory bench``: one module per table, one way of measuring."""
