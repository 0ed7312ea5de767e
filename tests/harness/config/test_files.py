"""Files of settings: what is written is read again, and as Hydra reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.compose import EXPERIMENTS, compose_job, plain
from harness.config.files import read_yaml, yaml_text

WORDS = ("1e5", "010", "yes", "2026-01-01", "", "null", "1:30", "a: b", "x\ny", "${x}", "日本", "w" * 200, "\x1b[1m")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    shared = [1, 1e-7, None, True]
    settings = plain(compose_job([])) | {word: [word, shared, {}, float("inf")] for word in WORDS}
    (tmp_path / "a.yaml").write_text(yaml_text(settings), encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml") == settings


def test_values_are_what_hydra_takes_them_for(tmp_path: Path) -> None:
    """So that a file that is a choice's own is the same job by its path."""
    for text, value in {"1e5": 1e5, "-1E-7": -1e-7, "989.4e12": 989.4e12, "2026-01-01": "2026-01-01"}.items():
        (tmp_path / "a.yaml").write_text(f"a: {text}")
        assert read_yaml(tmp_path / "a.yaml") == {"a": value}
    by_path = compose_job([f"device={EXPERIMENTS / 'device' / 'h100.yaml'}"])
    assert by_path == compose_job(["device=h100"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b:\n  a: 1\n  a: 2", "line 3: it has a more than once"),
        ("a: 1\n~: 1", "line 2: it has a value without a name"),
        ("a: 1\nb: c: 1", "line 2: mapping values are not allowed"),
        ("a: 1\nb: !!int 1", r"line 2: it has a tag"),
    ],
)
def test_what_would_be_lost_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_yaml(tmp_path / "a.yaml")
