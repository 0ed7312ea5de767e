"""From overrides to a configuration: choices, settings, options, and the name of a cell."""

from pathlib import Path

import pytest

from harness.config import ConfigError, CostConfig, compose
from harness.config.compose import cell_name, choices, compose_job, given_by, make_schedule, plain, read_job
from harness.config.files import read_yaml, yaml_text
from harness.config.registries import ENGINES, REGISTRIES, TRAINING_ENGINES, check_name, find
from schedules.fully_async import FullyAsync


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_schedule(compose_job(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_the_main_job_which_choices_and_settings_change() -> None:
    config = compose_job([])
    assert (config.schedule.name, config.model.name, config.task.name) == ("fully_async", "tiny", "reverse")
    assert (config.iterations, config.seed_list) == (120, (0,))
    assert make_schedule(config) == FullyAsync(max_staleness=2.0, pause="keep")
    config = compose_job("schedule.max_staleness=0.5 task=expand iterations=3 seeds=[3,4] engine.slots=32".split())
    assert make_schedule(config) == FullyAsync(max_staleness=0.5)
    assert (config.task.name, config.iterations, config.seeds, config.engine.slots) == ("expand", 3, (3, 4), 32)


@pytest.mark.parametrize("model", choices("model"))
def test_every_model_composes(model: str) -> None:
    assert compose_job([f"model={model}"]).model.name == model


@pytest.mark.parametrize("group", compose.GROUPS)
def test_an_unknown_choice_names_those_that_there_are(group: str) -> None:
    places = ", or a folder with a config.json, or hf:<org>/<name>" if group == "model" else ""
    assert refused(f"{group}=nope") == f"{group}=nope is unknown; choose one of {', '.join(choices(group))}{places}"


@pytest.mark.parametrize("override", ["schedule=", "schedule=../bench", "schedule=[fully_async]", "~schedule"])
def test_what_is_no_choice_is_refused(override: str) -> None:
    assert refused(override).endswith(f"is unknown; choose one of {', '.join(choices('schedule'))}")


def test_an_unknown_setting_names_those_beside_it_also_where_it_is_forced() -> None:
    assert refused("schedule.nonsense=1") == (
        "schedule.nonsense is no setting; those of schedule=fully_async are max_staleness, name, on_stale, "
        "order, pause, publish_every, split"
    )
    assert refused("algorithm.lr=1").startswith("algorithm.lr is no setting; those of algorithm are advantage, aggr")
    assert refused("foo.bar=2").startswith("foo.bar is no setting; those of a job are algorithm, backend, checkpoint")
    assert refused("~model.colour").startswith("model.colour is no setting; those of model are checkpoint")
    assert refused("schedule=colocate_sync", "schedule.max_staleness=1") == (
        "schedule.max_staleness is no setting; those of schedule=colocate_sync are name, split"
    )
    assert refused("+schedule.nonsense=1") == (
        "schedule.nonsense is no option of fully_async; it has max_staleness, pause, order, on_stale, publish_every"
    )
    assert refused("schedule=colocate_sync", "+schedule.pause=keep").endswith("of colocate_sync; it has none")
    assert refused("+algorithm.lr=1").startswith("algorithm.lr=1 is no setting")
    assert refused("x" * 300 + "=1").startswith("x" * 40 + "... is no setting")
    nested = refused("engine.name=${oc.env:" + "[" * 500 + "]" * 500 + "}")
    assert nested == "engine.name is nested deeper than 32 levels; no setting is"
    assert refused("hydra/launcher=x").startswith("hydra/launcher=x is no setting of a job")
    assert refused("hydra.run.dir=x").startswith("hydra.run.dir=x is no setting of a job")
    assert refused("~papers=1").startswith("papers is no setting; those of a job are"), "a folder of choices to Hydra"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("many", "schedule.max_staleness=many is no number"),
        ("null", "schedule.max_staleness=null is no number"),
        ("-1", "schedule.max_staleness=-1.0 is out of bounds; use 0 to 1000000"),
        ("nan", "schedule.max_staleness=nan is out of bounds"),
        ("inf", "schedule.max_staleness=inf is out of bounds"),
    ],
)
def test_an_option_of_a_schedule_is_checked_by_its_class(value: str, said: str) -> None:
    assert refused(f"schedule.max_staleness={value}").startswith(said)


@pytest.mark.parametrize("override", ["iterations", "=5", "iterations=[1", "iterations=5=6", "--help", "", "+=1"])
def test_what_is_no_override_is_refused_as_it_was_typed(override: str) -> None:
    assert refused(override) == f"{override} cannot be read; write setting=value, such as iterations=20"


