from pathlib import Path

import pytest

from harness.studies import sample
from harness.tasks.tokenizer import load_tokenizer


def test_transformers_reads_the_tokens_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(sample, "STEPS", 1)
    sample.make_sample(tmp_path, lambda step: None)
    ours, theirs = load_tokenizer(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "Backwards: red cat sun"}]
    text = ours.chat(messages, {})
    assert ours.encode(text).tolist() == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text)) == text
