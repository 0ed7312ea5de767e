import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config.registries import find
from harness.tasks import Sample, Score, Task, extra_metrics, load_tokenizer, sample_of
from harness.tasks.characters import Copy, Expand, Reverse, score_characters
from harness.tasks.task import SimulatedTask
from tests.support.text_folder import text_tokenizer

CHARACTERS = "_.= +-0123456789abcdefghijklmnop"
"""Token `i` is `CHARACTERS[i]`: what weights that exist were trained on."""
texts = st.text("abc", max_size=12)
keys = st.integers(0, 2**64 - 1)


def expanded(code: str) -> str:
    return "".join(letter * int(count) for letter, count in zip(code[::2], code[1::2], strict=True))


ORACLES = {"reverse": lambda text: text[::-1], "copy": lambda text: text, "expand": expanded}


@pytest.fixture(params=sorted(ORACLES))
def task(request: pytest.FixtureRequest) -> Task:
    return find("task", request.param)()


def test_the_shipped_tokenizer_and_templates_keep_what_is_asked(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.encode(CHARACTERS).tolist() == list(range(32)) and tokenizer.vocabulary_size == 32
    assert tokenizer.decode(np.arange(32)) == CHARACTERS
    assert (tokenizer.pad_token, tokenizer.stop_tokens) == (0, (1,))
    with pytest.raises(ValueError, match="'abZ' holds a character that the tokenizer in .*character_tokenizer lacks"):
        tokenizer.encode("abZ")
    template = "{% for m in messages if m.role == 'user' %}{{ m.text }}{% endfor %}"
    (text_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="the chat template leaves out what the user says"):
        load_tokenizer(tmp_path).chat([{"role": "user", "content": "1 + 1"}], {})


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("generation_config.json", {"eos_token_id": [2, 259]}, r"_config.json: eos_token_id=\[2, 259\]: 259 is no"),
        ("generation_config.json", {"eos_token_id": True}, "True is no token"),
        ("generation_config.json", {"eos_token_id": "<nothing>"}, "'<nothing>' is no token"),
        ("config.json", {"eos_token_id": -1}, "config.json: eos_token_id=-1: -1 is no token; ids are below 259"),
        ("config.json", {"pad_token_id": 300}, "config.json: pad_token_id: 300 is no token"),
        ("tokenizer_config.json", {"eos_token": "<nothing>"}, "eos_token='<nothing>' is no token of its own"),
        ("tokenizer.json", {"model": None}, "tokenizer.json is no tokenizer"),
    ],
)
def test_a_folder_names_ends_and_padding(file: str, settings: dict[str, object], said: str, tmp_path: Path) -> None:
    text_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["<|im_end|>", 0], "pad_token_id": -1}')
    (tmp_path / "config.json").write_text('{"vocab_size": 258}')
    assert load_tokenizer(tmp_path).stop_tokens == (2, 0)
    told = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(told | settings))
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=said):
        load_tokenizer(tmp_path)


def test_answers_are_right_earn_everything_and_end_in_the_stop_token(task: Task) -> None:
    for group in range(300):
        problem = task.problem(group, seed=1)
        prompt = task.decode(problem.prompt)
        assert prompt.endswith("=") and problem.answer == ORACLES[task.name](prompt[:-1])
        assert not set("._") & set(prompt + problem.answer)
        assert task.decode(task.demonstration(problem)) == problem.answer + "."
    problem = task.problem(3, 4)
    sample = sample_of(task, problem.prompt, task.demonstration(problem), problem.answer)
    assert (sample.response, sample.stopped, sample.tokens) == (problem.answer, True, len(problem.answer) + 1)
    assert score_characters(sample) == Score(1.0, True)


