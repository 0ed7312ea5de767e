from pathlib import Path

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.rl.rejection import rejection_of

LENGTHS = torch.tensor([2, 3])
MASK = torch.tensor([True, True, True, False, True])
RATIOS = torch.tensor([2.0, 0.5, 4.0, 100.0, 1.0])


def left(ratios: torch.Tensor = RATIOS, **rejection: tuple[float | None, float | None]) -> list[int]:
    """The tokens that are left."""
    algorithm = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, rejection=rejection)
    rejected = rejection_of(algorithm)
    assert rejected is not None
    return rejected(ratios.log(), torch.zeros(5), MASK, LENGTHS).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("measure", "bounds", "kept"),
    [
        ("token_ratio", (0.6, 3.0), [0, 4]),
        ("token_ratio", (None, 3.0), [0, 1, 4]),
        ("token_ratio", (0.6, None), [0, 2, 4]),
        ("sequence_ratio", (0.9, 3.0), [0, 1]),
        ("sequence_ratio", (1.1, 5.0), [2, 4]),
        ("geometric_ratio", (1.1, 2.1), [2, 4]),
        ("token_k1", (-0.1, 1.0), [1, 4]),
        ("max_k2", (None, 0.3), [0, 1]),
    ],
)
def test_what_is_within_both_bounds_is_left_of_the_mask(
    measure: str, bounds: tuple[float | None, float | None], kept: list[int]
) -> None:
    assert left(**{measure: bounds}) == kept


def test_what_any_measure_leaves_out_is_left_out() -> None:
    assert left(token_ratio=(0.6, None), geometric_ratio=(None, 1.1)) == [0]


def test_what_is_no_number_is_left_out() -> None:
    assert 0 not in left(torch.tensor([torch.nan, 1.0, 1.0, 1.0, 1.0]), token_ratio=(None, None))


def test_a_measure_of_ones_own_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rejection.py").write_text("def size(log_ratio, mask, lengths):\n    return log_ratio.abs()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert left(**{"own_rejection:size": (None, 0.7)}) == [0, 1, 4]


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.rejection.token_ratio=\[2.0,0.5\] leaves nothing"):
        left(token_ratio=(2.0, 0.5))
