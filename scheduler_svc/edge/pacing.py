"""How often a stream gets a message. Pure; knows numbers only.

A message costs client and server about 0.5 ms of CPU together, so a message per token and stream would take a core from the
model where cores are few: many streams share a budget of messages that is a small part of the machine, and what is new meanwhile
goes out together. A single stream gets every token by itself. Streams that began together are spread over the interval, or all
their messages would go out in one burst, with no step looked after meanwhile. No reader waits much longer than MAX_INTERVAL_S,
four messages a second: faster than people read.
"""

from dataclasses import dataclass

MESSAGES_PER_CORE_S = 25
MESSAGES_PER_CORE_BESIDE_S = 100
"""Where messages are written by processes beside the engine's: no step waits for them."""
MAX_INTERVAL_S = 0.25


@dataclass(frozen=True)
class Pacing:
    """The budget of one server.

    Attributes:
        num_cores: of the machine that server, executors and often clients share.
        messages_per_core_s: of all streams together.
    """

    num_cores: int
    messages_per_core_s: int = MESSAGES_PER_CORE_S

    def message_interval_s(self, num_open_requests: int) -> float:
        """Least time between two messages of one stream.

        Args:
            num_open_requests: requests that are queued or running on this server.
        """
        if num_open_requests <= 1:
            return 0.0
        return min(MAX_INTERVAL_S, (num_open_requests - 1) / (self.messages_per_core_s * self.num_cores))


def stream_phase(stream_number: int) -> float:
    """The part of an interval, 0 <= phase < 1, that a stream waits after its first message.

    Multiples of the golden ratio: however many streams follow each other, they are spread evenly.
    """
    return stream_number * 0.6180339887498949 % 1.0
