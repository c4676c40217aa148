"""The parts of training that are easy to get wrong: the draft's convention, the counters, the optimiser, the export."""

import numpy as np
import pytest
import torch

from kimi_draft.tiny import config, data, evaluate, export, model, task, tokenizer, train_draft
from kimi_draft.tiny.draft import Draft, load_draft, shift
from kimi_draft.tiny.evaluate import Acceptance
from kimi_draft.tiny.muon import Muon, orthogonalise


@pytest.fixture(scope="module")
def target():
    return model.build_target(seed=0).eval()


@pytest.fixture
def draft31():
    torch.manual_seed(1)
    hot = torch.arange(0, 320, 2)
    return Draft(config.draft_config(len(hot), eagle31=True), hot).eval()


@pytest.fixture(params=["draft", "draft31"])
def draft(request):
    if request.param == "draft31":
        return request.getfixturevalue("draft31")
    torch.manual_seed(1)
    return Draft(config.draft_config()).eval()


@torch.no_grad()
def test_training_time_test_equals_a_real_chain(draft):
    """The suffix attention over all rows at once gives what one row's chain gives when it is run alone."""
    length, links, row = 9, 3, 4
    embeds, aux = torch.randn(1, length, 96), torch.randn(1, length, 288)
    hidden, cache, parallel = draft.start(aux), [], []
    for link in range(links):
        normed, hidden = draft.step(shift(embeds, link + 1), hidden, cache)
        parallel.append(normed[0, row])

    # Alone: rows 0..row see the target's states; each later row sees the previous row's output and the next embedding.
    states = draft.start(aux)[:, : row + 1]
    seen = embeds[:, 1 : row + 2]
    for link in range(links):
        normed, out = draft.step(seen, states, [])
        torch.testing.assert_close(normed[0, -1], parallel[link], atol=1e-5, rtol=1e-5)
        states = torch.cat([states, out[:, -1:]], 1)
        seen = embeds[:, 1 : row + 3 + link]


@torch.no_grad()
def test_draft_reads_the_next_tokens_embedding_and_only_the_past(draft):
    embeds, aux = torch.randn(1, 8, 96), torch.randn(1, 8, 288)
    before, _ = draft.step(embeds, draft.start(aux), [])
    changed = embeds.clone()
    changed[0, 5] += 1
    after, _ = draft.step(changed, draft.start(aux), [])
    moved = (before - after).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [False] * 5 + [True] * 3


def test_eagle31_carries_the_normed_state(draft31):
    normed, carried = draft31.step(torch.randn(1, 4, 96), draft31.start(torch.randn(1, 4, 288)), [])
    assert normed is carried
    assert draft31.to_target_ids(torch.tensor([0, 3])).tolist() == [0, 6]


@pytest.mark.parametrize(
    ("right", "rounds", "tokens", "first"),
    [
        ([[1, 1, 1]] * 10, 2, 8, 3),  # every guess kept: 4 tokens a round
        ([[0, 1, 1]] * 10, 8, 8, 0),  # the first guess is wrong: the bonus token only
        ([[1, 0, 1]] * 10, 4, 8, 1),
    ],
)
def test_rounds(right, rounds, tokens, first):
    """An answer of 9 tokens after a prompt of 2: the first comes from prefill, 8 from rounds."""
    count = evaluate._rounds([[False] * 3] + [list(map(bool, row)) for row in right], prompt=2, length=11, depth=3)
    assert (count.rounds, count.tokens, count.first, count.requests) == (rounds, tokens, first, 1)
    assert count.length == tokens / rounds


def test_rounds_stop_at_the_end_of_the_answer():
    count = evaluate._rounds([[True] * 3] * 6, prompt=1, length=4, depth=3)  # 3 answer tokens, 2 of them from rounds
    assert (count.rounds, count.tokens, count.tried) == (1, 2, [1, 1, 0])
    assert (count + count).tokens == 4 and (count + Acceptance(3)).positions == [1, 1, 0]


def test_the_answer_proper_begins_after_the_reasoning():
    for kind in ("read_any", "think_read_any"):
        row = data.encode(task.sample(np.random.default_rng(2), kind))
        first = row.ids[row.prompt + evaluate._reasoning_length(row.example)]
        assert row.example.answer.startswith(tokenizer.build().decode([first])) and first > 255


def test_orthogonalise_gives_singular_values_near_one():
    stack = torch.randn(4, 32, 96, generator=torch.Generator().manual_seed(0))
    for x in (stack, stack.mT):
        values = torch.linalg.svdvals(orthogonalise(x))
        assert values.min() > 0.6 and values.max() < 1.3


