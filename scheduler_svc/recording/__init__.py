"""What the scheduler's core was told and what it decided: written while it serves, run again later. See docs/operations.md."""
