"""Kernels for CUDA devices, written in Triton, and the attention backend made of them.

Imports torch and triton only; nothing here runs without a CUDA device, except in Triton's interpreter.
"""
