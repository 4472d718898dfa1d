"""Fair shares of tenants inside service classes, with a bound on waiting. The default.

Tenant and class make a lane. The order of admission:

    1. lanes in which somebody waits and nobody was admitted for the class's patience, longest overdue first ("ageing")
    2. classes, most urgent first; in a class those that were preempted, then the lane that was served least

In a lane: by priority, then by the time at which the first token should be there, then by arrival.

What a lane was served is counted in virtual tokens, as in "Fairness in Serving Large Language Models" (VTC, arXiv 2401.00588):
a prompt token 1, or CACHED_TOKEN if it need not be computed, when its request is admitted; a decoded token DECODED_TOKEN; a
block on the device BLOCK_SECOND for each second; all divided by the tenant's weight. A lane in which nobody waited is lifted to
CREDIT below the class's virtual time when somebody comes: the least service of all lanes in which somebody waits. Nobody saves up
a larger claim by being idle; that much lets somebody who needs little send two requests at once and not wait for the second.

The service gap. Let two lanes of a class have somebody waiting all through an interval. What they are served in it, by weight,
differs by at most 2 * (LEAD + U), where U is the most virtual tokens that can be charged to one lane for one prompt and for
all it has in the batch (gap_bound). Proof sketch: virtual time v never falls, because service never falls and who joins is lifted
to v - C at least, C being CREDIT of LEAD; and no lane in which somebody waits is below that. Nor is one above v + LEAD - C + U:
at its last admission it was at v at most, being the lowest, or at v + LEAD - C at most, being overdue; since then it was charged
for that prompt and for what runs, which is U at most. (Preempted sequences go before new ones of their class, so a lane never
has more under way than there are seats.) So at any time all such lanes lie in [v - C, v - C + LEAD + U].

The wait. Let somebody wait in a lane whose service is at most LEAD - C above v. After the class's patience without an admission
the lane is overdue, and is ahead of everything but lanes that are overdue longer. Each of those leaves the front with one
admission. So the next of the lane is admitted at the latest when, beginning with patience_s after the admission before, seats and
blocks have come free for one sequence of each other lane and for it: W = patience_s + the time of that, whatever comes meanwhile.
What was admitted because it was overdue runs in the first tier: no class takes its room away; nor does it take any from its own
class or more urgent ones. A lane further ahead than that was served that much more than others that wait; it is overdue only
after they have caught up. Preempted sequences age one by one, in the same way.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from math import inf

from scheduler_svc.core.policies.lane import Lane, LaneHeap
from scheduler_svc.core.policies.sequence_heap import SequenceHeap
from scheduler_svc.core.preemption import Cost, choose_victim, lost_tokens
from scheduler_svc.core.request import Request, ServiceClass
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.tenants import EQUALS, Tenants

CACHED_TOKEN = 0.1
DECODED_TOKEN = 2.0
BLOCK_SECOND = 0.5
"""A context of 1,000 tokens in blocks of 16 costs a third of what its decoded tokens do at 50 a second."""
LEAD = 32_768.0
"""Virtual tokens."""
CREDIT = 0.25
"""Of the lead."""
PATIENCE_S: Mapping[ServiceClass, float] = {
    ServiceClass.INTERACTIVE: 2.0,
    ServiceClass.STANDARD: 15.0,
    ServiceClass.BATCH: 120.0,
}
TTFT_TARGET_S: Mapping[ServiceClass, float] = {
    ServiceClass.INTERACTIVE: 1.0,
    ServiceClass.STANDARD: 5.0,
    ServiceClass.BATCH: 60.0,
}
"""For requests that name none."""
COMING_FOR_S = 10.0
"""After a request more like it are expected for so long; see longest_step."""
BATCH_STEP = 3.75
"""Times an empty step, with prompts of batch while interactive requests come: a quarter of the device goes into being able to
stop."""
BACKLOG_STEP = 6.5
"""Times an empty step, with prompts of who has a backlog while others come: a tenth of it."""
BACKLOG = 0.5
"""Of the lead, by weight: a lane in which more prompt tokens wait has a backlog. Less may be a moment's burst on a device that
has room for all, and short steps would make a queue of it."""
_FIRST_TIER = 0
_MANY_LANES = 4096


def gap_bound(
    prompt_tokens: int,
    output_tokens: int,
    num_seats: int,
    blocks: int,
    run_s: float,
    *,
    least_weight: float = 1.0,
    lead: float = LEAD,
) -> float:
    """The stated bound on the service gap of two tenants, divided by their weights; see the module's first lines.

    Args:
        prompt_tokens: of one sequence at most.
        output_tokens: of one sequence at most.
        num_seats: sequences in the batch at most.
        blocks: of all of them at most.
        run_s: longest time from a sequence's admission to its end.
        least_weight: of the two.
        lead: see FairShare.
    """
    most_charged = prompt_tokens + num_seats * DECODED_TOKEN * output_tokens + BLOCK_SECOND * blocks * run_s
    return 2 * (lead + most_charged / least_weight)


class _Class:
    """What waits in one class."""

    def __init__(self, patience_s: float):
        self.patience_s = patience_s
        self.virtual_time = 0.0
        # The last lane that somebody came to while nobody waited there, and until when more are expected; the last other one.
        self._light: tuple[Lane | None, float] = None, -inf
        self._light_before: tuple[Lane | None, float] = None, -inf
        self.by_service = LaneHeap(lambda lane: lane.service)
        self.by_since = LaneHeap(lambda lane: lane.since_s)
        self.resumed = SequenceHeap()  # in order of arrival
        self.resumed_by_since = SequenceHeap()
        self.num_tokens = 0

    def regular(self) -> Sequence | None:
        """Whose turn it is if nobody of other classes is considered."""
        resumed = self.resumed.first()
        if resumed is not None:
            return resumed[1]
        lane = self.by_service.first()
        return None if lane is None else lane.head

    def overdue(self, now_s: float, lead: float) -> tuple[float, Sequence] | None:
        """Who has waited too long, and since when; None: nobody."""
        found = None
        lane = self.by_since.first()
        if lane is not None and lane.since_s + self.patience_s <= now_s and lane.service <= self.virtual_time + lead:
            found = lane.since_s + self.patience_s, lane.head
        resumed = self.resumed_by_since.first()
        if resumed is not None and (due_s := resumed[0][0] + self.patience_s) <= now_s and (found is None or due_s < found[0]):
            found = due_s, resumed[1]
        return found

    def note_light(self, lane: Lane, until_s: float) -> None:
        """Somebody came to a lane in which nobody waited: more like it are expected."""
        if self._light[0] is not lane:
            self._light_before = self._light
        self._light = lane, until_s

    def expects_light(self, lane: Lane, now_s: float, credit: float) -> bool:
        """Whether another lane should have requests soon, and has not more waiting than its credit."""
        other, until_s = self._light_before if self._light[0] is lane else self._light
        return other is not None and now_s <= until_s and other.num_tokens <= credit * other.weight

    def begin_step(self, now_s: float, lead: float) -> None:
        """Moves virtual time; a lane that is too far ahead to be overdue begins to wait anew."""
        lowest = self.by_service.first()
        if lowest is not None:
            self.virtual_time = max(self.virtual_time, lowest.service)
        while (oldest := self.by_since.first()) is not None and oldest.since_s + self.patience_s <= now_s:
            if oldest.service <= self.virtual_time + lead:
                break
            oldest.since_s = now_s


class FairShare:
    """See the module's first lines, and Policy.

    Args:
        tenants: weights.
        cost: of preempting a sequence.
        patience_s: by class, before ageing.
        lead: virtual tokens that lanes may be apart before one counts as kept waiting by others.
    """

    def __init__(
        self,
        tenants: Tenants = EQUALS,
        cost: Cost = lost_tokens,
        patience_s: Mapping[ServiceClass, float] = PATIENCE_S,
        lead: float = LEAD,
    ):
        self._credit = CREDIT * lead
        self._backlog = BACKLOG * lead
        self._lead = lead - self._credit
        self._tenants = tenants
        self._cost = cost
        self._now_s = 0.0
        self._classes = {service_class: _Class(patience_s[service_class]) for service_class in ServiceClass}
        self._lanes: dict[tuple[str, ServiceClass], Lane] = {}
        self._serving: dict[int, Lane] = {}
        self._num_lanes = 0
        self._interactive_until_s = -inf

    def begin_step(self, now_s: float) -> None:
        """Charges what was used since the last step."""
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        idle = None
        for lane in self._serving.values():
            account = lane.account
            lane.charge(DECODED_TOKEN * lane.take_decodes() + BLOCK_SECOND * account.num_blocks * elapsed_s)
            if not account.num_running:
                idle = [lane.number] if idle is None else [*idle, lane.number]
        for number in idle or ():
            del self._serving[number]
        for waiting in self._classes.values():
            waiting.begin_step(now_s, self._lead)

    def insert(self, sequence: Sequence) -> None:
        """See Policy."""
        request = sequence.request
        waiting = self._classes[request.service_class]
        waiting.num_tokens += sequence.num_prompt_tokens
        lane = self._lane(request)
        sequence.account = lane.account
        if request.service_class is ServiceClass.INTERACTIVE:
            self._interactive_until_s = max(self._now_s, request.arrival_s) + COMING_FOR_S
        if sequence.was_admitted:
            tier = self._classes[ServiceClass.INTERACTIVE] if sequence.tier == _FIRST_TIER else waiting
            tier.resumed.push(sequence.rank, sequence)
            tier.resumed_by_since.push((self._now_s, sequence.order), sequence)
            return
        if not lane.waiting:
            lane.service = max(lane.service, waiting.virtual_time - self._credit)
            lane.since_s = max(self._now_s, request.arrival_s)
            waiting.note_light(lane, lane.since_s + COMING_FOR_S)
        target_s = TTFT_TARGET_S[request.service_class] if request.ttft_target_s is None else request.ttft_target_s
        lane.waiting.push((request.priority, request.arrival_s + target_s, sequence.order), sequence)
        lane.num_tokens += sequence.num_prompt_tokens
        waiting.by_service.add(lane)
        waiting.by_since.add(lane)

    def remove(self, sequence: Sequence) -> None:
        """See Policy."""
        waiting = self._classes[sequence.request.service_class]
        waiting.num_tokens -= sequence.num_prompt_tokens
        if sequence.was_admitted:
            tier = waiting if sequence in waiting.resumed else self._classes[ServiceClass.INTERACTIVE]
            tier.resumed.remove(sequence)
            tier.resumed_by_since.remove(sequence)
            return
        lane = self._lane(sequence.request)
        lane.waiting.remove(sequence)
        lane.num_tokens -= sequence.num_prompt_tokens

    def first(self) -> Sequence | None:
        """See Policy."""
        regular = None
        for waiting in self._classes.values():
            regular = waiting.regular()
            if regular is not None:
                break
        overdue = self._first_overdue()
        if overdue is not None and overdue is not regular:
            overdue.tier = _FIRST_TIER
            return overdue
        if regular is not None and not regular.was_admitted:
            regular.tier = regular.request.service_class
        return regular

    def admit(self, sequence: Sequence, num_new_tokens: int, num_cached_tokens: int) -> None:
        """See Policy."""
        request = sequence.request
        lane = self._lane(request)
        self.remove(sequence)
        self._serving[lane.number] = lane
        if sequence.was_admitted:
            return
        lane.since_s = self._now_s
        lane.charge(num_new_tokens + CACHED_TOKEN * num_cached_tokens)

    def choose_victim(self, candidates: Seq[Sequence]) -> Sequence | None:
        """By what is lost, and sooner of tenants that were served more than others."""
        return choose_victim(candidates, self._cost_to_tenant)

    def longest_step(self, sequence: Sequence) -> float | None:
        """Who comes waits for the step under way, so those whose requests come before others' have to wait for short ones.

        While interactive requests come, prompts of batch make none but short steps. Prompts of a tenant with a backlog make no
        long ones while interactive requests come, or requests of a tenant of its class that has little waiting. Whoever was
        overdue has given way for long enough.
        """
        request = sequence.request
        if sequence.tier == _FIRST_TIER:
            return None
        is_behind = request.service_class is not ServiceClass.INTERACTIVE and self._now_s <= self._interactive_until_s
        if is_behind and request.service_class is ServiceClass.BATCH:
            return BATCH_STEP
        waiting, lane = self._classes[request.service_class], self._lane(request)
        if lane.num_tokens <= self._backlog * lane.weight:
            return None
        return BACKLOG_STEP if is_behind or waiting.expects_light(lane, self._now_s, self._credit) else None

    def steps_aside(self, sequence: Sequence, prompt: Sequence) -> bool:
        """Batch before interactive prompts."""
        return prompt.request.service_class is ServiceClass.INTERACTIVE and sequence.tier == ServiceClass.BATCH

    def num_tokens_ahead(self, request: Request) -> int:
        """More urgent classes, and of its own what its share lets by: at most all of it."""
        own = self._classes[request.service_class]
        lane = self._lanes.get((request.tenant, request.service_class))
        num_urgent = sum(waiting.num_tokens for name, waiting in self._classes.items() if name < request.service_class)
        if lane is None or not lane.waiting:
            lanes = [other for other in self._lanes.values() if other.waiting and other.service_class is request.service_class]
            return num_urgent + (own.num_tokens // (len(lanes) + 1) if lanes else own.num_tokens)
        weights = sum(
            other.weight for other in self._lanes.values() if other.waiting and other.service_class is request.service_class
        )
        return num_urgent + min(own.num_tokens, int(lane.num_tokens * weights / lane.weight))

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._classes.values():
            yield from waiting.resumed
        for lane in self._lanes.values():
            yield from lane.waiting

    def _first_overdue(self) -> Sequence | None:
        longest_s, first = inf, None
        for waiting in self._classes.values():
            found = waiting.overdue(self._now_s, self._lead)
            if found is not None and found[0] < longest_s:
                longest_s, first = found
        return first

    def _lane(self, request: Request) -> Lane:
        name = request.tenant, request.service_class
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= _MANY_LANES:
                self._forget_idle()
            self._num_lanes += 1
            weight = self._tenants.terms(request.tenant).weight
            lane = self._lanes[name] = Lane(self._num_lanes, request.tenant, request.service_class, weight)
        return lane

    def _forget_idle(self) -> None:
        """Lanes that would be lifted anyway when somebody comes."""
        for name, lane in list(self._lanes.items()):
            is_behind = lane.service <= self._classes[lane.service_class].virtual_time
            if is_behind and not lane.waiting and not lane.account.num_running and lane.number not in self._serving:
                del self._lanes[name]

    def _cost_to_tenant(self, sequence: Sequence) -> float:
        lane = self._lane(sequence.request)
        ahead = max(0.0, lane.service - self._classes[lane.service_class].virtual_time)
        return self._cost(sequence) / (1.0 + ahead / self._lead)
