"""How often a stream gets a message. Pure; knows numbers only.

A message costs client and server about 0.25 ms of CPU together, so a message per token and stream would take a core from
the model: many streams share a budget of messages, and what is new meanwhile goes out together. A single stream gets every
token by itself. No reader waits longer than MAX_INTERVAL_S, five messages a second: faster than people read.
"""

MESSAGES_PER_S = 100
MAX_INTERVAL_S = 0.2


def message_interval_s(num_open_requests: int) -> float:
    """Least time between two messages of one stream.

    Args:
        num_open_requests: requests that are queued or running on this server.
    """
    return min(MAX_INTERVAL_S, (num_open_requests - 1) / MESSAGES_PER_S) if num_open_requests > 1 else 0.0
