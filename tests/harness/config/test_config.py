"""Types and ranges of settings: what is wrong is said in one line, as it was typed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError, JobConfig, job_config
from harness.config.compose import compose_job, plain
from harness.config.job import in_words_of_now
from harness.metrics.run_files import load_config
from tests.support.project import ROOT


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """A configuration that is fine, as a tree."""
    return plain(compose_job([]))


def changed(tree: dict[str, Any], setting: str, value: object) -> dict[str, Any]:
    above, _, name = setting.rpartition(".")
    return tree | ({above: tree[above] | {name: value}} if above else {name: value})


def test_a_configuration_reads_back_from_its_plain_values_with_options_of_its_schedule(tree: dict[str, Any]) -> None:
    assert plain(job_config(tree)) == tree
    assert job_config(changed(tree, "schedule.colour", "red")).schedule.options["colour"] == "red"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("iterations", "abc", "iterations=abc is no whole number"),
        ("iterations", 1.5, "iterations=1.5 is no whole number"),
        ("iterations", True, "iterations=true is no whole number"),
        ("iterations", None, "iterations=null is no whole number"),
        ("iterations", 0, "iterations=0 is too small; use at least 1"),
        ("iterations", -3, "iterations=-3 is too small"),
        ("warmup_iterations", -1, "warmup_iterations=-1 is too small; use at least 0"),
        ("max_tokens", 0, "max_tokens=0 is too small"),
        ("smoke", "maybe", "smoke=maybe is neither true nor false"),
        ("backend", "quantum", "backend=quantum is unknown; choose 'auto', 'real', 'virtual' or 'paced'"),
        ("experiment", "a/b", "experiment=a/b cannot name a folder"),
        ("experiment", "..", "experiment=.. cannot name a folder"),
        ("experiment", "", "experiment= cannot name a folder"),
        ("model.name", "../x", "model.name=../x cannot name a folder"),
        ("model.layers", 0, "model.layers=0 is too small"),
        ("model.dtype", "int8", "model.dtype=int8 is unknown; choose 'float32' or 'bfloat16'"),
        ("engine.slots", -1, "engine.slots=-1 is too small"),
        ("task.reward_processes", -1, "task.reward_processes=-1 is too small; use at least 0"),
        ("algorithm.batch_groups", 0, "algorithm.batch_groups=0 is too small"),
        ("algorithm.group_size", 1, "algorithm.group_size=1 is too small; use at least 2"),
        ("algorithm.learning_rate", -1.0, "algorithm.learning_rate=-1.0 is too small"),
        ("algorithm.learning_rate", float("nan"), "algorithm.learning_rate=NaN is not finite"),
        ("algorithm.learning_rate", "fast", "algorithm.learning_rate=fast is no number"),
        ("algorithm.temperature", 0, "algorithm.temperature=0 is too small; use a number above 0"),
        ("algorithm.top_p", 1.5, "algorithm.top_p=1.5 is too large; use at most 1"),
        ("algorithm.betas", [0.9], "algorithm.betas.1=[0.9] is incomplete"),
        ("algorithm.betas", [0.9, 1.0], "algorithm.betas.1=1.0 is too large; use a number below 1"),
        ("algorithm.correction", "magic", "algorithm.correction=magic is unknown; choose one of none, clip, dual_clip"),
        ("algorithm.rejection", {"token_x": [0, 1]}, "algorithm.rejection=token_x is unknown; choose one of token_"),
        ("algorithm.rejection", {"token_k3": 2.0}, "algorithm.rejection.token_k3=2.0 is no list of values; write one"),
        (
            "algorithm.tis_cap",
            3.0,
            "algorithm.tis_cap=3.0 is an option of its loss now; set algorithm.options.cap=3.0, with "
            "algorithm.correction=tis or tis_normalised",
        ),
        ("algorithm.lr", 1, "algorithm.lr=1 is no setting; `cadence list` shows"),
        ("cluster.devices", 0, "cluster.devices=0 is too small"),
        ("cluster.wait_timeout_s", float("inf"), "cluster.wait_timeout_s=Infinity is not finite"),
        ("cost.decode_step_s", 0, "cost.decode_step_s=0 is too small; use a number above 0"),
        ("cost.call_s", -1.0, "cost.call_s=-1.0 is too small"),
        ("cost.overlap", 1.5, "cost.overlap=1.5 is too large; use at most 1"),
        ("cost.train_s_per_token", 1.0, "cost.train_s_per_token=1.0 is no setting"),
        ("cost.kind", "magic", "cost.kind=magic is unknown; choose given or roofline"),
        ("cost", {"name": "x"}, "cost.kind=null is unknown; choose given or roofline"),
        ("cost", 5, "cost=5 is no set of settings"),
        ("device.flops", 0, "device.flops=0 is too small; use a number above 0"),
        ("model.experts", -1, "model.experts=-1 is too small; use at least 0"),
        ("cost.lengths", {"kind": "normal", "cap": 9}, "cost.lengths.kind=normal is unknown; choose 'constant', "),
        ("cost.lengths", {"kind": "constant", "cap": 9}, 'cost.lengths={"kind": "constant", "cap": 9} needs a mean'),
        ("cost.lengths", {"kind": "trace", "cap": 9}, 'cost.lengths={"kind": "trace", "cap": 9} needs either'),
        ("cluster.memory_gib", 0, "cluster.memory_gib=0 is too small"),
        ("schedule.split", 3, "schedule.split=3 is no set of settings"),
        ("schedule.split", {"rollout": True}, "schedule.split.rollout=true is no share; give a number"),
        ("schedule.split", {"rollout": 1.5}, "schedule.split.rollout=1.5 is no share; give a number"),
        ("model", 5, "model=5 is no set of settings"),
        ("seeds", 0, "seeds=0 gives no seeds; use a number >= 1"),
        ("seeds", -2, "seeds=-2 gives no seeds"),
        ("seeds", [], "seeds=[] gives no seeds"),
        ("seeds", [1, 1], "seeds=[1, 1] gives no seeds; use a number >= 1, or different numbers"),
        ("seeds", [-1], "seeds=[-1] gives no seeds"),
        ("seeds", "abc", "seeds=abc gives no seeds; use how many (seeds=3) or which (seeds=[3,4])"),
        ("seeds", True, "seeds=true gives no seeds"),
    ],
)
def test_a_wrong_value_is_named_with_what_to_use(tree: dict[str, Any], setting: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_config(changed(tree, setting, value))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_what_is_missing_or_has_braces_is_told_as_it_is(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="^iterations=.* is incomplete"):
        job_config({name: value for name, value in tree.items() if name != "iterations"})
    with pytest.raises(ConfigError, match=r"^backend=\{0\} is unknown"):
        job_config(changed(tree, "backend", "{0}"))


def test_seeds_are_how_many_or_which_and_whole_numbers_do_for_real_ones(tree: dict[str, Any]) -> None:
    def seeds(given: object) -> tuple[int, ...]:
        return job_config(changed(tree, "seeds", given)).seed_list

    assert (seeds(3), seeds([3, 4]), seeds([7])) == ((0, 1, 2), (3, 4), (7,))
    config = job_config(changed(tree, "cluster.wait_timeout_s", 30))
    assert config.cluster.wait_timeout_s == 30.0 and isinstance(config, JobConfig)


@given(
    st.sampled_from(
        ["iterations", "seeds", "smoke", "backend", "engine.slots", "algorithm.betas", "algorithm.kl_coef"]
    ),
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.lists(st.integers(-2, 2)),
)
def test_any_value_is_taken_or_told_in_one_line(tree: dict[str, Any], setting: str, value: object) -> None:
    try:
        job_config(changed(tree, setting, value))
    except ConfigError as error:
        assert str(error).startswith(setting) and "\n" not in str(error).replace(str(value), "")


@pytest.mark.parametrize(
    ("correction", "own", "options"),
    [
        ("clip", {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 3.0}, {"clip_high": 0.28}),
        ("tis", {"clip_low": 0.1, "tis_cap": 3.0, "options": {"level": "sequence"}}, {"level": "sequence", "cap": 3.0}),
        ("mis", {"mis_low": 0.1, "mis_high": 5.0}, {"low": 0.1}),
        ("decoupled", {"decoupled_cap": None}, {"cap": None}),
        ("none", {"clip_low": 0.1, "mis_low": 0.1}, {}),
    ],
)
def test_a_config_of_an_earlier_version_says_the_same_in_words_of_now(
    tree: dict[str, Any], correction: str, own: dict[str, Any], options: dict[str, Any]
) -> None:
    earlier = tree | {"algorithm": tree["algorithm"] | {"correction": correction} | own}
    read = job_config(in_words_of_now(earlier))
    assert read == job_config(tree | {"algorithm": tree["algorithm"] | {"correction": correction, "options": options}})
    assert in_words_of_now(in_words_of_now(earlier)) == in_words_of_now(earlier)


def test_every_committed_run_of_an_earlier_version_can_be_read() -> None:
    folders = [path.parent for path in (ROOT / "results").rglob("config.yaml")]
    assert folders and all(job_config(load_config(folder)) for folder in folders)
