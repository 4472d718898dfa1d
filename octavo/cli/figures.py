"""One line about an answer: tokens, speed, and where its prompt's KV came from. Pure."""

from octavo.answers import Timing, Usage


def answer_figures(usage: Usage, timing: Timing) -> str:
    """For example "12 tokens · 41.2 tokens/s · first token after 0.13 s · prompt of 34 tokens: 32 device, 2 computed"."""
    speed = timing.tokens_per_s(usage.completion_tokens)
    parts = [f"{usage.completion_tokens} tokens"]
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"first token after {timing.time_to_first_token_s:.2f} s")
    parts.append(f"prompt of {usage.prompt_tokens} tokens: {prompt_sources(usage)}")
    return " · ".join(parts)


def prompt_sources(usage: Usage) -> str:
    """Which tiers served a prompt, fastest first, for example "32 device, 2 computed"."""
    order = {tier: place for place, tier in enumerate(("device", "shm", "disk", "redis"))}
    tiers = sorted(usage.cached_tokens_by_tier.items(), key=lambda entry: order.get(entry[0], len(order)))
    parts = [f"{num_tokens} {tier}" for tier, num_tokens in tiers if num_tokens]
    computed = usage.prompt_tokens - usage.cached_tokens
    return ", ".join([*parts, f"{computed} computed"])
