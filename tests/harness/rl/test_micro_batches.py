import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rl.micro_batches import cut_by_tokens, cut_further

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 200), st.sampled_from(["padded", "packed"]), st.integers(0, 20))
def test_every_sample_is_in_one_part_within_the_limit(lengths: list[int], limit: int, layout: str, more: int) -> None:
    parts = cut_by_tokens(lengths, limit, layout)
    count = min(len(lengths), len(parts) + more)
    for cut in (parts, cut_further(parts, count)):
        assert sorted(np.concatenate(cut).tolist()) == list(range(len(lengths)))
        for part in cut:
            taken = [lengths[sample] for sample in part]
            tokens = max(taken) * len(taken) if layout == "padded" else sum(taken)
            assert tokens <= limit or len(taken) == 1
    assert len(cut_further(parts, count)) == count


def test_padded_parts_hold_like_lengths_and_there_are_no_more_than_samples() -> None:
    parts = cut_by_tokens([10, 1, 10, 1, 1], 20, "padded")
    assert [sorted(part.tolist()) for part in parts] == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="cannot be cut into 3 parts"):
        cut_further(cut_by_tokens([1, 1], 10, "packed"), 3)
