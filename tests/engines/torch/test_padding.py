import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.torch.packing import pad_batch
from harness.transfer_queue import Ragged

CPU = torch.device("cpu")

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=9)


def columns(lengths: list[tuple[int, int]]) -> tuple[Ragged, Ragged]:
    """Prompts and responses whose tokens are all different and above 0."""
    counter = iter(range(1, 1 + sum(map(sum, lengths))))
    rows = [([next(counter) for _ in range(p)], [next(counter) for _ in range(r)]) for p, r in lengths]
    prompts, responses = zip(*rows, strict=True)
    return tuple(Ragged.from_rows([np.array(row, np.int64) for row in part]) for part in (prompts, responses))


@given(lengths)
def test_each_row_is_prompt_response_and_zeros(lengths: list[tuple[int, int]]) -> None:
    prompts, responses = columns(lengths)
    batch = pad_batch(prompts, responses, CPU)
    assert batch.tokens.shape == (len(lengths), max(map(sum, lengths)))
    for i, (p, r) in enumerate(lengths):
        assert batch.tokens[i, : p + r].tolist() == [*prompts.row(i), *responses.row(i)]
        assert not batch.tokens[i, p + r :].any()
        assert batch.responses[i].nonzero().flatten().tolist() == list(range(p, p + r))


@given(lengths)
def test_targets_at_responses_are_the_responses_and_inputs_are_what_precedes_them(
    lengths: list[tuple[int, int]],
) -> None:
    prompts, responses = columns(lengths)
    batch = pad_batch(prompts, responses, CPU)
    assert batch.at_responses(batch.targets).tolist() == responses.values.tolist()
    expected = np.concatenate(
        [np.append(prompts.row(i), responses.row(i))[p - 1 : -1] for i, (p, _) in enumerate(lengths)]
    )
    assert batch.at_responses(batch.inputs.flatten()).tolist() == expected.tolist()
