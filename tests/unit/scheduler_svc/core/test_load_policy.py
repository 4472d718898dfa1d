from scheduler_svc.core.load_policy import LoadPolicy


def policy(load_bytes_per_s: float, prefill_tokens_per_s: float) -> LoadPolicy:
    """Blocks of 16 tokens and 1,000 bytes."""
    made = LoadPolicy(block_bytes=1000, block_size=16)
    made.note_load(1, 1000 / load_bytes_per_s)
    made.note_prefill(16, 16 / prefill_tokens_per_s)
    return made


def test_loading_is_tried_before_anything_is_measured() -> None:
    assert LoadPolicy(1000, 16).should_load(1)
    assert not LoadPolicy(1000, 16).should_load(0)


def test_the_faster_way_wins() -> None:
    assert policy(load_bytes_per_s=2000, prefill_tokens_per_s=16).should_load(4)
    assert not policy(load_bytes_per_s=500, prefill_tokens_per_s=16).should_load(4)


def test_a_losing_load_is_tried_again_once_in_a_while() -> None:
    slow = policy(load_bytes_per_s=500, prefill_tokens_per_s=16)
    decisions = [slow.should_load(4) for _ in range(32)]
    assert decisions.count(True) == 2


def test_rates_follow_what_is_measured() -> None:
    slow = policy(load_bytes_per_s=500, prefill_tokens_per_s=16)
    for _ in range(20):
        slow.note_load(10, 1.0)
    assert slow.should_load(4)


def test_loads_of_nothing_say_nothing_about_the_rate() -> None:
    made = LoadPolicy(1000, 16)
    made.note_load(0, 1.0)
    made.note_prefill(0, 1.0)
    assert (made.load_bytes_per_s, made.prefill_tokens_per_s) == (None, None)
