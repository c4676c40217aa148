"""The application as its users call it: HTTP, handles, streams, groups, bad input, cancels."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from cluster.burst import assemble, burst, canonical, examples
from cluster.report import integrity
from kimi_draft.tiny.task import Example, grade, sample
from tests.serve.conftest import Service, png, until

KIMI_KEYS = {
    "group_id",
    "group_size",
    "extend_requests",
    "replica",
    "queue_wait_s",
    "ttft_s",
    "acceptance_length",
    "first_chain_accepted",
    "accepted_by_position",
}


def one(kind: str, seed: int = 1) -> Example:
    return sample(np.random.default_rng(seed), kind)


def message(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["choices"][0]["message"])


# -- answers
@pytest.mark.parametrize("kind", ["read", "name", "two_images", "tool", "text_repeat", "think_read", "think_tool"])
def test_each_kind_is_answered_right(service: Service, kind: str) -> None:
    batch = [one(kind, seed) for seed in range(4)]
    answers = [service.post(example.request()) for example in batch]
    assert [a.status_code for a in answers] == [200] * 4
    right = [grade(e, message(a.json())) for e, a in zip(batch, answers, strict=True)]
    assert sum(right) >= 3, [message(a.json()) for a in answers]


def test_an_answer_carries_the_kimi_object(service: Service) -> None:
    answer = service.post(one("read").request()).json()
    assert set(answer["kimi"]) >= KIMI_KEYS
    kimi = answer["kimi"]
    assert kimi["extend_requests"] >= kimi["group_size"] >= 1
    assert 0 <= kimi["queue_wait_s"] < kimi["ttft_s"] < 30
    assert 1 <= kimi["acceptance_length"] <= 4
    assert len(kimi["accepted_by_position"]) == 3
    assert answer["usage"]["completion_tokens"] > 6


def test_a_stream_adds_up_to_the_unstreamed_answer(service: Service) -> None:
    for kind in ("read", "think_name", "tool"):
        body = one(kind, 3).request()
        plain = service.post(body).json()
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60) as r:
            lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert canonical(assemble(chunks)) == canonical(message(plain))
        assert [set(c["kimi"]) >= KIMI_KEYS for c in chunks if "kimi" in c] == [True]
        assert len({c["id"] for c in chunks}) == 1


def test_the_openai_client_works(service: Service) -> None:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["kimi-k2.5-tiny"]
        example = one("name", 5)
        body = example.request()
        extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
        answer = client.chat.completions.create(**body, extra_body=extra)
        assert grade(example, answer.choices[0].message.model_dump())
        stream = client.chat.completions.create(
            **body, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk.model_dump() for chunk in stream]
        assert grade(example, assemble(chunks))
        assert chunks[-1]["usage"]["total_tokens"] > 0


def test_handles_take_and_give_the_same_dicts(service: Service) -> None:
    body = one("read", 7).request()
    plain = service.handle.chat.remote(body).result(timeout_s=60)
    chunks = list(service.handle.options(stream=True).chat_stream.remote(body))
    assert canonical(assemble(chunks)) == canonical(message(plain))
    assert chunks[-1]["kimi"]["group_size"] == 1 or any("kimi" in c for c in chunks)


def test_n_answers_share_one_request(service: Service) -> None:
    answer = service.post(one("read_any", 3).request(n=3, temperature=1.0)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["kimi"]["group_size"] == 1


def test_logprobs_and_stop(service: Service) -> None:
    body = one("read", 9).request(logprobs=True, top_logprobs=2)
    answer = service.post(body).json()["choices"][0]
    assert len(answer["logprobs"]["content"]) > 6
    text = answer["message"]["content"]
    stopped = service.post(one("read", 9).request(stop=[","])).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == text.partition(",")[0]


# -- groups
def test_bursts_form_groups_that_are_one_extend_batch(service: Service) -> None:
    before = len(service.state()["groups"])
    work = [e for e in examples(60, 11) if e.modality == "image"][:40]
    results = asyncio.run(burst(work, service.url, service.handle, lambda _: None, gap_s=0.0))
    assert [r.error for r in results if r.error] == []
    groups = service.state()["groups"][before:]
    assert max(g["size"] for g in groups) >= 4
    assert integrity(groups) >= 0.95
    assert max(r.kimi["extend_requests"] for r in results) >= 4
    assert sum(r.right for r in results) / len(results) >= 0.9


# -- bad input
GOOD_IMAGE = png(Image.new("RGB", (84, 84)))


def image_message(url: Any, copies: int = 1) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [part] * copies + [{"type": "text", "text": "What is in r1c1?"}]}


BAD: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no messages": ({"messages": []}, 400, "messages"),
    "messages of a wrong type": ({"messages": "hello"}, 400, "messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 7}]}, 400, "messages.0"),
    "unknown model": ({"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]}, 404, "model"),
    "broken base64": (
        {"messages": [image_message("data:image/png;base64,@@")]},
        400,
        "messages.0.content.0.image_url.url",
    ),
    "no image": (
        {"messages": [image_message("data:image/png;base64,aGVsbG8=")]},
        400,
        "messages.0.content.0.image_url.url",
    ),
    "too many images": ({"messages": [image_message(GOOD_IMAGE, 9)]}, 400, "messages.0.content.8"),
    "text over the context": ({"messages": [{"role": "user", "content": "@ " * 4000}]}, 400, "messages"),
    "temperature of a wrong type": (
        {"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"},
        400,
        "temperature",
    ),
    "temperature out of range": ({"messages": [{"role": "user", "content": "hi"}], "temperature": -3}, 400, None),
    "max_tokens out of range": ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": -5}, 400, None),
    "n of a wrong type": ({"messages": [{"role": "user", "content": "hi"}], "n": "many"}, 400, "n"),
    "a body that is no object": ([], 400, None),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name_and_harms_nobody(service: Service, case: str) -> None:
    body, status, param = BAD[case]
    good = [one("name", seed) for seed in range(3)]
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(service.post, example.request()) for example in good]
        answer = pool.submit(service.post, body).result()
        neighbours_answers = [n.result() for n in neighbours]
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert str(error["param"]).startswith(param), error
    assert [a.status_code for a in neighbours_answers] == [200] * 3


def test_malformed_json_and_unknown_paths(service: Service) -> None:
    answer = httpx.post(f"{service.url}/v1/chat/completions", content=b'{"messages": [', timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    answer = httpx.get(f"{service.url}/v2/nothing", timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_handle_errors_are_typed(service: Service) -> None:
    with pytest.raises(Exception, match="base64") as caught:
        service.handle.chat.remote({"messages": [image_message("data:image/png;base64,@@")]}).result(timeout_s=30)
    cause = getattr(caught.value, "cause", caught.value)
    assert (cause.status, cause.code) == (400, "invalid_base64")


def test_alive_and_ready(service: Service) -> None:
    assert httpx.get(f"{service.url}/health", timeout=30).json() == {"status": "alive"}
    ready = httpx.get(f"{service.url}/ready", timeout=30)
    assert ready.status_code == 200
    assert len(ready.json()["replicas"]) == 2


# -- ends
def test_a_client_that_leaves_frees_its_request_and_nobody_else_is_harmed(service: Service) -> None:
    until(lambda: service.state()["in_flight"] == 0, 30, "idle before")
    body = one("read", 13).request(max_tokens=1500, ignore_eos=True, stream=True)
    good = [one("name", seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            neighbours = [pool.submit(service.post, example.request()) for example in good]
        assert [n.result().status_code for n in neighbours] == [200] * 4
    until(lambda: service.state()["in_flight"] == 0, 15, "the left request is gone from router and engine")


def test_a_cancelled_handle_stream_ends_in_the_engine(service: Service) -> None:
    until(lambda: service.state()["in_flight"] == 0, 30, "idle before")
    body = one("read", 13).request(max_tokens=1500, ignore_eos=True)
    stream = service.handle.options(stream=True).chat_stream.remote(body)
    next(iter(stream))
    stream.cancel()
    until(lambda: service.state()["in_flight"] == 0, 15, "the cancelled request is gone")
