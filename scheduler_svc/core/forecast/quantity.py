"""What is counted and forecast. Names only."""

import enum


class Quantity(enum.Enum):
    """Of requests, per second."""

    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
