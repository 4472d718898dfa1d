"""Benchmarks: one module per workload family; each prints a table for people and JSON lines for machines."""