def test_muon_moves_every_matrix_by_its_rate_and_fits_a_regression():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(3, 8, 16))
    truth, inputs = torch.randn(3, 8, 16), torch.randn(256, 16)
    optimiser = Muon([weight], rate=0.1)
    for step in range(200):
        optimiser.rate = 0.1 * (1 - step / 200)
        loss = ((inputs @ weight.mT - inputs @ truth.mT) ** 2).mean()
        loss.backward()
        optimiser.step()
        weight.grad = None
    assert loss < 0.05


@torch.no_grad()
def test_grouped_attention_equals_the_stock_module(target):
    stock = model.Kimi_K25ForConditionalGeneration(target.config).eval()
    stock.load_state_dict(target.state_dict())
    step = data.collate(data.draw(3, 0, 12))
    torch.testing.assert_close(
        model.image_rows(target, step.pixels, step.grid), model.image_rows(stock, step.pixels, step.grid)
    )


@torch.no_grad()
def test_a_batch_answers_as_the_whole_model_does(target):
    """Padding, micro-batches and our own scatter of image rows change nothing against one plain forward call."""
    step = data.collate(data.draw(5, 0, 6), micro=2)
    rows = model.image_rows(target, step.pixels, step.grid)
    batch = step.batches[1]
    logits = target.lm_head(model.hidden_rows(target, model.input_rows(target, batch.ids, rows[batch.rows])))
    for k, example in enumerate(batch.examples):
        row = data.encode(example)
        inputs = {"input_ids": torch.tensor([row.ids])}
        if example.images:
            features = data.processor().preprocess([{"image": image} for image in example.images])
            inputs |= {"pixel_values": features["pixel_values"], "image_grid_thw": features["grid_thws"]}
        plain = target(**inputs).logits[0]
        torch.testing.assert_close(logits[k, : len(row.ids)], plain, atol=2e-5, rtol=1e-4)
        assert int(batch.prompt[k]) == row.prompt and int(batch.length[k]) == len(row.ids)


@torch.no_grad()
def test_export_round_trip(target, draft31, tmp_path):
    from safetensors.torch import load_file

    export.export_target(target, tmp_path / "target")
    again = model.load_target(tmp_path / "target")
    for name, value in target.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name

    export.export_draft(draft31, target, tmp_path / "draft31")
    saved = load_file(tmp_path / "draft31" / "model.safetensors")
    loaded = load_draft(tmp_path / "draft31")
    embeds, aux = torch.randn(1, 5, 96), torch.randn(1, 5, 288)
    for ours, theirs in zip(
        loaded.step(embeds, loaded.start(aux), []), draft31.step(embeds, draft31.start(aux), []), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(saved["d2t"] + torch.arange(len(saved["d2t"])), draft31.hot)
    assert saved["t2d"].nonzero().flatten().tolist() == draft31.hot.tolist()
    assert torch.equal(saved["embed_tokens.weight"], target.model.language_model.embed_tokens.weight)
    assert {name for name in saved if name.startswith("fc_norm")} == {f"fc_norm.{i}.weight" for i in range(3)}


def test_the_draft_scales_its_attention_as_the_target_does(target, draft31):
    assert draft31.layers[0].self_attn.scale == pytest.approx(target.model.language_model.layers[0].self_attn.scaling)


def test_hub_names():
    assert (
        export.hub_name("language_model.model.blocks.3.mlp.gate.weight")
        == "language_model.model.layers.3.mlp.gate.weight"
    )
    assert export.hub_name("vision_tower.encoder.patch_embed.proj.bias") == "vision_tower.patch_embed.proj.bias"
    assert export.hub_name("vision_tower.encoder.blocks.0.wo.bias") == "vision_tower.encoder.blocks.0.wo.bias"
    assert export.hub_name("model.mm_projector.pre_norm.weight") == "mm_projector.pre_norm.weight"


def test_draws_depend_on_seed_and_step_only():
    first, again, other = data.draw(1, 7, 5), data.draw(1, 7, 5), data.draw(1, 8, 5)
    assert [e.request() for e in first] == [e.request() for e in again]
    assert [e.request() for e in first] != [e.request() for e in other]


def test_hot_ids_cover_all_answers():
    hot = set(train_draft.hot_ids(20).tolist())
    assert len(hot) % 16 == 0 and len(hot) < tokenizer.vocab_size() / 2
    for seed in range(100):
        row = data.encode(task.sample(np.random.default_rng(seed)))
        assert hot.issuperset(row.ids[row.prompt :])
