"""Hooks of a user's own that docs/plugins.md shows: what plays samples, filters, deals problems and evaluates."""

import json
import os
import sys
from pathlib import Path

import pytest

from harness.checks.job import plan_job
from harness.cli.forked_runs import ForkedRuns
from harness.comparison.promises import read_finished
from harness.config import ConfigError
from harness.config.compose import cell_name, compose_job, make_schedule, plugins_of
from harness.config.machine import Machine
from harness.metrics.run_files import load_evaluations, load_ledger, load_metrics, load_samples
from harness.tasks import environment_of, make_buffer, make_task
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_run
from tests.support.project import ROOT
from tests.support.real_runs import SMALL

PLAYED = ("task.generate=my_lab.agents:two_tries", "task.generate_options.second=0.25")
FILTERED = ("algorithm.filter=my_lab.filters:middling", "algorithm.options.most=0.8")
BUFFER = ("task.buffer=my_lab.buffers:Again", "task.buffer_options.kept=2")
EVALUATED = ("eval.every=2", "eval.function=my_lab.evaluation:agreement")


async def test_a_generate_function_plays_a_sample_turn_by_turn_to_its_end(lab: Path) -> None:
    environment = environment_of(make_task(compose_job(PLAYED)))
    assert environment is not None and environment.max_turns == 8
    problem = make_task(compose_job([])).problem(0, 0)
    rewards = []
    for said in ([problem.answer], ["x", problem.answer], ["x", "y"]):
        state = await environment.reset(problem, 0)
        steps = [await environment.step(state, one) for one in said]
        assert [step.observation for step in steps[:-1]] == ["ab"] * (len(said) - 1)
        assert [step.done for step in steps] == [False] * (len(said) - 1) + [True]
        rewards.append(steps[-1].reward)
        await environment.close(state)
    assert rewards == [1.0, 0.25, 0.0]
    (lab / "my_lab/held.py").write_text(
        "ended = []\n\n\nasync def held(problem, sample):\n    try:\n        await sample.say()\n"
        "        sample.hear('a')\n        await sample.say()\n    finally:\n        ended.append(sample.seed)\n"
    )
    environment = environment_of(make_task(compose_job(["task.generate=my_lab.held:held"])))
    assert environment is not None
    state = await environment.reset(make_task(compose_job([])).problem(0, 0), 7)
    assert (await environment.step(state, "x")).observation == "a"
    await environment.close(state)
    assert sys.modules["my_lab.held"].ended == [7]


async def test_a_generate_function_that_breaks_the_order_of_speaking_fails_its_sample_only(lab: Path) -> None:
    (lab / "my_lab/rude.py").write_text(
        "async def first(problem, sample):\n    sample.hear('a')\n\n\n"
        "async def again(problem, sample):\n    await sample.say()\n    await sample.say()\n"
    )
    for name, told in (("first", "the policy speaks first"), ("again", "heard nothing since")):
        environment = environment_of(make_task(compose_job([f"task.generate=my_lab.rude:{name}"])))
        assert environment is not None
        state = await environment.reset(make_task(compose_job([])).problem(0, 0), 0)
        with pytest.raises(ValueError, match=told):
            await environment.step(state, "x")


