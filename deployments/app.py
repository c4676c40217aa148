"""`deployments.app:build`: the Ray Serve application from typed arguments.

No `from __future__ import annotations` here: Serve reads the builder's annotation to make `AppConfig` from the YAML's
`args`, and a string is none (it would pass a plain dict, unchecked).
"""

from typing import Any, cast

from ray import serve
from ray.serve.config import RequestRouterConfig

from deployments.config import AppConfig
from deployments.engine import Engine
from deployments.router import Router


def build(args: AppConfig) -> serve.Application:
    """Builder for `serve run`, `serve deploy` and `serve.run`. Free of side effects: Ray may call it several times.

    Args:
        args: the settings; unknown keys and contradictions fail here with a message that names the field.
    """
    engine, router = args.engine, args.router
    options: dict[str, Any] = {}
    if engine.num_gpus:
        # SGLang spawns the schedulers itself, so the replica holds the bundle and no GPU of its own.
        options["placement_group_bundles"] = [{"CPU": engine.num_cpus, "GPU": engine.num_gpus}]
        options["placement_group_strategy"] = "STRICT_PACK"
    engine_app = (
        cast(Any, Engine)
        .options(
            num_replicas=engine.num_replicas,
            ray_actor_options={"num_cpus": engine.num_cpus, "num_gpus": 0},
            max_ongoing_requests=4 * engine.max_running_requests
            + 16,  # calls, not members: the core bounds the members
            request_router_config=RequestRouterConfig(
                request_router_class="deployments.placement:TargetedRequestRouter"
            ),
            health_check_period_s=2,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=engine.drain_timeout_s,
            max_constructor_retry_count=2,
            **options,
        )
        .bind(engine)
    )
    application: serve.Application = (
        cast(Any, Router)
        .options(
            num_replicas=router.num_replicas,
            ray_actor_options={"num_cpus": router.num_cpus},
            max_ongoing_requests=4 * router.max_queued_requests,  # admission is the dispatcher's, with a 429
            health_check_period_s=2,
            graceful_shutdown_timeout_s=engine.drain_timeout_s,
        )
        .bind(args, engine_app)
    )
    return application
