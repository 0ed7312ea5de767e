"""Places of groups that are refused, or take longer than their limit, are dealt other prompts: on the virtual clock,
where a draw says which are refused."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.acceptance.chaos.jobs import base
from harness.comparison.promises import FinishedRun
from harness.config import ConfigError, JobConfig, LatencyConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.config.job import DEALT_AGAIN
from harness.config.registries import SCHEDULES, find
from harness.driver import places
from harness.driver.checkpoint_files import Decision, Refusal
from harness.driver.listeners import IterationListener
from harness.driver.places import Candidates, Places, Verdict
from harness.driver.session import simulate
from harness.runtime.runtime import parts_of
from tests.support.every_schedule import EVERY_SCHEDULE
from tests.support.invariants import check_run
from tests.support.random_jobs import play

IN_ORDER = ("colocate_sync", "separated_sync", "one_step_off", "k_step_off", "delayed_update", "half_step")
REFILLING = (*IN_ORDER, "fully_async")


def filtered(schedule: str, share: float | None, over_sampling: float = 1.0, **options: Any) -> JobConfig:
    config, sizes = base(schedule), {"batch_groups": 8, "group_size": 2, "micro_batch_groups": 2}
    return replace(
        config,
        iterations=5,
        schedule=replace(config.schedule, options=config.schedule.options | options),
        algorithm=replace(config.algorithm, filter="zero_variance", over_sampling=over_sampling, **sizes),
        cost=replace(config.cost, filtered_share=share),
        cluster=replace(config.cluster, devices=4),
    )


@cache
def played(schedule: str, share: float, over_sampling: float = 1.0) -> FinishedRun:
    return play(filtered(schedule, share, over_sampling)).finished


def all_keep_the_same(runs: Sequence[FinishedRun]) -> bool:
    kept = [{sample.sample_id for sample in run.trained} for run in runs]
    return all(one == kept[0] for one in kept)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", REFILLING)
def test_every_schedule_trains_full_batches_of_kept_groups_and_pays_for_the_others(schedule: str) -> None:
    seconds = {}
    for share in (0.0, 0.5):
        run = played(schedule, share)
        check_run(run)
        assert (run.counts["dropped_filtered"] > 0) == (share > 0)
        seconds[share] = max(span.end for span in run.timeline.spans)
    assert seconds[0.5] > 1.5 * seconds[0.0]


@pytest.mark.slow
def test_which_groups_are_kept_does_not_depend_on_the_schedule() -> None:
    completion = filtered("fully_async", 0.5, order="completion", max_staleness=1)
    assert all_keep_the_same([*(played(schedule, 0.5) for schedule in IN_ORDER), play(completion).finished])
    runs = [played(schedule, 0.5, 1.3) for schedule in REFILLING]
    assert all_keep_the_same(runs) and all(run.counts == runs[0].counts for run in runs)
    recorder = simulate(filtered("colocate_sync", 0.5), 0)
    numbers = [record.group_id for record in recorder.samples()]
    assert len(set(numbers)) * recorder.group_size == len(numbers) and max(numbers) > DEALT_AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "over_sampling"), [*((name, 1.3) for name in REFILLING), ("half_step", 2.0), ("fully_async", 2.0)]
)
def test_spares_replace_what_is_refused_and_leave_where_not_needed(schedule: str, over_sampling: float) -> None:
    """Of a batch of 8, which admits 11 or 16: with none refused all that are too many leave."""
    for share in (0.0, 0.5):
        run = played(schedule, share, over_sampling)
        check_run(run)
        spares = run.config.algorithm.spare_groups
        assert spares == {1.3: 3, 2.0: 8}[over_sampling]
        given_up = run.counts["dropped_spare"] // run.group
        assert given_up == 5 * spares if share == 0.0 else given_up < 5 * spares
        assert (run.counts["dropped_filtered"] > 0) == (share > 0)


@given(st.data(), st.integers(1, 6), st.integers(0, 6))
def test_a_candidates_fate_does_not_depend_on_whose_verdict_came(data: st.DataObject, places: int, spares: int) -> None:
    candidates = range(places + spares)
    passed = data.draw(st.lists(st.booleans(), min_size=len(candidates), max_size=len(candidates)))
    found: list[dict[int, Decision]] = []
    for order in (candidates, data.draw(st.permutations(candidates))):
        machine, decided = Candidates(places, spares), dict[int, Decision]()
        for candidate in order:
            machine.judged(candidate, passed[candidate])
            new = machine.decide()
            assert not new.keys() & decided.keys()
            decided |= new
            if sum(decision in ("kept", "again") for decision in decided.values()) == places:
                assert decided.keys() == set(candidates), "nothing is open once the batch is full"
        found.append(decided)
    assert found[0] == found[1] and found[0].keys() == set(candidates)
    kept = [candidate for candidate in candidates if found[0][candidate] in ("kept", "again")]
    assert len(kept) == places
    enough = [candidate for candidate in candidates if passed[candidate]][:places]
    if len(enough) == places:
        assert kept == enough, "the first that passed, in their order"


def test_the_metrics_say_how_many_groups_were_refused_and_how_often_a_place_was_dealt() -> None:
    found: list[Any] = []
    listener = IterationListener(found.append)
    recorder = simulate(filtered("separated_sync", 0.5), 0, started=lambda s: s.recorder.listeners.append(listener))
    refused = sum(row["filter/refused"] for row in found)
    assert refused * recorder.group_size == recorder.ledger.counts()["dropped_filtered"]
    assert all(row["filter/share"] == row["filter/refused"] / (row["filter/refused"] + 8) for row in found)
    assert max(row["filter/rounds"] for row in found) > 2


def test_a_batch_refused_again_and_again_and_a_share_that_is_not_told_end_a_run_in_a_line() -> None:
    with pytest.raises(ExceptionGroup) as failure:
        simulate(filtered("fully_async", 1.0), 0)
    (told,) = {str(part) for part in parts_of(failure.value) if isinstance(part, ConfigError)}
    assert told.startswith("algorithm.filter=zero_variance refused 73 of 81 groups that were dealt for the 8 of batch")
    assert "algorithm.filter_rounds=10" in told
    config = compose_job(["backend=virtual", "algorithm.filter=zero_variance"])
    with pytest.raises(ConfigError, match="algorithm.filter=zero_variance has no rewards to read on a simulated clock"):
        simulate(config, 0)


def test_where_ids_have_no_room_no_setting_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_MOST_DEALS", 4)
    with pytest.raises(ExceptionGroup) as failure:
        simulate(filtered("colocate_sync", 1.0), 0)
    (told,) = {str(part) for part in parts_of(failure.value) if isinstance(part, ConfigError)}
    assert "refused 4 groups in a row for one place of batch 0" in told and "filter_rounds" not in told


def test_what_was_given_up_is_done_with_once_it_is_judged_and_a_resumed_run_knows_what_was_decided() -> None:
    """Two places and a spare."""
    places = Places(spares=1, rounds=9, who="a filter", fix="another")
    places.made(0, first=10, groups=3)
    passed, failed = Verdict(None, [1.0]), Verdict("filtered", [0.0])
    found = places.judge(0, {10: passed, 11: passed})
    assert (found.kept, found.spare, found.given_up) == ([10, 11], [12], []), "the spare still runs"
    assert places.judge(0, {12: failed}).given_up == [12]
    places.made(1, first=13, groups=3)
    found = places.judge(1, {13: failed, 14: failed, 15: passed})
    assert (found.refused, found.again, found.kept) == ([13], [14], [15])
    state = places.state({14, 15}, [1])
    for place, replaced in ((13, True), (14, False)):
        places.note(Refusal(1, place, 0.0, [0.0], replaced=replaced))
    resumed = Places(spares=1, rounds=9, who="a filter", fix="another")
    resumed.load(state, {1: 13})
    resumed.deal_again(14)
    assert resumed.judge(1, {14: passed, 15: passed}).kept == [14, 15] and len(places.noted_since()) == 2


# -- samples that take longer than their limit: cut where they are, or their groups dropped


HANGS = LatencyConfig(kind="lognormal", mean=0.5, sigma=1.5)  # seconds; the longest of some hundred takes fifty


def limited(schedule: str, what: str, limit_s: float, tools: LatencyConfig | None = HANGS) -> JobConfig:
    config = base(schedule)
    cost = replace(config.cost, lengths=LengthsConfig(kind="lognormal", mean=300.0, sigma=1.0, cap=4000))
    if tools is not None:
        turns = LengthsConfig(kind="lognormal", mean=2.0, sigma=1.0, cap=4)
        cost = replace(cost, turns=turns, tool_latency=tools)
    return replace(
        config,
        iterations=5,
        algorithm=replace(config.algorithm, batch_groups=8, group_size=4, micro_batch_groups=2),
        cost=cost,
        cluster=replace(config.cluster, devices=4),
        engine=replace(config.engine, on_straggler=what, sample_limit_s=limit_s),
    )


def tools_of(schedule: str) -> LatencyConfig | None:
    """What samples of this schedule may play with."""
    return None if find("schedule", schedule).lends else HANGS


@pytest.mark.parametrize(
    ("schedule", "tools"),
    [*((name, tools_of(name)) for name in SCHEDULES), ("colocate_sync", None), ("fully_async", None)],
)
def test_what_takes_too_long_ends_at_its_limit_and_is_trained(schedule: str, tools: LatencyConfig | None) -> None:
    run = play(limited(schedule, "cut", 2.0, tools))
    check_run(run.finished)
    trained = run.finished.trained
    cut = [sample for sample in trained if sample.finish_reason == "cut"]
    assert 0 < len(cut) < len(trained)
    for sample in trained:
        assert sample.finished_at is not None and sample.started_at is not None and sample.response_tokens > 0
        # A decode step, and the time of a transfer, more; what is set aside for a while is there for longer.
        own = find("schedule", schedule)
        assert own.awaits_completion or own.lends or sample.finished_at - sample.started_at < 2.1
    shares = [metrics["straggler/cut"] for metrics in run.metrics]
    assert sum(shares) / len(shares) == pytest.approx(len(cut) / len(trained))


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_the_place_of_a_group_that_takes_too_long_is_dealt_another(schedule: str) -> None:
    tools = tools_of(schedule)
    run = play(limited(schedule, "drop", 4.0 if tools else 2.0, tools))
    check_run(run.finished)  # full batches, a closed ledger, the bounds of the schedule
    dropped = run.finished.counts["dropped_straggler"]
    assert dropped > 0 and dropped == sum(metrics["straggler/dropped"] for metrics in run.metrics) * 4
    assert run.metrics[-1]["ledger/dropped_straggler"] == dropped
    assert run.finished.counts["dropped_filtered"] == 0


def test_a_limit_changes_nothing_without_stragglers_stands_beside_filters_and_may_be_too_low() -> None:
    config = limited("fully_async", "drop", 4.0)
    algorithm = replace(config.algorithm, filter="zero_variance")
    run = play(replace(config, algorithm=algorithm, cost=replace(config.cost, filtered_share=0.3)))
    check_run(run.finished)
    assert run.finished.counts["dropped_straggler"] > 0 and run.finished.counts["dropped_filtered"] > 0
    unlimited = replace(base("fully_async"), iterations=4)
    of_engine = replace(unlimited.engine, on_straggler="cut", sample_limit_s=1e6)
    runs = [play(config).finished for config in (unlimited, replace(unlimited, engine=of_engine))]
    assert runs[0].samples == runs[1].samples and runs[0].timeline.spans == runs[1].timeline.spans
    with pytest.raises(ExceptionGroup) as failure:
        simulate(limited("one_step_off", "drop", 0.01), 0)
    (told,) = {str(part) for part in parts_of(failure.value) if isinstance(part, ConfigError)}
    assert told.startswith("engine.on_straggler=drop after engine.sample_limit_s=0.01 refused ")
    assert "raise engine.sample_limit_s, or raise algorithm.filter_rounds" in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["engine.on_straggler=cut"], "on_straggler=cut needs a limit; set engine.sample_limit_s"),
        (["engine.sample_limit_s=60"], "on_straggler=wait limits nothing; set engine.on_straggler=cut or drop"),
        (["engine.sample_limit_s=0", "engine.on_straggler=cut"], "engine.sample_limit_s"),
        (["engine.on_straggler=kill"], "engine.on_straggler"),
    ],
)
def test_a_limit_that_cannot_be_is_one_line(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_job(settings)
    assert told in str(refused.value) and "\n" not in str(refused.value)
