"""What is refused at start, and what is not."""

from types import SimpleNamespace

import pytest

from kimi_draft.refusals import UnsupportedDraft, refuse, refuse_unsupported


@pytest.mark.parametrize(
    ("stages", "target", "draft", "message"),
    [
        (2, 64, 64, "pp_size=2: with pipeline parallel the draft never sees the images' rows"),
        (1, 7168, 4096, "the draft's hidden_size is 4096 and the target's 7168"),
    ],
)
def test_refused_in_one_line(stages: int, target: int, draft: int, message: str) -> None:
    with pytest.raises(UnsupportedDraft, match=message) as caught:
        refuse(stages, target, draft)
    assert "\n" not in str(caught.value)


def test_what_works_is_let_through() -> None:
    refuse(1, 7168, 7168)


@pytest.mark.parametrize(("algorithm", "path"), [(None, None), (None, "draft"), ("NGRAM", None)])
def test_without_a_draft_model_nothing_is_looked_at(algorithm: str | None, path: str | None) -> None:
    refuse_unsupported(SimpleNamespace(speculative_algorithm=algorithm, speculative_draft_model_path=path, pp_size=2))
