"""Code of a user's own, by import path: what docs/plugins.md shows runs, and what cannot is one line before it does."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.checks.job import plan_job
from harness.cli import main as cli
from harness.comparison.fairness import fairness_key
from harness.comparison.promises import read_finished
from harness.config import ConfigError, job_config
from harness.config.compose import cell_name, compose_job, make_schedule, plain, plugins_of
from harness.config.machine import Machine
from harness.metrics.run_files import load_evaluations, load_ledger, load_manifest, load_metrics, load_samples
from harness.report import plots
from harness.rl.advantages import advantages_of, needs_whole_batch
from harness.rl.losses import policy_loss
from harness.rl.rejection import rejection_of
from harness.rl.shaping import shaping_of
from harness.tasks import Sample, Score, environment_of, make_buffer, make_task, score_of
from harness.workers.stages import columns_compared
from schedules.k_step_off import KStepOff
from tests.support.fake_job import FakeJob
from tests.support.invariants import check_run
from tests.support.project import ROOT

MACHINE = Machine(cores=8, gpus=0, gpu_bytes=0)
SCHEDULE = "schedule=my_lab.k_steps:KSteps"
REWARD = ("task.reward=my_lab.rewards:brief", "task.reward_options.price=0.02")
PARTS = ("algorithm.advantage=gdpo", "algorithm.options.parts.form=1.0")
LOSS = ("algorithm.correction=my_lab.losses:cispo", "algorithm.options.high=3", "algorithm.advantage=my_lab.rloo:rloo")
ORDER = "schedule.order=my_lab.orders:NewestFirst"
PLAYED = ("task.generate=my_lab.agents:two_tries", "task.generate_options.second=0.25")
FILTERED = ("algorithm.filter=my_lab.filters:middling", "algorithm.options.most=0.8")
BUFFER = ("task.buffer=my_lab.buffers:Again", "task.buffer_options.kept=2")
EVALUATED = ("eval.every=2", "eval.function=my_lab.evaluation:agreement")
GROUPS = ("algorithm.batch_groups=4", "algorithm.group_size=2", "algorithm.micro_batch_groups=2")
SMALL = ("iterations=4", "warmup_iterations=1", *GROUPS)


def door(*arguments: str) -> None:
    """As `bench` checks a job."""
    config = compose_job([*arguments, *SMALL])
    plan_job(config, make_schedule(config), MACHINE)


# -- what is there


def test_a_schedule_of_ones_own_needs_no_file_and_decides_its_split(lab: Path) -> None:
    config = compose_job([SCHEDULE, "schedule.k=3"])
    assert config.schedule.options == {"k": 3}
    assert config.schedule.split == {"rollout": "50%", "actor": "rest", "actor_fwd": "actor", "reference": "actor"}
    schedule = make_schedule(config)
    assert (type(schedule).__name__, schedule.eta, schedule.order, schedule.colocated) == ("KSteps", 5, "fifo", False)
    assert job_config(plain(config)) == config
    code, shared = (lab / "my_lab/k_steps.py").read_text(), 'transport = "local"; colocated = True'
    (lab / "my_lab/shared.py").write_text(code.replace('transport = "collective"', shared))
    config = compose_job(["schedule=my_lab.shared:KSteps"])
    assert config.schedule.split["rollout"] == "actor"
    plan_job(config, make_schedule(config), MACHINE)


async def test_a_reward_of_ones_own_scores_instead_of_the_task_may_be_waited_for_and_is_finite(lab: Path) -> None:
    own, task = make_task(compose_job(REWARD)), make_task(compose_job([]))
    right, short = (Sample("abc=", said, "cba", True, 1 + len(said)) for said in ("cba", "c"))
    assert await score_of(own, right) == Score(1.0 - 0.02 * 4, True)
    assert await score_of(own, short) == Score(-0.02 * 2, False)
    assert (own.name, own.max_prompt_tokens) == (task.name, task.max_prompt_tokens)
    (lab / "my_lab/slow.py").write_text("async def reward(sample):\n    return 0.25\n")
    task = make_task(compose_job(["task.reward=my_lab.slow:reward"]))
    assert await score_of(task, Sample("abc=", "cba", "cba", True, 4)) == Score(0.25, True)
    (lab / "my_lab/bad.py").write_text("def reward(sample):\n    return float('nan')\n")
    task = make_task(compose_job(["task.reward=my_lab.bad:reward"]))
    with pytest.raises(ValueError, match=r"the reward is nan; return a number that is finite in float32$"):
        await score_of(task, Sample("abc=", "cba", "cba", True, 4))


def test_a_loss_and_advantages_of_ones_own_get_their_options_and_whole_batches(lab: Path) -> None:
    algorithm = compose_job(LOSS).algorithm
    log_probs, behaviour = torch.tensor([[-0.1, -0.5, -9.0]]), torch.tensor([[-2.1, -0.5, torch.nan]])
    mask = torch.tensor([[True, True, False]])
    loss = policy_loss(algorithm)(log_probs, behaviour, torch.ones(1, 3), mask)
    assert torch.allclose(loss, torch.tensor([[3 * 0.1, 0.5, 0.0]])), "high=3, and nothing off the mask"
    rewards = torch.tensor([[1.0, 0.0, 0.0]])
    assert torch.allclose(advantages_of(algorithm)(rewards), torch.tensor([[1.0, -0.5, -0.5]]))
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    names = ("my_lab.rloo:rloo", "rloo")
    own, built_in = (advantages_of(compose_job([f"algorithm.advantage={name}"]).algorithm) for name in names)
    torch.testing.assert_close(own(rewards), built_in(rewards))
    path = "my_lab.rloo:over_the_batch"
    settings = (f"algorithm.advantage={path}", "algorithm.options.weight=2.0")
    algorithm = compose_job(settings).algorithm
    assert needs_whole_batch(algorithm) and columns_compared(algorithm) == ("loss_mask",)
    advantages = advantages_of(algorithm)(torch.tensor([[1.0, 0.0]]), torch.tensor([[1, 3]]))
    assert advantages.tolist() == [[1.5, -0.5]]
    with pytest.raises(ConfigError, match=f"algorithm.advantage={path} compares all rewards of a batch"):
        door(*settings, "schedule=fully_async", "schedule.order=completion")


def test_shaping_and_rejection_of_ones_own_stand_in_a_file_of_settings(lab: Path) -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    shown = page.partition("# my.yaml")[2].partition("\n")[2].partition("```")[0]
    theirs = (ROOT / "experiments/algorithm/grpo.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    rest = [line for line in theirs if line.partition(":")[0] not in ("shaping", "rejection", "options")]
    (lab / "my.yaml").write_text("".join(rest) + shown, encoding="utf-8")
    door("algorithm=my.yaml")
    algorithm = compose_job(["algorithm=my.yaml"]).algorithm
    shaping, rejection = shaping_of(algorithm, longest=4), rejection_of(algorithm)
    assert shaping is not None and rejection is not None
    assert shaping(torch.tensor([[1.0, 4.0]]), torch.tensor([[4, 2]])).tolist() == [[0.75, 1.0]]
    kept = rejection(torch.tensor([0.0, -2.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.tensor([2]))
    assert kept.tolist() == [True, False]


def test_a_task_of_ones_own_takes_its_fields_as_settings(lab: Path) -> None:
    (lab / "my_lab/tasks.py").write_text(
        "from dataclasses import dataclass\nfrom harness.tasks.characters import Copy\n\n\n"
        "@dataclass(frozen=True)\nclass Short(Copy):\n    name: str = 'short'\n    max_letters: int = 6\n"
    )
    config = compose_job(["task=my_lab.tasks:Short", "task.max_letters=5", "task.mean_letters=3"])
    assert make_task(config).max_prompt_tokens == 6
    assert plain(config)["task"]["max_letters"] == 5
    with pytest.raises(ConfigError, match=r"^task=my_lab.tasks:Short: copy needs"):
        make_task(compose_job(["task=my_lab.tasks:Short", "task.max_letters=99"]))


# -- what is written down


def test_a_cell_is_named_after_the_code_and_changes_with_it_and_so_does_what_may_be_compared(lab: Path) -> None:
    before = cell_name(compose_job([SCHEDULE]))
    assert before.startswith("my_lab.k_steps.KSteps-tiny-reverse-")
    assert before == cell_name(compose_job([SCHEDULE]))
    with (lab / "my_lab/k_steps.py").open("a") as file:
        file.write("# another file\n")
    assert cell_name(compose_job([SCHEDULE])) != before
    with_own, without = (fairness_key(plain(compose_job(given)), (0,)) for given in (REWARD, ()))
    assert with_own["task.reward"] == "my_lab.rewards:brief" and without["task.reward"] is None


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["schedule=my_lab.k_steps:Nope"], "my_lab.k_steps has no Nope; it defines KSteps"),
        (["schedule=my_lab.nope:KSteps"], "there is no module my_lab.nope in "),
        (["schedule=no_lab:KSteps"], "there is no module no_lab in "),
        (["schedule=my_lab.broken:KSteps"], "my_lab.broken fails to import: ZeroDivisionError: division by zero"),
        (["schedule=my lab:KSteps"], "schedule=my lab:KSteps is no import path; write `package.module:Name`"),
        (["schedule=my_lab.losses:cispo"], "is no schedule; make it a frozen dataclass that extends"),
        (["schedule=my_lab.odd:NoTransport"], "transport=None is unknown; choose one of collective, ipc, "),
        (["schedule=my_lab.odd:Ipc", "cluster.delta_weights=true"], "transport=ipc brings whole buckets (by ipc "),
        (["schedule=my_lab.odd:NoEta"], "leaves out eta; write it, a field with a default"),
        (["schedule=my_lab.odd:Abstract"], "leaves out eta, run"),
        ([SCHEDULE, "schedule.k=0"], "schedule.k=0 is out of bounds; use 1 or more"),
        ([SCHEDULE, "schedule.k=two"], "schedule.k=two is no whole number"),
        ([SCHEDULE, "schedule.q=1"], f"schedule.q is no setting; those of {SCHEDULE} are k, name, split"),
        (["task.reward=my_lab.losses:cispo"], "cannot be called as reward(sample)"),
        ([*REWARD, "task.reward_options.cost=1"], "task.reward_options.cost is no option of my_lab.rewards:brief"),
        ([REWARD[0], "task.reward_options.price=high"], "task.reward_options.price=high is no number"),
        (["algorithm.correction=my_lab.rewards:brief"], "cannot be called as loss("),
        (["algorithm.advantage=my_lab.losses:cispo"], "cannot be called as advantages(rewards)"),
        ([*LOSS, "algorithm.options.low=1"], "algorithm.options.low is no option of my_lab.losses:cispo or my_lab"),
        (["algorithm.options.low=1"], "algorithm.options.low is no option of clip or group or token_mean;"),
        ([*PARTS], "algorithm.options.parts names form; scores here have no parts; declare"),
        ([PARTS[0]], "algorithm.options.parts has no value"),
        (["algorithm.advantage=mean"], "algorithm.advantage=mean is unknown; choose one of group, dr_grpo, "),
        (["schedule.order=my_lab.losses:cispo"], "schedule.order=my_lab.losses:cispo lacks "),
        (["schedule.order=lifo"], "schedule.order=lifo is unknown; choose one of fifo, completion, or "),
        (["task=my_lab.losses:cispo"], "is no class; make it a frozen dataclass"),
        (["task=my_lab.k_steps:KSteps"], "lacks name, vocabulary_size"),
        (["engine=my_lab.losses:cispo"], "engine=my_lab.losses:cispo lacks "),
        (["model=my_lab.models:Mine"], "model=my_lab.models:Mine is unknown; choose one of"),
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
    (lab / "my_lab/broken.py").write_text("1 / 0\n")
    (lab / "my_lab/plain.py").write_text("def two(problem, sample):\n    return 1.0\n")
    (lab / "my_lab/odd.py").write_text(
        "from dataclasses import dataclass\nfrom schedules import Schedule\n\n\n"
        "@dataclass(frozen=True)\nclass NoTransport(Schedule):\n    eta = 0.0\n\n"
        "    async def run(self, job): ...\n\n\n"
        "@dataclass(frozen=True)\nclass Ipc(NoTransport):\n    transport = 'ipc'\n\n\n"
        "@dataclass(frozen=True)\nclass NoEta(Schedule):\n    transport = 'ipc'\n    eta: float\n\n"
        "    async def run(self, job): ...\n\n\n"
        "@dataclass(frozen=True)\nclass Abstract(Schedule):\n    transport = 'ipc'\n"
    )
    with pytest.raises(ConfigError) as caught:
        door("backend=virtual", "cost.filtered_share=0.1", *arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# -- whole runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::sqlalchemy", "ignore:::mlflow", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_runs_on_the_virtual_clock(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RESULTS", lab / "results")
    monkeypatch.setattr(plots, "draw_run", lambda run: [])
    for name, settings in {"a_schedule": (SCHEDULE, "schedule.k=3"), "an_order": (ORDER,)}.items():
        simulated = (f"experiment={name}", "backend=virtual", "cluster.devices=4", "cost=tiny_cpu")
        assert cli.main(["bench", *settings, *SMALL, *simulated]) == 0
        (done,) = (lab / "results").glob(f"{name}/*/seed=0/DONE")
        plugins = load_manifest(done.parent)["plugins"]
        assert [plugin["path"] for plugin in plugins] == [s.partition("=")[2] for s in settings if ":" in s]
        for plugin in plugins:
            assert plugin["sha256"] == hashlib.sha256(Path(plugin["file"]).read_bytes()).hexdigest()
        check_run(read_finished(done.parent))


@pytest.mark.slow
def test_all_of_it_runs_for_real_and_workers_find_it(lab: Path) -> None:
    (lab / "my_lab/any.py").write_text("def even(rewards, *, lengths):\n    return lengths.sum(dim=1) % 2 == 0\n")
    hooks = (*PLAYED, *BUFFER, *EVALUATED, "algorithm.filter=my_lab.any:even", "save_weights=false")
    settings = (SCHEDULE, *LOSS, "iterations=4", "warmup_iterations=1", *hooks)  # groups enough to refuse some
    settings += ("cluster.oversubscribe=true", "model.warm_start=false")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "bench", *settings],
        cwd=lab,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CADENCE_RESULTS": str(lab / "results")},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (marker,) = lab.glob("results/bench/*/seed=0/DONE")
    run = marker.parent
    check_run(read_finished(run))
    rewards = [line["reward/mean"] for line in load_metrics(run)]
    assert all(np.isfinite(rewards)) and min(rewards) < 0.9
    samples = load_samples(run).to_pydict()
    assert max(turns for turns in samples["turns"] if turns is not None) == 2
    ended = [reason == "stop" for reason in samples["finish_reason"]]  # others the task scores
    assert {one for one, stop in zip(samples["reward"], ended, strict=True) if stop} <= {0.0, 0.25, 1.0}
    assert load_ledger(run)["dropped_filtered"] > 0 and "unsolved" in json.loads((run / "buffer.json").read_text())
    assert all(0 <= found["custom"]["agreement"] <= 1 for found in load_evaluations(run))
    assert "eval/custom/agreement" in load_metrics(run)[1]


# -- docs/tutorial.md: its schedule


async def test_the_schedule_on_the_page_calls_as_the_built_in_one(lab: Path) -> None:
    own = make_schedule(compose_job(["schedule=my_lab.k_steps:KSteps", "schedule.k=3"]))
    built_in = KStepOff(k=3)
    assert [own.lag_bounds(i) for i in range(9)] == [built_in.lag_bounds(i) for i in range(9)]
    assert (own.eta, own.cycle) == (built_in.eta, built_in.cycle)
    assert (await FakeJob(iterations=7).play(own)).lines == (await FakeJob(iterations=7).play(built_in)).lines


@pytest.mark.slow
def test_a_schedule_of_ones_own_is_held_to_what_every_schedule_promises(lab: Path) -> None:
    """That it is asked: whole runs are those of k_step_off, as which it calls."""
    asked = ["tests/schedules/test_every_schedule.py", "--schedule", SCHEDULE.partition("=")[2], "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, "-k", "not promised and not leave", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(lab)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-8000:]


# -- hooks: what plays samples, filters, deals problems and evaluates


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


def test_a_cell_changes_with_the_code_of_every_hook(lab: Path) -> None:
    config = compose_job([*PLAYED, *FILTERED, *BUFFER, *EVALUATED])
    files = {plugin.setting: plugin.file for plugin in plugins_of(config)}
    assert set(files) == {"task.generate", "algorithm.filter", "task.buffer", "eval.function"}
    for file in files.values():
        before = cell_name(config)
        with open(file, "a", encoding="utf-8") as code:
            code.write("# another file\n")
        assert cell_name(config) != before