@pytest.mark.parametrize("cost", choices("cost"))
def test_every_set_of_costs_composes(cost: str) -> None:
    assert compose_job([f"cost={cost}"]).cost.name == cost


def test_a_cell_is_named_by_what_decides_its_numbers_as_ever() -> None:
    name = cell_name(compose_job([]))
    assert name.startswith("fully_async-tiny-reverse-")
    for same in (["seeds=5"], ["experiment=other"], ["force=true"], ["save_weights=false"], ["schedule=fully_async"]):
        assert cell_name(compose_job(same)) == name
    others = (["schedule.max_staleness=1"], ["iterations=3"], ["algorithm.learning_rate=0.1"], ["task=copy"])
    assert len({name, *(cell_name(compose_job(other)) for other in others)}) == 5
    plainly, by_hand, other = (
        compose_job(["schedule=fully_async", *settings])
        for settings in ([], ["schedule.publish_every=1"], ["schedule.publish_every=2"])
    )
    assert [plain(job)["schedule"]["publish_every"] for job in (plainly, other)] == [1, 2]
    assert cell_name(plainly) == cell_name(by_hand) != cell_name(other)


# -- a group's choice by a file


def test_a_choice_may_be_a_file_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        (compose.EXPERIMENTS / "cost" / "tiny_cpu.yaml").read_text().replace("name: tiny_cpu", "name: mine")
    )

    config = compose_job([f"cost={mine}", "cost.call_s=0.5", "cost.lengths.mean=7.0"])

    assert isinstance(config.cost, CostConfig)
    assert (config.cost.name, config.cost.call_s, config.cost.lengths.mean) == ("mine", 0.5, 7.0)
    mine.write_text(mine.read_text().replace("\ncall_s: 0.0042", "\ncall_s: 0.25"))
    assert compose_job([f"cost={mine}"]).cost.call_s == 0.25, "the file is read anew"
    mine = tmp_path / "none.yaml"
    assert refused(f"cost={mine}") == f"{mine} is no file; `cadence list` shows the choices that have names"
    mine.write_text("name: [")
    assert refused(f"cost={mine}").startswith(f"{mine} cannot be read as YAML")
    mine.write_text("- 1\n")
    assert "holds no settings" in refused(f"cost={mine}")
    mine.write_text("name: mine\nkind: given\n")
    assert refused(f"cost={mine}").startswith("cost.decode_step_s")


def test_options_that_are_others_to_name_may_be_given_and_a_wrong_one_is_refused_where_a_value_has_yet_to_be() -> None:
    asked = ["task=reasoning_gym", "task.dataset=chain_sum"]
    given = compose_job([*asked, "task.settings={min_terms:2}", "task.settings.max_terms=3"]).task.options
    assert given["settings"] == {"min_terms": 2, "max_terms": 3}
    with pytest.raises(ConfigError, match=r"task.nosuch is no setting; those of task are chat_options, dataset, "):
        compose_job([*asked, "task.nosuch=1"])


# -- a run again, from its config.yaml


def written(folder: Path, *settings: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml_text(plain(compose_job(settings))), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule=pipeline_k", "algorithm=ppo", "seeds=[3,4]", "algorithm.rejection={token_k1:[null,2.0]}"],
        ["task=data", "task.data=a.jsonl", "cost=tiny_cpu", "model=qwen7b", "eval.every=0", "algorithm.options.cap=3"],
        ["schedule=schedules.k_step_off:KStepOff", "schedule.k=4", "experiment=mine"],
    ],
)
def test_a_run_is_the_same_job_again_from_its_file(settings: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, *settings, "force=true")
    assert compose_job([f"config={path}"]) == compose_job(settings), "whether to run it again is another question"
    assert given_by([f"config={path}"]) >= {"schedule.split.actor", "iterations"}, "nothing is planned anew"


def test_a_text_of_a_runs_file_is_itself_and_not_what_it_would_stand_for(tmp_path: Path) -> None:
    for text in ("${oc.env:HOME}", r"a\${x} ${", "$HOME"):
        settings = plain(compose_job([]))
        settings["task"]["data"] = text
        (path := tmp_path / "config.yaml").write_text(yaml_text(settings), encoding="utf-8")
        assert plain(compose_job([f"config={path}"]))["task"]["data"] == text


def test_any_setting_may_be_given_on_top_of_a_runs_file(tmp_path: Path) -> None:
    path = written(tmp_path, "schedule=k_step_off", "schedule.k=5", "iterations=7", "engine.slots=3")
    same = compose_job([f"config={path}", "iterations=9", "schedule.k=2"])
    assert (same.iterations, same.engine.slots, same.schedule.options) == (9, 3, {"k": 2})
    other = compose_job([f"config={path}", "schedule=half_step"])
    assert (other.iterations, other.schedule) == (7, compose_job(["schedule=half_step"]).schedule)
    assert "schedule.split.actor" not in given_by([f"config={path}", "schedule=half_step"])
    assert refused(f"config={path}", "schedule.nosuch=1").endswith("those of schedule=k_step_off are k, name, split")