def test_problems_follow_from_seed_and_group_within_their_lengths(task: Task) -> None:
    problems = [task.problem(group, seed=2) for group in range(2000)]
    assert max(len(problem.prompt) for problem in problems) <= task.max_prompt_tokens
    assert max(len(task.demonstration(problem)) for problem in problems) <= task.max_response_tokens

    def prompts(groups: range, seed: int) -> list[str]:
        return [task.decode(task.problem(group, seed).prompt) for group in groups]

    assert prompts(range(50), 0) != prompts(range(50), 1)
    assert prompts(range(50), 0) != prompts(range(50, 100), 0)
    assert len(set(prompts(range(50), 0))) > 20
    held_out = [task.decode(task.held_out(index).prompt) for index in range(50)]
    assert held_out == [task.decode(task.held_out(index).prompt) for index in range(50)]
    assert held_out != [task.decode(task.problem(index, 0).prompt) for index in range(50)]


@given(group=keys, seed=keys)
def test_a_problem_follows_from_seed_and_group_alone(group: int, seed: int) -> None:
    first, again = Reverse().problem(group, seed), Reverse().problem(group, seed)
    assert first.prompt.dtype == np.int64
    assert np.array_equal(first.prompt, again.prompt) and first.answer == again.answer


@given(response=texts, answer=texts, stopped=st.booleans())
def test_rewards_lie_in_the_unit_interval_and_only_equality_is_exact(response: str, answer: str, stopped: bool) -> None:
    score = score_characters(Sample("", response, answer, stopped, 0))
    equal = stopped and response == answer
    assert score.exact_match is equal
    assert score.reward == 1.0 if equal else 0.0 <= score.reward < 0.5


@pytest.mark.parametrize(
    ("response", "partial"),
    [("abc", 3 / 4), ("abcd", 3 / 4), ("ab.", 2 / 4), ("abd.", 3 / 4), ("abcd.", 3 / 5), ("", 0.0), ("bca.", 1 / 4)],
)
def test_partial_credit_is_the_share_of_places_that_agree(response: str, partial: float) -> None:
    task = Reverse()
    score = score_characters(sample_of(task, task.encode("cba="), task.encode(response), "abc"))
    assert not score.exact_match
    assert score.reward == pytest.approx(0.5 * partial)


def test_copy_and_expand_have_a_long_tail_and_reverse_has_none() -> None:
    def tail(task: Task) -> float:
        lengths = [1 + len(task.problem(group, 0).answer) for group in range(3000)]
        return float(np.percentile(lengths, 99) / np.median(lengths))

    assert tail(Reverse()) < 1.5
    assert tail(Copy()) > 2.5
    assert tail(Expand()) > 2.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reverse", {"min_letters": 5, "max_letters": 4}, "min_letters=5, max_letters=4"),
        ("copy", {"max_letters": 17}, "max_letters=17"),
        ("copy", {"mean_letters": 0.5}, "mean_letters=0.5"),
        ("expand", {"max_runs": 0}, "max_runs=0"),
    ],
)
def test_impossible_options_are_refused_with_their_value(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find("task", name)(**options)


@pytest.mark.parametrize("names", [("Caps",), ("a b",), ("",), ("../x",), ("x//y",), ("x", "x")])
def test_extra_values_have_names_that_a_metric_can_have(names: tuple[str, ...]) -> None:
    task = Reverse()
    object.__setattr__(task, "extra_metrics", names)
    with pytest.raises(ValueError, match="extra_metrics"):
        extra_metrics(task)
    assert extra_metrics(Reverse()) == ()


def test_a_simulated_task_is_a_task() -> None:
    task = SimulatedTask(prompt_tokens=512, max_response_tokens=100)
    _: Task = task
    problem = task.problem(3, seed=0)
    assert (problem.prompt.tolist(), problem.prompt.dtype, problem.answer) == ([512], np.int64, "")
    assert task.max_prompt_tokens == 512
    assert task.score(sample_of(task, problem.prompt, np.array([4, 5]), problem.answer)) == Score(0.0, False)
    assert task.decode(np.array([4, 5])) == "<9 tokens>"
    with pytest.raises(ValueError, match="a simulated task has no text"):
        task.encode("abc")
