"""A count of steps that what changes by one with each of them is kept relative to, so that nobody has to touch it each time."""


class Ticks:
    """See the module's first line.

    Attributes:
        count: of steps so far.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
