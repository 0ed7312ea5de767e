import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tasks import TASKS, Task, extra_metrics
from harness.tasks.characters import CHARACTERS, PAD, STOP, Copy, Expand, Jsonl, Reverse, decode, encode, score_tokens
from harness.tasks.task import SimulatedTask

tokens = st.lists(st.integers(0, 31), min_size=1, max_size=12).map(lambda row: np.array(row, dtype=np.int64))
keys = st.integers(0, 2**64 - 1)


def expanded(code: str) -> str:
    return "".join(letter * int(count) for letter, count in zip(code[::2], code[1::2], strict=True))


ORACLES = {"reverse": lambda text: text[::-1], "copy": lambda text: text, "expand": expanded}


@pytest.fixture(params=sorted(ORACLES))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]()


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_vocabulary_has_32_different_characters() -> None:
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 32
    assert PAD != STOP


def test_text_survives_encoding_and_decoding() -> None:
    assert decode(encode(CHARACTERS)) == CHARACTERS
    assert encode("abc=").dtype == np.int64


def test_a_foreign_character_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match="'Z' at place 2"):
        encode("abZ")


def test_answers_are_right_and_end_in_the_stop_token(task: Task) -> None:
    for group in range(300):
        problem = task.problem(group, seed=1)
        prompt, answer = task.decode(problem.prompt), task.decode(problem.answer)
        assert prompt.endswith("=") and answer.endswith(".")
        assert answer[:-1] == ORACLES[task.name](prompt[:-1])
        assert "." not in prompt + answer[:-1] and "_" not in prompt + answer


def test_problems_stay_within_the_lengths_that_a_task_declares(task: Task) -> None:
    problems = [task.problem(group, seed=2) for group in range(2000)]
    assert max(len(problem.prompt) for problem in problems) <= task.max_prompt_tokens
    assert max(len(problem.answer) for problem in problems) <= task.max_response_tokens


@given(group=keys, seed=keys)
def test_a_problem_follows_from_seed_and_group_alone(group: int, seed: int) -> None:
    first, again = Reverse().problem(group, seed), Reverse().problem(group, seed)
    assert first.prompt.dtype == first.answer.dtype == np.int64
    assert np.array_equal(first.prompt, again.prompt) and np.array_equal(first.answer, again.answer)


def test_other_groups_and_other_seeds_get_other_problems(task: Task) -> None:
    def prompts(groups: range, seed: int) -> list[str]:
        return [task.decode(task.problem(group, seed).prompt) for group in groups]

    assert prompts(range(50), 0) != prompts(range(50), 1)
    assert prompts(range(50), 0) != prompts(range(50, 100), 0)
    assert len(set(prompts(range(50), 0))) > 20


def test_the_answer_itself_earns_everything(task: Task) -> None:
    answer = task.problem(3, 4).answer
    score = task.score(answer, answer)
    assert score.reward == 1.0 and score.exact_match is True


@given(response=tokens, answer=tokens)
def test_rewards_lie_in_the_unit_interval_and_only_equality_is_exact(response: np.ndarray, answer: np.ndarray) -> None:
    score = score_tokens(response, answer)
    equal = np.array_equal(response, answer)
    assert score.exact_match is equal
    assert score.reward == 1.0 if equal else 0.0 <= score.reward < 0.5


@pytest.mark.parametrize(
    ("response", "partial"),
    [("abc", 3 / 4), ("abcd", 3 / 4), ("ab.", 2 / 4), ("abd.", 3 / 4), ("abc..", 4 / 5), ("", 0.0), ("bca.", 1 / 4)],
)
def test_partial_credit_is_the_share_of_places_that_agree(response: str, partial: float) -> None:
    score = score_tokens(encode(response), encode("abc."))
    assert not score.exact_match
    assert score.reward == pytest.approx(0.5 * partial)


def test_copy_and_expand_have_a_long_tail_and_reverse_has_none() -> None:
    def tail(task: Task) -> float:
        lengths = [len(task.problem(group, 0).answer) for group in range(3000)]
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
        TASKS[name](**options)


def test_a_jsonl_task_hands_out_every_line_once_per_pass(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(20)]
    task = Jsonl(path=write(tmp_path / "sums.jsonl", *lines))
    passes = [[task.decode(task.problem(group, 5).prompt) for group in range(20 * n, 20 * n + 20)] for n in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(json.loads(line)["prompt"] for line in lines)
    assert passes[0] != passes[1]
    assert task.decode(task.problem(0, 5).answer).endswith(".")
    assert (task.max_prompt_tokens, task.max_response_tokens) == (5, 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:2: not JSON"),
        ('{"prompt": "a="}', 'bad.jsonl:2: expected an object with exactly "prompt" and "answer"'),
        ('{"prompt": "a=", "answer": 1}', 'bad.jsonl:2: "answer" must be a non-empty string, not 1'),
        ('{"prompt": "", "answer": "a"}', 'bad.jsonl:2: "prompt" must be a non-empty string'),
        ('{"prompt": "a=", "answer": "aZ."}', "bad.jsonl:2: \"answer\" holds '.Z'; use only the characters"),
    ],
)
def test_a_bad_jsonl_line_is_named_with_its_number_and_the_fix(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", '{"prompt": "a=", "answer": "a"}', line)
    with pytest.raises(ValueError) as error:
        Jsonl(path=path)
    assert message in str(error.value)


def test_an_empty_jsonl_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no problem"):
        Jsonl(path=write(tmp_path / "empty.jsonl", ""))


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
    assert (problem.prompt.tolist(), problem.answer.tolist()) == ([512], [0])
    assert problem.prompt.dtype == problem.answer.dtype == np.int64
    assert task.max_prompt_tokens == 512
    score = task.score(np.array([4, 5]), problem.answer)
    assert (score.reward, score.exact_match) == (0.0, False)
    assert task.decode(np.array([4, 5])) == "<9 tokens>"
    with pytest.raises(ValueError, match="a simulated task has no text"):
        task.encode("abc")
