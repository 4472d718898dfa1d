"""Parts of the GPU executor that need no GPU, over a queue on the CPU."""
