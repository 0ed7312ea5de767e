"""The contract suite itself: engines that are wrong in one way each, and the test of it that has to notice."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engines.torch import sampling as torch_sampling
from engines.torch.rollout import TorchRollout
from engines.torch.sampling import draw
from harness.protocols import Completion, Request, RolloutEngine, Sampling, StopMode
from tests.contract import subject as contract_subject
from tests.contract import test_loading, test_pauses, test_tokens
from tests.contract.engine_under_test import EngineUnderTest, construct
from tests.contract.reference import assert_greedy, logits_of, make_model
from tests.contract.subject import Subject

Weights = Iterable[tuple[str, torch.Tensor]]


class HeadOfTheFirstVersion(TorchRollout):
    """A tied head that became a copy, as prepacked matrices do."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


class NormsOfTheFirstVersion(TorchRollout):
    async def load_weights(self, version: int, weights: Weights) -> None:
        own = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        await super().load_weights(version, ((n, own[n] if "norm" in n else tensor) for n, tensor in weights))


class HalfLoaded(TorchRollout):
    async def load_weights(self, version: int, weights: Weights) -> None:
        if self.running or self.waiting:
            return await super().load_weights(version, weights)
        own, arrived = dict(self._model.named_parameters()), {}
        for name, tensor in weights:
            arrived[name] = tensor.clone()
            own[name].data = arrived[name]
        await super().load_weights(version, arrived.items())


class KeepsItsCache(TorchRollout):
    def drop_cache(self) -> None:
        pass


class SaysTheLastVersion(TorchRollout):
    def _retire(self) -> None:
        for sample in self._running:
            sample.versions[:] = [self.version] * len(sample.versions)
        super()._retire()


class SaysTheFirstVersion(TorchRollout):
    def _retire(self) -> None:
        for sample in self._running:
            sample.versions[:] = [sample.versions[0]] * len(sample.versions)
        super()._retire()


class PausesNothing(TorchRollout):
    async def pause(self, mode: StopMode) -> None:
        pass


class ForgetsWhatWaited(TorchRollout):
    async def pause(self, mode: StopMode) -> None:
        if mode == "abort":
            self._waiting.clear()
        await super().pause(mode)


class StartsPartialsAnew(TorchRollout):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(request, partial=None) for request in requests])


class ForgetsLogProbsOfPartials(TorchRollout):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(r, partial=r.partial and without_log_probs(r.partial)) for r in requests])


class DrawsByArrival(TorchRollout):
    def _start(self) -> None:
        self._seed += 1
        super()._start()


class SwallowsStopTokens(TorchRollout):
    async def finished(self) -> list[Completion]:
        return [
            replace(done, tokens=done.tokens[:-1], log_probs=done.log_probs[:-1], versions=done.versions[:-1])
            if done.finish_reason == "stop"
            else done
            for done in await super().finished()
        ]


def without_log_probs(partial: Completion) -> Completion:
    return replace(partial, log_probs=0 * partial.log_probs)


