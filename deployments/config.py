"""All settings of the Ray Serve application, typed and strict: an unknown key is an error that names it.

`deployments.app:build` takes `AppConfig`; the YAML under `applications[].args` is exactly this shape.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Base of all settings: unknown keys are refused (Ray itself passes typos silently)."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RouterConfig(Strict):
    """The router: admission bounds and grouping."""

    num_replicas: int = Field(1, ge=1, description="Router replicas. Each groups what it sees.")
    num_cpus: float = Field(0.1, ge=0, description="Ray CPUs that one router replica reserves.")
    max_group_requests: int = Field(8, ge=1, description="Most members of one group.")
    max_group_tokens: int | None = Field(
        None, ge=1, description="Most prompt tokens of one group; default: the engine's chunked_prefill_size."
    )
    max_wait_ms: float = Field(50.0, ge=0, description="Longest hold of an image request for company, milliseconds.")
    max_queued_requests: int = Field(256, ge=1, description="Requests waiting for a replica; more get 429.")
    max_queued_image_tokens: int = Field(65_536, ge=1, description="Image tokens waiting; more get 429.")
    max_queued_mib: float = Field(256.0, gt=0, description="Request bodies waiting, MiB; more get 429.")
    max_body_mib: float = Field(32.0, gt=0, description="Largest request body, MiB; larger ones get 413.")
    max_images: int = Field(8, ge=0, description="Most images of one request.")
    max_image_pixels: int = Field(40_000_000, ge=1, description="Most pixels of one image, before decoding.")
    request_timeout_s: float = Field(120.0, gt=0, description="Longest life of a request, queueing included.")
    utf8_bytes_per_token: float = Field(
        1.0, gt=0, description="Text token estimate; 1.0 can never be too low, 3.0 suits Kimi's own vocabulary."
    )


class EngineConfig(Strict):
    """One engine replica: a tensor-parallel SGLang engine with its draft."""

    model_path: str = Field("tiny", description='Checkpoint directory, or "tiny": the model that ships in the package.')
    draft_path: str | None = Field(None, description="EAGLE3-MLA draft directory; default for tiny: its own draft.")
    served_model_name: str = "kimi-k2.5-tiny"
    num_replicas: int = Field(1, ge=1, description="Engine replicas.")
    num_cpus: float = Field(1.0, ge=0, description="Ray CPUs that one engine replica reserves.")
    num_gpus: int = Field(0, ge=0, description="GPUs of one replica (one node). 0: SGLang runs on the CPU.")
    tp_size: int = Field(1, ge=1, description="Tensor parallel size of one replica.")
    max_running_requests: int = Field(16, ge=1, description="Requests that one replica decodes together.")
    context_length: int = Field(2048, ge=64, description="Longest prompt plus answer, tokens.")
    chunked_prefill_size: int = Field(2048, ge=1, description="Most tokens of one extend batch.")
    max_total_tokens: int | None = Field(16_384, ge=1, description="KV pool, tokens; null: SGLang decides.")
    gate_timeout_s: float = Field(
        2.0, gt=0, description="How long a group's ready members wait for one that is slow to preprocess."
    )
    flush_interval_ms: float = Field(20.0, ge=0, description="Coalescing of chunks after the first, milliseconds.")
    start_timeout_s: float = Field(600.0, gt=0, description="Longest start of one replica.")
    drain_timeout_s: float = Field(30.0, gt=0, description="Grace for running answers when a replica stops.")
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="Further SGLang ServerArgs, passed on as they are; they win."
    )


class AppConfig(Strict):
    """Arguments of `deployments.app:build`."""

    router: RouterConfig = RouterConfig()  # type: ignore[call-arg]
    engine: EngineConfig = EngineConfig()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _fits(self) -> AppConfig:
        if self.router.max_group_requests > self.engine.max_running_requests:
            raise ValueError(
                f"router.max_group_requests ({self.router.max_group_requests}) is larger than "
                f"engine.max_running_requests ({self.engine.max_running_requests}): such a group could never start. "
                "Lower the first or raise the second."
            )
        limit = self.router.max_group_tokens
        if limit is not None and limit > self.engine.chunked_prefill_size:
            raise ValueError(
                f"router.max_group_tokens ({limit}) is larger than engine.chunked_prefill_size "
                f"({self.engine.chunked_prefill_size}): a full group would be cut into two extend batches. "
                "Lower the first or raise the second."
            )
        if self.engine.tp_size > 1 and self.engine.num_gpus not in (0, self.engine.tp_size):
            raise ValueError(
                f"engine.num_gpus ({self.engine.num_gpus}) must equal engine.tp_size ({self.engine.tp_size}): "
                "one replica is one node's tensor-parallel group."
            )
        return self

    @property
    def max_group_tokens(self) -> int:
        """Token budget of one group: never more than one extend batch takes."""
        return self.router.max_group_tokens or self.engine.chunked_prefill_size
