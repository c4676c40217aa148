"""The training pipeline from end to end, in its quick form."""

import io

from rich.console import Console

from kimi_draft.tiny import model, train


def test_quick_run_writes_three_checkpoints_and_a_card(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False)
    text = train.run(tmp_path, quick=True, console=console)
    assert (tmp_path / "README.md").read_text() == text
    for name in ("target", "draft", "draft31"):
        assert (tmp_path / name / "model.safetensors").stat().st_size > 500_000
        assert f"| {name} |" in text
    first = model.load_target(tmp_path / "target").state_dict()

    # The same seeds give the same weights.
    train.run(tmp_path / "again", quick=True, console=console)
    again = model.load_target(tmp_path / "again" / "target").state_dict()
    assert all(first[name].equal(again[name]) for name in first)

    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    text = train.run(tmp_path, quick=True, keep="target", console=console)
    assert "| target | 832," in text and "| kept |" not in text  # the card remembers the target's time
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
    draft = (tmp_path / "draft" / "model.safetensors").read_bytes()
    train.run(tmp_path, quick=True, keep="all", console=console)
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == draft
