from dataclasses import replace

import numpy as np

from harness.protocols import Completion, Request, Sampling
from harness.workers.sample_flow import EngineSamples

GROUP = 2
PROMPT = np.array([7, 8])


def out(sample: int, reason: str) -> Completion:
    tokens = np.array([1])
    return Completion(sample, tokens, np.zeros(1, np.float32), np.zeros(1, np.int32), reason, 0.0, 1.0)  # type: ignore[arg-type]


def having(samples: EngineSamples, *ids: int) -> EngineSamples:
    samples.submitted([samples.request(sample, PROMPT) for sample in ids])
    return samples


def test_what_a_pause_took_back_begins_again_from_its_prompt_in_the_order_in_which_it_came() -> None:
    samples = having(EngineSamples(GROUP, greedy=Sampling(5)), 0, 1, 2, 3)
    samples.taking_back = True
    assert [done.sample_id for done in samples.finished([out(3, "abort"), out(1, "stop")])] == [1]
    assert not samples.all_taken_back(busy=0) and samples.all_taken_back(busy=2)
    samples.finished([out(2, "abort"), out(0, "abort")])
    assert samples.all_taken_back(busy=0)
    again = samples.given_up()
    assert [(request.sample_id, request.partial) for request in again] == [(0, None), (2, None), (3, None)]
    assert [request.sampling is not None for request in again] == [True, True, False], "the first of each group"
    assert 1 not in samples and 0 not in samples, "until it is submitted again"


def test_what_a_pause_took_back_to_carry_it_goes_on_from_the_tokens_that_it_has() -> None:
    samples = having(EngineSamples(GROUP), 0, 1)
    samples.taking_back = True
    none = replace(out(1, "abort"), tokens=np.array([], int))
    samples.finished([none, out(0, "abort")])
    first, second = samples.carried()
    assert first.partial is not None and (first.sample_id, first.partial.length) == (0, 1)
    assert (second.sample_id, second.partial) == (1, None), "it had none"
    samples.taking_back = False
    samples.submitted([first, second])
    samples.finished([replace(out(0, "stop"), tokens=np.array([1, 5])), out(1, "stop")])
    assert (samples.generated, samples.begun_again) == (3, 0), "no token twice"


def test_an_abort_is_what_a_sample_said_where_no_pause_takes_back() -> None:
    samples = having(EngineSamples(GROUP), 0)
    (done,) = samples.finished([out(0, "abort")])
    assert done.finish_reason == "abort" and 0 not in samples


def test_a_sample_between_two_turns_begins_again_with_its_next_one_and_only_once() -> None:
    samples = having(EngineSamples(GROUP, several_turns=True), 0, 1)
    samples.finished([out(0, "stop")])  # it is at its tools
    assert samples.counted(busy=1) == 2, "which counts, too"
    samples.taking_back = True
    samples.finished([out(1, "abort")])
    assert [request.sample_id for request in samples.given_up()] == [1]
    assert samples.begins_again(0) and not samples.begins_again(1)
    samples.submitted([Request(0, PROMPT)])
    assert not samples.begins_again(0)
    samples.finished([out(0, "stop")])
    samples.ended(0)
    assert samples.playing == {1} and samples.counted(busy=0) == 1
