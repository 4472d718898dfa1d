"""Who goes first: one policy a file, all with the interface of policy.py. Pure."""