def test_what_a_file_of_another_version_names_and_no_setting_is_is_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "schedule=colocate_sync")
    text = path.read_text().replace("cluster:", "cluster:\n  actors: 3").replace("algorithm:", "algorithm:\n  lr: 1")
    path.write_text(text + "colour: red\n")
    assert refused(f"config={path}") == (
        f"{path}: algorithm.lr, cluster.actors, colour are no settings; take them out (`cadence list` shows the files "
        "that name all)"
    )
    path.write_text("iterations: 3\n")
    assert refused(f"config={path}").startswith(f"{path} lacks experiment, backend, seeds, ")
    assert refused(f"config={tmp_path / 'none.yaml'}").startswith(f"{tmp_path / 'none.yaml'} is no file")


def test_what_is_committed_or_built_in_is_accepted() -> None:
    for path in (compose.EXPERIMENTS.parent / "results").rglob("config.yaml"):
        assert cell_name(compose_job([f"config={path}"])) == cell_name(read_job(path))
    for setting in ("correction", "advantage", "aggregation", "kl", "filter"):
        for name in REGISTRIES[f"algorithm.{setting}"]:
            assert (f"algorithm.{setting}", name) in compose_job([f"algorithm.{setting}={name}"]).named
    schedule = plain(compose_job([]))["schedule"]
    assert schedule["max_staleness"] == 2 and schedule["name"] == "fully_async" and "options" not in schedule
    assert refused("+schedule=fully_async").startswith("+schedule=fully_async cannot be read; a group has one choice")
    assert refused("iterations=${nowhere}").startswith("iterations: Interpolation key 'nowhere' not found")
    assert "iterations=1,2" in refused("iterations=1,2")


WORDS = ("1e5", "010", "yes", "2026-01-01", "", "null", "1:30", "a: b", "x\ny", "${x}", "日本", "w" * 200, "\x1b[1m")


def test_what_is_written_is_read_again_and_as_hydra_reads_it(tmp_path: Path) -> None:
    shared = [1, 1e-7, None, True]
    settings = plain(compose_job([])) | {word: [word, shared, {}, float("inf")] for word in WORDS}
    (tmp_path / "a.yaml").write_text(yaml_text(settings), encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml") == settings
    # So that a file that is a choice's own is the same job by its path.
    for text, value in {"1e5": 1e5, "-1E-7": -1e-7, "989.4e12": 989.4e12, "2026-01-01": "2026-01-01"}.items():
        (tmp_path / "a.yaml").write_text(f"a: {text}")
        assert read_yaml(tmp_path / "a.yaml") == {"a": value}
    by_path = compose_job([f"device={compose.EXPERIMENTS / 'device' / 'h100.yaml'}"])
    assert by_path == compose_job(["device=h100"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b:\n  a: 1\n  a: 2", "line 3: it has a more than once"),
        ("a: 1\n~: 1", "line 2: it has a value without a name"),
        ("a: 1\nb: c: 1", "line 2: mapping values are not allowed"),
        ("a: 1\nb: !!int 1", r"line 2: it has a tag"),
    ],
)
def test_what_would_be_lost_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_yaml(tmp_path / "a.yaml")


WITH_EXTRAS = {*ENGINES, *TRAINING_ENGINES} - {"torch"}
LOADED = [(setting, name) for setting, names in REGISTRIES.items() for name in names if name not in WITH_EXTRAS]


@pytest.mark.parametrize(("setting", "name"), LOADED)
def test_every_name_stands_for_code_that_can_be_called(setting: str, name: str) -> None:
    assert callable(find(setting, name))


@pytest.mark.parametrize("setting", REGISTRIES)
def test_a_name_of_nothing_is_refused_with_those_that_there_are(setting: str) -> None:
    given = {"algorithm.shaping": "algorithm.shaping=[nope]", "algorithm.rejection": "algorithm.rejection.nope=[0,1]"}
    typed = {"schedule": "schedule.name", "engine": "engine.name", "task": "task.name"}.get(setting, setting)
    with pytest.raises(ConfigError) as refused:
        if setting == "schedule.transport":  # which a schedule's class names
            check_name(setting, "nope")
        make_schedule(compose_job(["schedule=fully_async", given.get(setting, f"{typed}=nope")]))
    choices = ", ".join(REGISTRIES[setting])
    assert str(refused.value).startswith(f"{setting}=nope is unknown; choose one of {choices}, or `package.module:N")
