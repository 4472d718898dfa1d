"""What executor_svc calls: the block store."""
