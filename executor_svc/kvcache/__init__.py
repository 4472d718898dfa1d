"""The memory that holds KV on the device. Knows bytes and shapes, not who owns a block."""
