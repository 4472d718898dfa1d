"""Where block bytes lie: shared memory first, and what can be plugged in below it."""
