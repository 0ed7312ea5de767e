"""What every training engine does, in every layout: the same as plain torch that takes samples one by one.

Gradients are compared tensor by tensor: a sum that is left out can leave log-probs right, and the norm off by 1e-5.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from harness.rl.diagnostics import ROUTED
from tests.support.fsdp_samples import Tensors, assert_close, same_bits
from tests.training_contract.under_test import Layout, Run, Runs, Told, WorldUnderTest

GRADIENTS = 5e-6  # of a tensor's largest; float32 sums of some hundred numbers in another order, through four layers

WEIGHTS = {5: 1e-3, 50: 0.2}
"""By steps, of how far all weights have moved together: without a first moment AdamW moves an element by the sign of
its gradient, so that one near 0 which is rounded to the other side moves the other way, and a router chooses others."""


@dataclass
class Seen:
    """One model in one layout."""

    under_test: WorldUnderTest
    run: Run
    model: str

    @property
    def ranks(self) -> list[Told]:
        return [told[self.model] for told in self.run.ranks]

    def state(self, step: str, kind: str = "weight") -> Tensors:
        return self.run.state(self.model, step, kind)


@pytest.fixture
def seen(case: tuple[WorldUnderTest, Layout, str], runs: Runs) -> Seen:
    under_test, layout, model = case
    return Seen(under_test, runs(under_test, layout), model)


def test_log_probs_and_squares_are_those_of_samples_taken_alone_on_every_rank(seen: Seen, plain: Run) -> None:
    expected = plain.ranks[0][seen.model]
    for told in seen.ranks:
        np.testing.assert_allclose(told.scored, expected.scored, rtol=0, atol=3e-6)
        np.testing.assert_allclose(told.squares, expected.squares, rtol=0, atol=3e-6)


def test_gradients_of_each_tensor_are_those_of_samples_taken_alone(seen: Seen, plain: Run) -> None:
    assert_close(seen.state("1", "exp_avg"), plain.state(seen.model, "1", "exp_avg"), rtol=GRADIENTS)
    for told in seen.ranks:
        assert told.steps[0]["grad_norm"] == pytest.approx(plain.ranks[0][seen.model].steps[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("steps", WEIGHTS)
def test_weights_move_as_those_of_samples_taken_alone(seen: Seen, plain: Run, steps: int) -> None:
    if steps > seen.run.layout.steps(seen.model):
        pytest.skip("so many steps are made of few models")
    first, expected = plain.state(seen.model, "1"), plain.state(seen.model, str(steps))
    found = seen.state(str(steps))
    off, moved = (
        torch.cat([(one[name] - expected[name]).flatten() for name in expected]).norm() for one in (found, first)
    )
    assert off <= WEIGHTS[steps] * moved


def test_stages_leave_the_bits_of_an_untied_model_as_they_are(seen: Seen, runs: Runs) -> None:
    layout = seen.run.layout
    if not seen.under_test.exact or layout.pipeline == 1 or seen.model == "tied":
        pytest.skip("sums are made in another order")
    whole = Seen(seen.under_test, runs(seen.under_test, replace(layout, pipeline=1)), seen.model)
    steps = min(run.layout.steps(seen.model) for run in (seen.run, whole.run))
    for step in ("1", str(steps)):
        assert same_bits(seen.state(step), whole.state(step))
    norms = [[told["grad_norm"] for told in run.ranks[0].steps[:steps]] for run in (seen, whole)]
    assert norms[0] == norms[1]
    assert np.array_equal(seen.ranks[0].scored, whole.ranks[0].scored)


def test_tokens_go_to_experts_that_were_chosen_before_and_else_to_those_of_the_router(seen: Seen, plain: Run) -> None:
    expected = plain.ranks[0][seen.model].routed
    if expected is None:
        pytest.skip("it has no experts")
    assert np.abs(expected - plain.ranks[0][seen.model].scored).max() > 1e-2
    for told in seen.ranks:
        np.testing.assert_allclose(told.routed, expected, rtol=0, atol=3e-6)
    assert_close(seen.state("routed", "exp_avg"), plain.state(seen.model, "routed", "exp_avg"), rtol=GRADIENTS)


def test_all_ranks_take_the_same_steps_and_neighbours_tell_the_same_sums(seen: Seen, runs: Runs) -> None:
    assert all(told.steps == seen.ranks[0].steps for told in seen.ranks)
    together = seen.run.layout.tensor * seen.run.layout.pipeline
    for start in range(0, len(seen.ranks), together):
        assert all(told.sums == seen.ranks[start].sums for told in seen.ranks[start : start + together])
    firsts = [seen.ranks[start].sums for start in range(0, len(seen.ranks), together)]
    assert min(first["tokens"] for first in firsts) > 0
    whole = runs(seen.under_test, seen.under_test.layouts[0]).ranks[0][seen.model].sums
    counts = {name: tokens for name, tokens in whole.items() if name.startswith(ROUTED)}
    assert {name: sum(first[name] for first in firsts) for name in counts} == counts


def test_what_is_sent_is_every_weight_once_and_to_the_bit_whoever_sends(seen: Seen) -> None:
    names = [name for told in seen.ranks for name in told.arrived]
    assert sorted(names) == sorted(seen.ranks[0].names)
    arrived = {name: tensor for told in seen.ranks for name, tensor in told.arrived.items()}
    assert same_bits(arrived, seen.state("1"))
    assert same_bits(seen.ranks[0].for_all, arrived)
    assert all(same_bits(told.beside, arrived) for told in seen.ranks)
    assert all(told.names == seen.ranks[0].names for told in seen.ranks)


def test_what_was_loaded_goes_on_to_the_bit(seen: Seen) -> None:
    for kind in ("weight", "exp_avg_sq"):
        assert same_bits(seen.state("again", kind), seen.state("2", kind))


def test_a_reference_stays_as_it_was(seen: Seen, plain: Run) -> None:
    for told in seen.ranks:
        np.testing.assert_allclose(told.reference, plain.ranks[0][seen.model].reference, rtol=0, atol=3e-6)


def test_gradients_that_are_not_finite_are_skipped_by_all_ranks(seen: Seen) -> None:
    assert {told.not_finite["skipped"] for told in seen.ranks} == {1.0}
    assert {told["skipped"] for told in seen.ranks[0].steps} == {0.0}
    for kind in ("weight", "exp_avg_sq"):
        assert same_bits(seen.state("skipped", kind), seen.state("again", kind))


def test_nothing_is_saved_between_two_micro_batches(seen: Seen) -> None:
    assert all(told.unfinished for told in seen.ranks)


def test_values_of_a_critic_begin_at_nought(seen: Seen) -> None:
    if not seen.under_test.values:
        pytest.skip("it has no critics")
    assert all(told.values is not None and not told.values.any() for told in seen.ranks)
