"""What scheduler_svc calls: executors and the block store."""
