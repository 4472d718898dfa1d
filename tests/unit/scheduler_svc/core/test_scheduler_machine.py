"""The scheduler under orders that Hypothesis picks and shrinks: KV is never mixed up, outputs are right, all blocks come back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.scheduler_svc.core.rig import ROOT, Rig, make_config

# Prompts are beginnings of a few texts, so that they often share blocks.
TEXTS = [[1] * 24, list(range(24)), [*range(10), *[7] * 14]]


class SchedulerMachine(RuleBasedStateMachine):
    """A pool of twelve blocks of four tokens, four sequences at most, up to two plans ahead."""

    rig: Rig

    @initialize(max_chunk_tokens=st.sampled_from([3, 8, 16]), prefix_caching=st.booleans())
    def start(self, max_chunk_tokens: int, prefix_caching: bool) -> None:
        self.rig = Rig(
            make_config(
                num_blocks=12,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                max_chunk_tokens=max_chunk_tokens,
                prefix_caching=prefix_caching,
                save_blocks=True,
            )
        )

    @rule(
        text=st.sampled_from(TEXTS),
        num_prompt_tokens=st.integers(1, 24),
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        stop=st.sets(st.integers(0, 49), max_size=5),
    )
    def add(self, text: list[int], num_prompt_tokens: int, max_tokens: int, n: int, stop: set[int]) -> None:
        self.rig.add(text[:num_prompt_tokens], max_tokens, n=n, stop=stop, root=ROOT)

    @rule()
    def schedule(self) -> None:
        if len(self.rig.plans) < 3:
            self.rig.schedule()

    @rule()
    def apply(self) -> None:
        if self.rig.plans:
            self.rig.apply()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.rig.live:
            self.rig.cancel(data.draw(st.sampled_from(self.rig.live_requests())))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.rig.live:
            self.rig.finish(data.draw(st.sampled_from(self.rig.live_sequences())))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.rig.executor.sequences:
            self.rig.executor.failing.add(data.draw(st.sampled_from(sorted(self.rig.executor.sequences))))

    @rule(data=st.data(), num_loaded=st.integers(0, 6), early=st.booleans())
    def begin_load(self, data: st.DataObject, num_loaded: int, early: bool) -> None:
        if self.rig.live:
            self.rig.begin_load(data.draw(st.sampled_from(self.rig.live_requests())), num_loaded, early=early)

    @rule()
    def end_load(self) -> None:
        if self.rig.loads:
            self.rig.end_load()

    @rule(max_blocks=st.integers(1, 6), early=st.booleans())
    def take_saves(self, max_blocks: int, early: bool) -> None:
        self.rig.take_saves(max_blocks, early=early)

    @rule()
    def end_save(self) -> None:
        if self.rig.saves:
            self.rig.end_save()

    @rule()
    def flush(self) -> None:
        self.rig.scheduler.flush_cache()

    @rule(is_reset=st.booleans())
    def lose_executor(self, is_reset: bool) -> None:
        if is_reset:
            self.rig.reset()
        else:
            self.rig.evacuate()

    @invariant()
    def bookkeeping_agrees(self) -> None:
        self.rig.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.executor.failing.clear()
            self.rig.wind_up()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40)
