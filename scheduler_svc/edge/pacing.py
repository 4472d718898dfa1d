"""How often a stream gets a message. Pure; knows numbers only.

A message costs client and server about 0.25 ms of CPU together, so a message per token and stream would take a core from
the model: many streams share a budget of messages, and what is new meanwhile goes out together. A single stream gets every
token by itself. Streams that began together are spread over the interval, or all their messages would go out in one burst, with
no step looked after meanwhile. No reader waits much longer than MAX_INTERVAL_S, five messages a second: faster than people read.
"""

MESSAGES_PER_S = 100
MAX_INTERVAL_S = 0.2


def message_interval_s(num_open_requests: int) -> float:
    """Least time between two messages of one stream.

    Args:
        num_open_requests: requests that are queued or running on this server.
    """
    return min(MAX_INTERVAL_S, (num_open_requests - 1) / MESSAGES_PER_S) if num_open_requests > 1 else 0.0


def stream_phase(stream_number: int) -> float:
    """The part of an interval, 0 <= phase < 1, that a stream waits after its first message.

    Multiples of the golden ratio: however many streams follow each other, they are spread evenly.
    """
    return stream_number * 0.6180339887498949 % 1.0
