"""Steps on an NVIDIA GPU: plans become queued work, results come back by event, the step loop waits for neither."""
