"""The grouping core: which waiting requests go together, to which replica, and when. Pure: `now` is passed in.

Rules (docs/architecture.md):
- text is never held: it goes to the least-loaded replica with a free slot;
- an idle replica takes what waits at once;
- otherwise image requests wait for company, at most `max_wait_s`, less when the group is full;
- a group is sealed late: only when a replica can take it, so it grows while the replicas are busy;
- a replica that still prefills one group gets no second one: what arrives meanwhile forms the next;
- a group never passes the token budget or the free slots, so no member is cut and all prefill in one extend batch;
- order is kept: a group is a prefix of the queue.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.request import Group, Request


class Overloaded(Exception):
    """The queue is full. `what` names the bound, `retry_after_s` is a hint for the client."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of groups and of the queue. Seconds, tokens, bytes."""

    max_group_requests: int = 8
    max_group_tokens: int = 2048
    max_wait_s: float = 0.05
    max_queued_requests: int = 256
    max_queued_image_tokens: int = 65_536
    max_queued_bytes: int = 256 << 20
    slots: int = 16  # requests that one replica runs together


@dataclass(slots=True)
class Replica:
    """What the core knows of one replica. Load counts tokens, not requests: an image weighs what it costs."""

    name: str
    running: dict[str, Request] = field(default_factory=dict)
    prefilling: set[str] = field(default_factory=set)  # image members that have no first token yet
    avoid_until: float = 0.0

    @property
    def load(self) -> int:
        return sum(request.tokens for request in self.running.values())


