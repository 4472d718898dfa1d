"""What an edge process has yet to be told: everything since the last message, put together into one. Knows no socket.

The step loop adds to it for each token of each stream, so a plain token is two numbers in two arrays. While the edge is slow
nothing is sent and more is put together.
"""

import sys
from array import array

from octavo.scheduler.v1 import edge_line_pb2 as pb


class PendingNews:
    """Gathers news. The step loop appends to its attributes, which are those of EdgeNews."""

    def __init__(self) -> None:
        self.samples = array("Q")
        self.token_ids = array("I")
        self.starts: list[pb.RequestStart] = []
        self.updates: list[pb.SampleNews] = []
        self.failures: list[pb.RequestFailure] = []
        self.answers: list[pb.EdgeAnswer] = []

    def take(self, num_open_requests: int) -> pb.EdgeNews:
        """All of it, and begins anew."""
        news = pb.EdgeNews(
            num_open_requests=num_open_requests,
            samples=_little_endian(self.samples),
            token_ids=_little_endian(self.token_ids),
            starts=self.starts,
            updates=self.updates,
            failures=self.failures,
            answers=self.answers,
        )
        self.samples, self.token_ids = array("Q"), array("I")
        self.starts, self.updates, self.failures, self.answers = [], [], [], []
        return news


def sample_tokens(news: pb.EdgeNews) -> "zip[tuple[int, int]]":
    """The plain tokens of a message: pairs of sample and token id, in order."""
    samples, token_ids = array("Q", news.samples), array("I", news.token_ids)
    if sys.byteorder == "big":
        samples.byteswap()
        token_ids.byteswap()
    return zip(samples, token_ids, strict=True)


def _little_endian(numbers: "array[int]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
