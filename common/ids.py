"""Distinct types for values that look alike. Types only: no logic, no imports beyond typing."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""A client's request, unique among running requests of one server."""

SeqId = NewType("SeqId", int)
"""One sample of a request on one executor; uint32, never used for another within a session."""

BlockId = NewType("BlockId", int)
"""Index of a block in an executor's device pool, 0 <= id < num_blocks."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name the content of a full block, see block_hash."""

ExecutorId = NewType("ExecutorId", str)
SessionId = NewType("SessionId", str)
LeaseId = NewType("LeaseId", int)
Epoch = NewType("Epoch", int)
"""Random 64-bit number drawn at the start of a process; fences messages meant for the process before it."""
