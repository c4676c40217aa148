"""The committed checkpoints: complete, small, consistent with the code, and good at the task."""

import filecmp
import json

import pytest
from safetensors.torch import load_file
from transformers import AutoProcessor

from kimi_draft.tiny import card, config, data, evaluate, model, paths, processing_tiny_kimi, task, tokenizer
from kimi_draft.tiny.draft import load_draft

FOLDERS = {"target": paths.target_dir(), "draft": paths.draft_dir(), "draft31": paths.draft31_dir()}


@pytest.fixture(scope="module")
def target():
    return model.load_target(paths.target_dir())


@pytest.fixture(scope="module")
def judged(target):
    return evaluate.judge(target, data.draw(77, 0, 360, dict.fromkeys(task.KINDS, 1 / len(task.KINDS))))


def test_size_of_everything_together():
    total = sum(file.stat().st_size for file in paths.WEIGHTS.rglob("*") if file.is_file())
    assert total < 6_000_000


@pytest.mark.parametrize("name", list(FOLDERS))
def test_configs_are_those_of_the_code(name):
    saved = json.loads((FOLDERS[name] / "config.json").read_text())
    if name == "target":
        assert saved == config.target_config()
    else:
        assert saved == config.draft_config(saved["draft_vocab_size"], eagle31=name == "draft31")


@pytest.mark.parametrize("name", list(FOLDERS))
def test_tokenizers_are_those_of_the_code(name, tmp_path):
    tokenizer.save(tmp_path)
    for file in tmp_path.iterdir():
        assert filecmp.cmp(file, FOLDERS[name] / file.name, shallow=False), file.name


def test_processor_is_that_of_the_code_and_loads():
    assert filecmp.cmp(processing_tiny_kimi.__file__, paths.target_dir() / "processing_tiny_kimi.py", shallow=False)
    processor = AutoProcessor.from_pretrained(paths.target_dir(), trust_remote_code=True)
    assert processor.media_processor.media_proc_cfg == config.MEDIA


def test_both_vision_key_sets_agree():
    vision = json.loads((paths.target_dir() / "config.json").read_text())["vision_config"]
    for plain in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        assert vision[plain] == vision[f"vt_{plain}"]
    assert vision["mm_hidden_size"] == vision["vt_hidden_size"]
    assert vision["text_hidden_size"] == config.HIDDEN
    for side in ("height", "width", "time"):
        assert vision[f"init_pos_emb_{side}"] == vision[f"pos_emb_{side}"]


def test_hub_names_of_the_target():
    names = set(load_file(paths.target_dir() / "model.safetensors"))
    mla = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    for layer in range(config.LAYERS):
        for part in mla:
            assert f"language_model.model.layers.{layer}.self_attn.{part}.weight" in names
    assert "language_model.model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert "vision_tower.encoder.blocks.1.wqkv.weight" in names and "mm_projector.proj.2.weight" in names


def test_the_target_answers(judged):
    """A loose bound on a small sample, all kinds alike; the card has the exact numbers."""
    assert sum(good for _, good in judged) / len(judged) >= 0.95
    kinds = evaluate.by_kind(judged)
    assert set(kinds) == set(task.KINDS)
    for kind, (right, asked) in kinds.items():
        assert right >= asked - 3, kind


def test_the_draft_is_good_and_feels_the_faults(target, judged):
    good = [example for example, fine in judged if fine][:150]
    found = {
        fault: card.image_only(evaluate.acceptance(target, load_draft(FOLDERS["draft"]), good, fault))
        for fault in ("none", "stale last row", "unrotated prefix")
    }
    assert 2.3 <= found["none"].length <= 3.8
    assert found["none"].positions[0] >= 0.9
    assert found["stale last row"].first_chain < 0.85 * found["none"].first_chain
    assert found["unrotated prefix"].length < 0.95 * found["none"].length


def test_the_small_draft_guesses(target, judged):
    good = [example for example, fine in judged if fine][:100]
    found = card.image_only(evaluate.acceptance(target, load_draft(FOLDERS["draft31"]), good))
    assert found.length > 1.8
