"""A model and a data set to try text with: small, made here, nothing downloaded.

The model is a Qwen2 of 1.1 million parameters with a tokenizer trained on its texts and a chat template. It has seen
demonstrations that became noisy, and answers some prompts right: so that there is something to sharpen."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError

WORDS = (
    "red blue green black white grey pink brown cat dog fox owl bear deer wolf lion sun moon star rain snow wind fog "
    "storm oak elm fern moss rose lily reed vine salt rice corn milk bread soup tea plum"
).split()
LEAST, MOST = 2, 6  # words of a prompt
TRAIN, TEST = 4000, 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512
STEPS = 400


def make_sample(folder: Path, progress: Callable[[str], None]) -> str:
    """Writes train.jsonl, test.jsonl and model/ into `folder`; returns a census. Raises ConfigError if one is there."""
    for name in ("train.jsonl", "test.jsonl", "model"):
        if (folder / name).exists():
            raise ConfigError(f"folder={folder} holds {name} already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(_rows(TRAIN + TEST))
    for name, part in (("test.jsonl", rows[:TEST]), ("train.jsonl", rows[TEST:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return _write_model(folder / "model", folder / "train.jsonl", folder / "test.jsonl", progress)


def _rows(count: int) -> Iterator[dict[str, str]]:
    """All different."""
    random = np.random.default_rng(0)
    seen: set[str] = set()
    while len(seen) < count:
        words = random.choice(WORDS, size=random.integers(LEAST, MOST, endpoint=True))
        prompt = f"Backwards: {' '.join(words)}"
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": " ".join(words[::-1])}


def _write_model(folder: Path, texts: Path, held_out: Path, progress: Callable[[str], None]) -> str:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    from harness.rl.warm_start import warm_start
    from harness.tasks.data import DataTask
    from harness.tasks.tokenizer import load_tokenizer

    logging.disable_progress_bar()
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=list(tokenizer.stop_tokens), pad_token_id=tokenizer.pad_token,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    task = DataTask(data=str(texts), held_out_data=str(held_out), tokenizer=tokenizer)
    warm_start(model, task, steps=STEPS, batch=64, lr=2e-3, progress=lambda done, of: progress(f"step {done} of {of}"))
    model.generation_config.eos_token_id = list(tokenizer.stop_tokens)
    model.generation_config.pad_token_id = tokenizer.pad_token
    model.save_pretrained(folder)
    return task.summary


def _tokenizer() -> Any:
    """Byte pairs, merged as they occur in the prompts and answers; split as Qwen2 splits text, because that is how
    transformers reads the tokenizer of any Qwen2, whatever its file says."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{row['prompt']}\n{row['answer']}" for row in _rows(TRAIN)]
    tokenizer.train_from_iterator([*texts, *["user\n assistant\n system\n"] * 100], trainer)
    return tokenizer