def likeliest(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """No draw at all, and the log-probability that one would have had."""
    tokens = logits.argmax(-1)
    log_probs = torch.log_softmax(logits / max(sampling.temperature, 1e-3), -1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def colder(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The right draw, with the log-probability at temperature 1."""
    tokens, _ = draw(logits, uniform, sampling)
    return tokens, torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]


def outside(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens, where only the nucleus was asked for."""
    return draw(logits, uniform, replace(sampling, top_p=1.0))


async def noticed(test: Callable[..., Awaitable[None]], broken: type[TorchRollout], /, **parameters: Any) -> None:
    async def start(setting: Any) -> RolloutEngine:
        return construct(broken, setting)

    subject = await Subject.started(EngineUnderTest(name=broken.__name__, start=start), tied=True)
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        await test(subject, **parameters)
    await subject.engine.close()


GREEDY = test_tokens.test_greedy_tokens_are_those_of_a_transformers_forward_before_and_after_an_update
FAILED_LOAD = test_loading.test_a_load_that_fails_leaves_the_old_version_or_a_refusal_and_the_next_one_heals_it
IN_FLIGHT = test_loading.test_every_token_was_sampled_by_the_version_that_it_names
UPDATES = test_loading.test_ten_updates_in_a_row_under_load
KEEP = test_pauses.test_pause_keep_holds_everything_as_it_is_until_resume
ABORT = test_pauses.test_pause_abort_returns_everything_at_once
RESUMED = test_pauses.test_abort_and_resume_lose_no_token
STOPPED = test_tokens.test_a_stop_token_ends_a_sample_and_stands_last_with_its_log_probability
NEIGHBOURS = test_tokens.test_a_sample_draws_the_same_tokens_whatever_runs_beside_it
PROMPT = test_tokens.test_samples_of_one_prompt_differ
LOG_PROBS = test_tokens.test_log_probabilities_are_those_of_what_tokens_were_drawn_from
FREQUENCIES = test_tokens.test_tokens_come_as_often_as_their_probability_says
SAMPLING = {parameter.id: parameter.values[0] for parameter in test_tokens.SAMPLINGS}
BROKEN_OFF = dict(zip(("broken", "error", "message"), test_loading.BROKEN[0].values, strict=True))


def short(parameter: object) -> str | None:
    """Of a case, only what is wrong stands in its name."""
    return getattr(parameter, "__name__", "").removeprefix("test_")[:30]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "test", "parameters"),
    [
        (HeadOfTheFirstVersion, GREEDY, {}),
        (NormsOfTheFirstVersion, GREEDY, {}),
        (HalfLoaded, FAILED_LOAD, BROKEN_OFF),
        (KeepsItsCache, IN_FLIGHT, {}),
        (SaysTheLastVersion, IN_FLIGHT, {}),
        (SaysTheFirstVersion, UPDATES, {"mode": "keep"}),
        (PausesNothing, KEEP, {}),
        (ForgetsWhatWaited, ABORT, {}),
        (StartsPartialsAnew, RESUMED, {}),
        (ForgetsLogProbsOfPartials, RESUMED, {}),
        (DrawsByArrival, NEIGHBOURS, {}),
        (SwallowsStopTokens, STOPPED, {}),
    ],
    ids=short,
)
async def test_a_broken_engine_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    broken: type[TorchRollout],
    test: Callable[..., Awaitable[None]],
    parameters: dict[str, Any],
) -> None:
    monkeypatch.setattr(contract_subject, "WAIT_S", 3.0)  # for news that never comes
    await noticed(test, broken, **parameters)


@pytest.mark.parametrize(
    ("wrong", "test", "sampling"),
    [
        (likeliest, FREQUENCIES, "plain"),
        (likeliest, PROMPT, None),
        (colder, LOG_PROBS, "hot"),
        (outside, LOG_PROBS, "nucleus"),
        (outside, FREQUENCIES, "nucleus"),
    ],
    ids=short,
)
async def test_a_wrong_draw_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[..., Any],
    test: Callable[..., Awaitable[None]],
    sampling: str | None,
) -> None:
    monkeypatch.setattr(torch_sampling, "draw", wrong)
    await noticed(test, TorchRollout, **({} if sampling is None else {"sampling": SAMPLING[sampling]}))


def test_either_of_two_tokens_that_rounding_decides_between_is_greedy_and_no_other_is() -> None:
    model, prompt = make_model(0, tied=False), np.array([1, 2, 3])

    def answered(token: int) -> Completion:
        one = np.ones(1, np.float32)
        return Completion(0, np.array([token]), one, one.astype(np.int32), "length", 0.0, 1.0)

    best, other, third = logits_of(model, prompt, answered(0).tokens)[0].topk(3).indices.tolist()
    with pytest.raises(AssertionError, match=f"token 0 is {other}, .* says {best}; 1 of 1"):
        assert_greedy(model, prompt, answered(other))
    head = model.lm_head.weight.data
    head[other] = (1 - 1e-6) * head[best]
    for token in (best, other):
        assert_greedy(model, prompt, answered(token))
    with pytest.raises(AssertionError, match=f"token 0 is {third}"):
        assert_greedy(model, prompt, answered(third))
