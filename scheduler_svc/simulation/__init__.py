"""The production scheduler in virtual time, before executors that only take as long as real ones. See docs/operations.md."""
