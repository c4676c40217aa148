"""The grouping core: rules one by one, then the invariants under random histories."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.grouping import Grouper, Limits, Overloaded
from deployments.request import Group, Request

LIMITS = Limits(max_group_requests=4, max_group_tokens=1000, max_wait_s=0.05, slots=6)


def image(rid: str, arrival: float = 0.0, tokens: int = 100, deadline: float = 100.0) -> Request:
    return Request(rid, tokens, tokens // 2, 10, arrival, deadline)


def text(rid: str, arrival: float = 0.0, tokens: int = 100) -> Request:
    return Request(rid, tokens, 0, 10, arrival, 100.0)


def grouper(*replicas: str, limits: Limits = LIMITS) -> Grouper:
    core = Grouper(limits)
    core.set_replicas(replicas)
    return core


def rids(groups: list[Group]) -> list[list[str]]:
    return [[m.rid for m in g.members] for g in groups]


def test_an_idle_replica_takes_what_waits_at_once() -> None:
    core = grouper("a")
    core.admit(image("1"))
    core.admit(image("2"))
    assert rids(core.decide(0.0)) == [["1", "2"]]


def test_a_decoding_replica_makes_images_wait_for_company_but_not_for_ever() -> None:
    core = grouper("a")
    core.admit(text("t"))
    core.decide(0.0)
    core.admit(image("1", arrival=1.0))
    assert core.decide(1.0) == []
    assert core.next_wakeup(1.0) == pytest.approx(1.05)
    core.admit(image("2", arrival=1.02))
    assert core.decide(1.02) == []
    assert rids(core.decide(1.051)) == [["1", "2"]]


def test_a_full_group_goes_before_its_wait_is_over() -> None:
    core = grouper("a")
    core.admit(text("t"))
    core.decide(0.0)
    for i in range(4):
        core.admit(image(str(i), arrival=1.0))
    assert rids(core.decide(1.0)) == [["0", "1", "2", "3"]]


def test_text_is_never_held() -> None:
    core = grouper("a")
    core.admit(image("1"))
    core.decide(0.0)
    core.admit(text("t", arrival=0.001))
    assert rids(core.decide(0.001)) == [["t"]]


def test_a_group_is_sealed_late_while_the_replica_prefills_another() -> None:
    core = grouper("a")
    core.admit(image("1"))
    assert rids(core.decide(0.0)) == [["1"]]
    core.admit(image("2", arrival=0.01))
    assert core.decide(5.0) == []  # long past its wait: the replica still prefills
    core.admit(image("3", arrival=5.0))
    core.first_token("1")
    assert rids(core.decide(5.0)) == [["2", "3"]]


def test_the_token_budget_splits_groups_and_keeps_order() -> None:
    core = grouper("a", "b")
    for i, tokens in enumerate([600, 600, 300]):
        core.admit(image(str(i), tokens=tokens))
    groups = core.decide(0.0)
    assert rids(groups) == [["0"], ["1", "2"]]
    assert {g.replica for g in groups} == {"a", "b"}


def test_load_counts_tokens_not_requests() -> None:
    core = grouper("a", "b")
    core.admit(image("big", tokens=900))
    placed = {m.rid: g.replica for g in core.decide(0.0) for m in g.members}
    core.admit(text("t1"))
    core.admit(text("t2"))
    core.decide(0.0)
    core.admit(text("t3"))
    (group,) = core.decide(0.1)
    assert group.replica != placed["big"]


def test_a_lost_replica_gives_its_members_back() -> None:
    core = grouper("a")
    core.admit(image("1"))
    core.decide(0.0)
    assert [r.rid for r in core.set_replicas([])] == ["1"]
    assert core.in_flight == 0


def test_a_replica_to_avoid_gets_nothing_until_then() -> None:
    core = grouper("a")
    core.avoid("a", 3.0)
    core.admit(text("t"))
    core.admit(image("1"))
    assert core.decide(2.9) == []
    assert core.next_wakeup(1.0) == 3.0
    assert rids(core.decide(3.0)) == [["t"], ["1"]]


def test_cancel_of_a_waiting_request_forgets_it_and_of_a_running_one_names_its_replica() -> None:
    core = grouper()
    core.admit(image("1"))
    assert core.cancel("1") is None
    assert core.queued == 0
    core.set_replicas(["a"])
    core.admit(image("2"))
    core.decide(0.0)
    assert core.cancel("2") == "a"


def test_expired_requests_leave_before_prefill() -> None:
    core = grouper()
    core.admit(image("1", deadline=3.0))
    assert [r.rid for r in core.expire(3.0)] == ["1"]
    assert core.queued == 0


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (Limits(max_queued_requests=1), "requests"),
        (Limits(max_queued_image_tokens=60), "image tokens"),
        (Limits(max_queued_bytes=15), "bytes"),
    ],
)
def test_admission_is_bounded(limits: Limits, what: str) -> None:
    core = grouper(limits=limits)
    core.admit(image("1"))
    with pytest.raises(Overloaded, match=what):
        core.admit(image("2"))


class Histories(RuleBasedStateMachine):
    """Random admissions, progress, cancels, deaths. Each request ends once; bounds and order hold; nothing starves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = grouper(limits=LIMITS)
        self.ids = itertools.count()
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, str] = {}
        self.sealed: list[str] = []

    def step(self) -> None:
        for group in self.core.decide(self.now):
            images = [m for m in group.members if m.has_images]
            assert len(group.members) <= LIMITS.max_group_requests
            assert len(group.members) == 1 or group.tokens <= LIMITS.max_group_tokens
            assert images == [] or len(images) == len(group.members)
            order = [r.rid for r in self.waiting.values() if r.has_images == bool(images)]
            assert [m.rid for m in group.members] == order[: len(group.members)], "a group is a prefix of its queue"
            for member in group.members:
                del self.waiting[member.rid]
                assert member.rid not in self.running
                self.running[member.rid] = group.replica

    @rule(tokens=st.integers(2, 1200), is_image=st.booleans())
    def admit(self, tokens: int, is_image: bool) -> None:
        rid = str(next(self.ids))
        request = Request(rid, tokens, tokens // 2 if is_image else 0, 1, self.now, 1e9)
        self.core.admit(request)
        self.waiting[rid] = request
        self.step()

    @rule(dt=st.floats(0.0, 0.1))
    def wait(self, dt: float) -> None:
        self.now += dt
        self.step()

    @rule(names=st.sets(st.sampled_from("abc")))
    def replicas(self, names: set[str]) -> None:
        for request in self.core.set_replicas(names):
            assert self.running.pop(request.rid) not in names
        self.step()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        if data.draw(st.booleans()):
            self.core.first_token(rid)
        else:
            self.core.finish(rid)
            del self.running[rid]
        self.step()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.core.cancel(rid) is None
        del self.waiting[rid]
        self.step()

    @invariant()
    def counts_agree(self) -> None:
        assert self.core.queued == len(self.waiting)
        assert self.core.in_flight == len(self.running)
        for replica in self.core.replicas.values():
            assert len(replica.running) <= LIMITS.slots
            assert replica.prefilling <= replica.running.keys()

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        for replica in self.core.replicas.values():
            free = LIMITS.slots - len(replica.running)
            assert not (free and any(not r.has_images for r in self.waiting.values())), "text is held"
            images = [r for r in self.waiting.values() if r.has_images]
            if free and not replica.prefilling and images:
                assert replica.running, "an idle replica left an image waiting"
                assert self.now - images[0].arrival < LIMITS.max_wait_s, "held past its limit"


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