class Grouper:
    """Admit, decide, cancel, expire, replica up and down: plain calls that return decisions."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._text: OrderedDict[str, Request] = OrderedDict()
        self._images: OrderedDict[str, Request] = OrderedDict()
        self._replicas: dict[str, Replica] = {}
        self._where: dict[str, str] = {}  # rid -> replica, for everything in flight
        self._ids = itertools.count(1)

    # -- what waits
    @property
    def queued(self) -> int:
        return len(self._text) + len(self._images)

    @property
    def in_flight(self) -> int:
        return len(self._where)

    @property
    def replicas(self) -> dict[str, Replica]:
        return self._replicas

    def _waiting(self) -> Iterable[Request]:
        return itertools.chain(self._text.values(), self._images.values())

    def admit(self, request: Request) -> None:
        """Queue a request; raises `Overloaded` when a bound would be passed, ValueError on a duplicate id."""
        if request.rid in self._text or request.rid in self._images or request.rid in self._where:
            raise ValueError(f"request id {request.rid} is already in use")
        limits = self.limits
        if self.queued + 1 > limits.max_queued_requests:
            raise Overloaded(f"{self.queued} requests are waiting (limit {limits.max_queued_requests})", 1.0)
        image_tokens = sum(r.image_tokens for r in self._waiting()) + request.image_tokens
        if request.image_tokens and image_tokens > limits.max_queued_image_tokens:
            raise Overloaded(f"{image_tokens} image tokens would wait (limit {limits.max_queued_image_tokens})", 1.0)
        size = sum(r.size for r in self._waiting()) + request.size
        if size > limits.max_queued_bytes:
            raise Overloaded(f"{size} bytes would wait (limit {limits.max_queued_bytes})", 1.0)
        (self._images if request.has_images else self._text)[request.rid] = request

    def requeue(self, request: Request) -> None:
        """Put a request whose replica died before it started back at the head of its queue. Never refused."""
        queue = self._images if request.has_images else self._text
        queue[request.rid] = request
        queue.move_to_end(request.rid, last=False)

    # -- what ends
    def cancel(self, rid: str) -> str | None:
        """Forget a waiting request, or return the replica where it runs (the caller aborts it there)."""
        if self._text.pop(rid, None) or self._images.pop(rid, None):
            return None
        return self._where.get(rid)

    def expire(self, now: float) -> list[Request]:
        """Take every waiting request whose deadline has passed out of the queue: it was never prefilled."""
        late = [request for request in self._waiting() if request.deadline <= now]
        for request in late:
            self.cancel(request.rid)
        return late

    def first_token(self, rid: str) -> None:
        """The member's prefill is over."""
        if replica := self._replicas.get(self._where.get(rid, "")):
            replica.prefilling.discard(rid)

    def finish(self, rid: str) -> None:
        """The member is over, in whatever way. Unknown ids are ignored (its replica may be gone)."""
        if replica := self._replicas.get(self._where.pop(rid, "")):
            replica.running.pop(rid, None)
            replica.prefilling.discard(rid)

    # -- replicas
    def set_replicas(self, names: Iterable[str]) -> list[Request]:
        """The replicas that exist now. Returns the members that ran on one that is gone, oldest first."""
        names = set(names)
        lost: list[Request] = []
        for name in [n for n in self._replicas if n not in names]:
            for request in self._replicas.pop(name).running.values():
                self._where.pop(request.rid, None)
                lost.append(request)
        for name in names - self._replicas.keys():
            self._replicas[name] = Replica(name)
        return sorted(lost, key=lambda r: r.arrival)

    def avoid(self, name: str, until: float) -> None:
        """Give this replica nothing new before `until`: a call to it has just failed, and it may be dying."""
        if replica := self._replicas.get(name):
            replica.avoid_until = until

    # -- decisions
    def decide(self, now: float) -> list[Group]:
        """Seal every group that can go now. The returned groups count as in flight from here on."""
        groups: list[Group] = []
        while group := self._next(now):
            groups.append(group)
        return groups

    def _next(self, now: float) -> Group | None:
        # A free slot goes to text at once, unless an image that is due came before it.
        images_first = self._head_is_due(now) and (
            not self._text or self._head(self._images).arrival < self._head(self._text).arrival
        )
        if images_first:
            return self._seal_images(now) or self._seal_text(now)
        return self._seal_text(now) or self._seal_images(now)

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` or `expire` may have something new without any other event; None: not before one."""
        times = [request.deadline for request in self._waiting()]
        if self.queued:
            times += [r.avoid_until for r in self._replicas.values() if r.avoid_until > now]
        if self._images and any(self._takes_images(r, now) for r in self._replicas.values()):
            times.append(self._head(self._images).arrival + self.limits.max_wait_s)
        return max(min(times), now) if times else None

    @staticmethod
    def _head(queue: OrderedDict[str, Request]) -> Request:
        return next(iter(queue.values()))

    def _head_is_due(self, now: float) -> bool:
        return bool(self._images) and now - self._head(self._images).arrival >= self.limits.max_wait_s

    def _free(self, replica: Replica) -> int:
        return self.limits.slots - len(replica.running)

    def _takes_text(self, replica: Replica, now: float) -> bool:
        return self._free(replica) > 0 and replica.avoid_until <= now

    def _takes_images(self, replica: Replica, now: float) -> bool:
        return self._takes_text(replica, now) and not replica.prefilling

    def _seal_text(self, now: float) -> Group | None:
        able = [r for r in self._replicas.values() if self._takes_text(r, now)]
        if not self._text or not able:
            return None
        replica = min(able, key=lambda r: (r.load, r.name))
        _, request = self._text.popitem(last=False)
        return self._launch(replica, [request])

    def _seal_images(self, now: float) -> Group | None:
        able = [r for r in self._replicas.values() if self._takes_images(r, now)]
        if not self._images or not able:
            return None
        replica = min(able, key=lambda r: (r.load, r.name))
        members, full = self._pack(self._free(replica))
        if replica.running and not full and not self._head_is_due(now):
            return None
        for member in members:
            del self._images[member.rid]
        return self._launch(replica, members)

    def _pack(self, free: int) -> tuple[list[Request], bool]:
        """The longest prefix of the image queue within the bounds, and whether waiting could not enlarge it."""
        members: list[Request] = []
        tokens = 0
        most = min(free, self.limits.max_group_requests)
        for request in self._images.values():
            if len(members) == most or (members and tokens + request.tokens > self.limits.max_group_tokens):
                return members, True
            members.append(request)
            tokens += request.tokens
        return members, len(members) == most or tokens >= self.limits.max_group_tokens

    def _launch(self, replica: Replica, members: list[Request]) -> Group:
        for member in members:
            member.attempts += 1
            replica.running[member.rid] = member
            self._where[member.rid] = replica.name
            if member.has_images:
                replica.prefilling.add(member.rid)
        return Group(f"g{next(self._ids)}", replica.name, tuple(members))
