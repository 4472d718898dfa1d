"""Shared memory between processes of one host: memfd slabs and their hand-over by file descriptor."""
