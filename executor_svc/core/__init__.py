"""What the running batch is and how a step is laid out. Pure: no torch, grpc, asyncio, clock or random."""
