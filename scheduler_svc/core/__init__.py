"""Policy and bookkeeping as plain classes: no grpc, no asyncio, no clock and no random that is not handed in."""
