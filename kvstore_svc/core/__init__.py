"""Index, leases, sessions and places of blocks as plain classes: no grpc, no asyncio, no clock that is not handed in."""
