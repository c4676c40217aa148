"""The tiny Kimi-K2.5: task, tokenizer, training, export, weights."""