def test_a_buffer_hears_what_became_of_its_problems_and_goes_on_from_a_file(lab: Path) -> None:
    task, buffer = make_task(compose_job([])), make_buffer(compose_job(BUFFER))
    assert buffer is not None
    taken = [buffer.take(task, group, 0) for group in range(4)]
    for group, rewards in ((0, [1.0, 0.0]), (1, [1.0, 1.0]), (2, [0.0, 0.0]), (3, [0.0, 1.0])):
        buffer.record_rewards(taken[group], group, rewards)
    (lab / "saved.json").write_text(json.dumps(buffer.state()))
    again = make_buffer(compose_job([*BUFFER, "task.buffer_state=saved.json"]))
    assert again is not None
    for one in (buffer, again):
        assert one.take(task, 5, 0).prompt.tolist() == taken[2].prompt.tolist(), "two are kept, the oldest goes first"
        assert one.take(task, 6, 0).prompt.tolist() == task.problem(6, 0).prompt.tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["task.generate=my_lab.rewards:brief"], "cannot be called as await generate(problem, sample)"),
        ([PLAYED[0], "algorithm.advantage=remax"], "choose algorithm.advantage=rloo, or leave task.generate out"),
        (["task.generate=my_lab.plain:two"], "task.generate=my_lab.plain:two is no coroutine; write `async def`"),
        ([*PLAYED, "task.generate_options.third=1"], "task.generate_options.third is no option of my_lab.agents"),
        (["task.generate=my_lab.nope:two"], "there is no module my_lab.nope in "),
        (["algorithm.filter=my_lab.nope:keep"], "there is no module my_lab.nope in "),
        (["algorithm.filter=my_lab.buffers:Again"], "cannot be called as keep(rewards)"),
        (["algorithm.filter=variance"], "algorithm.filter=variance is unknown; choose one of none, zero_variance, or "),
        ([*FILTERED, "algorithm.options.least=1"], ".least is no option of clip or group or token_mean or my_lab"),
        (["task.buffer=my_lab.filters:middling"], "is no class; make it a frozen dataclass"),
        (["task.buffer=my_lab.k_steps:KSteps"], "lacks take, record_rewards, state, load; write what"),
        ([*BUFFER, "task.buffer_options.most=1"], "task.buffer_options.most is no option of my_lab.buffers:Again"),
        ([*BUFFER, "task.buffer_state=nope.json"], "task.buffer_state=nope.json cannot be loaded: FileNotFoundError"),
        (["task.buffer_state=nope.json"], "task.buffer_state=nope.json is of no buffer; set task.buffer, too"),
        (["eval.every=2", "eval.function=my_lab.rloo:rloo"], "eval.function=my_lab.rloo:rloo is no coroutine"),
        (["eval.every=0", "eval.function=my_lab.evaluation:agreement"], "is never called with eval.every=0; set"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line_before_anything_starts(lab: Path, arguments: list[str], said: str) -> None:
    (lab / "my_lab/plain.py").write_text("def two(problem, sample):\n    return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        config = compose_job(["backend=virtual", "cost.filtered_share=0.1", *arguments])
        plan_job(config, make_schedule(config), Machine(cores=8, gpus=0, gpu_bytes=0))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_cell_changes_with_the_code_of_every_hook(lab: Path) -> None:
    config = compose_job([*PLAYED, *FILTERED, *BUFFER, *EVALUATED])
    files = {plugin.setting: plugin.file for plugin in plugins_of(config)}
    assert set(files) == {"task.generate", "algorithm.filter", "task.buffer", "eval.function"}
    for file in files.values():
        before = cell_name(config)
        with open(file, "a", encoding="utf-8") as code:
            code.write("# another file\n")
        assert cell_name(config) != before


@pytest.mark.slow
def test_all_hooks_together_run_for_real_and_promises_are_kept(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(lab), str(ROOT)]))
    settings = " ".join((SMALL, "iterations=4", *PLAYED, *BUFFER, *EVALUATED, "algorithm.filter=my_lab.any:even"))
    (lab / "my_lab/any.py").write_text("def even(rewards, *, lengths):\n    return lengths.sum(dim=1) % 2 == 0\n")
    names = {"colocate_sync": "schedule=colocate_sync cluster.devices=1", "fully_async": "schedule=fully_async"}
    with ForkedRuns() as forked:  # which sees that path
        runs = Drivers(forked).bench_all(lab / "results", {name: f"{settings} {names[name]}" for name in names})
    for run in runs.values():
        check_run(read_finished(run))
        samples = load_samples(run).to_pydict()
        assert max(turns for turns in samples["turns"] if turns is not None) == 2
        ended = [reason == "stop" for reason in samples["finish_reason"]]  # others the task scores
        assert {one for one, stop in zip(samples["reward"], ended, strict=True) if stop} <= {0.0, 0.25, 1.0}
        assert load_ledger(run)["dropped_filtered"] > 0 and "unsolved" in json.loads((run / "buffer.json").read_text())
        assert all(0 <= found["custom"]["agreement"] <= 1 for found in load_evaluations(run))
        assert "eval/custom/agreement" in load_metrics(run)[1]
