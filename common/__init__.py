"""What all three services share. Knows no service: nothing in here imports scheduler_svc, executor_svc or kvstore_svc."""
