"""Every sample of a run leads to its problem, whatever the task, and every problem to its samples; the versions of a
response are those of its tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config.compose import job_config
from harness.metrics.run_files import load_config, load_kept, load_samples
from harness.report.samples import RunSamples
from harness.tasks import Problem, Sample, Score, make_task
from tests.support.forked_drivers import Drivers
from tests.support.real_runs import FIRST_TIMEOUT_S, SEVERAL_TURNS, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

FEW = f"{SMALL} iterations=3 algorithm.batch_groups=4 algorithm.micro_batch_groups=2 algorithm.group_size=4"
ASYNC = "cluster.devices=2 schedule=fully_async schedule.max_staleness=2"
RUNS = {
    "made_up": f"{FEW} {ASYNC}",
    "filtered": f"{FEW} schedule=colocate_sync algorithm.filter=zero_variance algorithm.over_sampling=8 "
    "algorithm.filter_rounds=1000",
    "baseline": f"{FEW} schedule=separated_sync algorithm.advantage=remax",
    "turns": f"{SMALL} {SEVERAL_TURNS} {ASYNC}",
    "data": f"{FEW} {ASYNC} task=data task.held_out_share=0.2 eval.every=3 eval.samples=4 model.warm_start=false",
}


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    data = results / "words.jsonl"
    rows = [{"prompt": f"{a}{b}{c}=", "answer": f"{c}{b}{a}"} for a in "abc" for b in "defg" for c in "hij"]
    data.write_text("\n\n".join(map(json.dumps, rows)))  # a line is left empty between two rows
    of = RUNS | {"data": f"{RUNS['data']} task.data={data}"}
    made = drivers.bench_all(results / "problems", of)
    again = drivers.bench_all(
        results / "replayed", {"replayed": f"{RUNS['made_up']} replay='{made['made_up'].parent}'"}
    )
    return made | again


def problem_of(folder: Path) -> Callable[[str], tuple[str, str]]:
    """The text of prompt and answer of a row, by the file or the task alone."""
    config = job_config(load_config(folder))
    task = make_task(config)
    if config.task.name != "data":

        def made(row: str) -> tuple[str, str]:
            problem: Problem = task.problem(int(row), 0)
            return task.decode(problem.prompt), problem.answer

        return made
    lines = Path(config.task.options["data"]).read_text().splitlines()

    def read(row: str) -> tuple[str, str]:
        name, _, line = row.partition(":")
        assert name == "words.jsonl"
        found = json.loads(lines[int(line) - 1])
        return found["prompt"], found["answer"]

    return read


@pytest.mark.parametrize("name", [*RUNS, "replayed"])
def test_every_row_leads_to_its_problem_and_back(runs: dict[str, Path], name: str) -> None:
    folder = runs[name]
    samples, asked = RunSamples(folder), problem_of(folder)
    table = load_samples(folder).to_pandas()
    problems = load_kept(folder, "problems").to_pandas().set_index("group_id")
    decode = make_task(job_config(samples.config)).decode
    for row, of_row in table.groupby("row", dropna=False):
        prompt, answer = asked(row)
        for group in of_row.group_id.unique():
            assert problems.row[group] == row and problems.answer[group] == answer
            assert decode(problems.prompt[group]) == prompt
    assert set(problems.index) == set(table.group_id)
    trained = table[table.fate == "trained"]
    assert (trained.prompt_text == trained.row.map(lambda row: asked(row)[0])).all()
    assert (trained.response_text.str.len() > 0).all()
    shown = samples.chosen(8, row=trained.row.iloc[-1])
    assert shown and all(one.texts["prompt"] == asked(trained.row.iloc[-1])[0] for one in shown)


@pytest.mark.parametrize("name", [*RUNS, "replayed"])
def test_versions_of_a_response_are_those_of_its_sample(runs: dict[str, Path], name: str) -> None:
    samples = {one["sample_id"]: one for one in load_samples(runs[name]).to_pylist()}
    for response in load_kept(runs[name], "responses").to_pylist():
        sample, of = samples[response["sample_id"]], response["version_runs"]
        assert sum(run["tokens"] for run in of) == len(response["response"])
        assert [of[0]["version"], of[-1]["version"], len(of)] == [
            sample["version_first"],
            sample["version_last"],
            sample["span"],
        ]


@pytest.mark.parametrize(
    ("name", "fates"), [("filtered", {"dropped_filtered", "dropped_spare"}), ("baseline", {"dropped_baseline"})]
)
def test_what_was_not_trained_is_kept_with_its_reward(runs: dict[str, Path], name: str, fates: set[str]) -> None:
    table = load_samples(runs[name]).to_pandas()
    dropped = table[table.fate.isin(fates)]
    of = dropped[dropped.reward.notna()].set_index("sample_id")
    assert set(of.fate) == fates
    assert (dropped[dropped.reward.isna()].fate == "dropped_spare").all(), "not scored in time"
    task = make_task(job_config(load_config(runs[name])))
    said = load_kept(runs[name], "dropped_responses").to_pandas()
    assert sorted(said.sample_id) == sorted(of.index)
    for sample, tokens in zip(said.sample_id, said.response, strict=True):
        problem, stopped = task.problem(int(of.row[sample]), 0), of.finish_reason[sample] == "stop"
        text = task.decode(tokens[:-1] if stopped else tokens)
        score = task.score(Sample(task.decode(problem.prompt), text, problem.answer, stopped, len(tokens)))
        assert score == Score(of.reward[sample], of.exact_match[sample]), "it was given for these tokens"
    shown = RunSamples(runs[name]).chosen(2, dropped=True)
    assert all("token" in one.facts["versions"] and one.response for one in shown)
    if name == "filtered":
        refused = dropped[dropped.fate == "dropped_filtered"]
        assert (refused.groupby("group_id").reward.nunique() == 1).all(), "which is why"


def test_held_out_rows_lead_to_theirs(runs: dict[str, Path]) -> None:
    asked = problem_of(runs["data"])
    held_out = load_kept(runs["data"], "eval_responses").to_pandas()
    trained = set(load_samples(runs["data"]).to_pandas().row)
    for one in held_out.itertuples():
        assert (one.prompt_text, one.answer) == asked(one.row) and one.row not in trained
