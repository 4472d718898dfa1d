"""Attention backends and fused operations: one interface, one package per kind of device."""
