"""The tokenizer: one token per word of the task, single bytes for everything else, Kimi's special tokens.

It is a byte-level BPE without merges: with ``ignore_merges`` a pre-token that is in the vocabulary becomes one token,
any other text falls back to its UTF-8 bytes. So every string survives decode(encode(x)).
"""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kimi_draft.tiny import task
from kimi_draft.tiny.template import CHAT_TEMPLATE, render

# A word with its hyphens and its leading space; one digit; a run of punctuation; newlines; any other white space.
PATTERN = r"\n+| ?[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z]+)*| ?[0-9]| ?[^\sA-Za-z0-9]+|\s"

SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
# Not `special` in the tokenizer's sense: SGLang's tool and reasoning parsers must see them in the decoded text.
MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)
VIDEO_PLACEHOLDER = "<|kimi_k25_video_placeholder|>"
VOCAB_MULTIPLE = 16  # even shards under tensor parallelism


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def words() -> list[str]:
    """All multi-byte pre-tokens of the task's texts and of the layout round them, sorted, in byte-level spelling."""
    layout = [
        render([{"role": role, "content": "x"} for role in ("system", "user", "assistant", "tool")], None, False),
        render([], [task.tool_schema(name) for name in task.TOOLS], False),
    ]
    texts = [*task.lexicon(), *layout, "image"]
    for marker in (*SPECIAL, *MARKERS):
        texts = [piece for text in texts for piece in text.split(marker)]
    split = _pre_tokenizer()
    found = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    return sorted(word for word in found if len(word) > 1)


@cache
def build() -> Tokenizer:
    """The `tokenizers` object; ids: 256 bytes, words, special tokens, reserved ones up to a multiple of 16."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = [*SPECIAL, *MARKERS, VIDEO_PLACEHOLDER]
    for token in (*words(), *special):
        vocab.setdefault(token, len(vocab))
    reserved = [f"<|reserved_token_{i}|>" for i in range(-len(vocab) % VOCAB_MULTIPLE)]
    for token in reserved:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIAL, VIDEO_PLACEHOLDER, *reserved)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def vocab_size() -> int:
    """Number of ids, reserved ones included (= rows of the embedding)."""
    return int(build().get_vocab_size())


def token_id(token: str) -> int:
    """Id of a token that must exist."""
    found = build().token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    hub = PreTrainedTokenizerFast(
        tokenizer_object=build(),
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        unk_token="[UNK]",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    hub.chat_template = CHAT_TEMPLATE
    hub.save_pretrained(folder)
