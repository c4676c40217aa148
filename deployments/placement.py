"""Serve request router of the Engine deployment: the caller names the replica, Serve delivers.

Our router has already chosen by token load (deployments/grouping.py); the choice travels as the keyword argument
`replica` of the call. Ray's RequestRouter API: ray/serve/_private/request_router/request_router.py, 2.60.0.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class TargetedRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica named in its `replica` argument, and publishes which replicas exist."""

    def _publish(self) -> None:
        from deployments import replicas  # by reference: see replicas.py

        names = frozenset(replica_id.unique_id for replica_id in self._replica_id_set)
        replicas.publish(self._deployment_id.name, names)

    def update_replicas(self, running: list[RunningReplica]) -> None:
        super().update_replicas(running)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # a full replica must not be polled in a hot loop
        target: Any = pending_request.kwargs.get("replica")
        wanted = [r for r in candidate_replicas if r.replica_id.unique_id == target]
        # The target is gone: any replica will do, it answers "misrouted" and our router chooses again. Raising here
        # would hang the call for ever (Serve logs and swallows it).
        return [wanted or candidate_replicas]
