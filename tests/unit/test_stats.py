"""Per-request statistics: what the scheduler notes, and what the replica makes of a request's meta_info."""

from types import SimpleNamespace
from typing import Any

from kimi_draft.stats import note_extend, note_first_chain, summarize


def test_summarize() -> None:
    meta = {
        "extend_requests": [4],
        "extend_tokens": [88],
        "extend_batch": [17],
        "first_chain_accepted": [None, 2],
        "spec_correct_drafts_histogram": [1, 0, 2, 3],
    }
    assert summarize(meta) == {
        "extend_requests": 4,
        "extend_batch": 17,
        "first_chain_accepted": 2,
        "accepted_by_position": [5, 5, 3],
        "acceptance_length": 1 + 13 / 6,
        "steps": 6,
    }


def test_summarize_without_speculation() -> None:
    """Also an answer of one token, which the prefill alone produced."""
    assert summarize({"extend_requests": [1], "extend_batch": [2]}) == {
        "extend_requests": 1,
        "extend_batch": 2,
        "first_chain_accepted": None,
        "accepted_by_position": [],
        "acceptance_length": None,
        "steps": 0,
    }


def test_summarize_nothing_accepted() -> None:
    summary = summarize({"spec_correct_drafts_histogram": [5], "first_chain_accepted": [None, 0]})
    assert (summary["acceptance_length"], summary["first_chain_accepted"], summary["steps"]) == (1.0, 0, 5)


def request(**state: Any) -> SimpleNamespace:
    defaults = {
        "customized_info": None, "output_ids": [], "inflight_middle_chunks": 0, "spec_correct_drafts_histogram": []
    }  # fmt: skip
    return SimpleNamespace(**defaults | state)


def test_the_extend_batch_of_the_first_token() -> None:
    fresh, resumed, cut, decoding = request(), request(output_ids=[5]), request(inflight_middle_chunks=1), request()
    other = request(customized_info={"theirs": [1]})
    decoding.output_ids = [7]
    batch = SimpleNamespace(
        reqs=[fresh, resumed, cut, other, decoding], decoding_reqs=[decoding], extend_lens=[10, 20, 30, 40, 1]
    )
    process = note_extend(lambda self, batch, result: "done")
    assert process(None, batch, None) == "done"
    number = fresh.customized_info["extend_batch"][0]
    assert fresh.customized_info == {"extend_requests": [4], "extend_tokens": [100], "extend_batch": [number]}
    assert other.customized_info["theirs"] == [1] and other.customized_info["extend_batch"] == [number]
    assert resumed.customized_info is cut.customized_info is decoding.customized_info is None
    later = request()
    process(None, SimpleNamespace(reqs=[later], decoding_reqs=None, extend_lens=[3]), None)
    assert later.customized_info["extend_batch"] == [number + 1]
    assert later.customized_info["extend_requests"] == [1]


def test_the_first_chain_is_noted_once() -> None:
    def upstream(self: Any, accepted: int) -> None:
        self.spec_correct_drafts_histogram += [0] * (accepted + 1 - len(self.spec_correct_drafts_histogram))
        self.spec_correct_drafts_histogram[accepted] += 1

    note, req = note_first_chain(upstream), request()
    for accepted in (2, 0, 3):
        note(req, accepted)
    assert req.customized_info == {"first_chain_accepted": [None, 2]}
    assert req.spec_correct_drafts_histogram == [1, 0, 1, 1]
