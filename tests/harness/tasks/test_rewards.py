"""Rewards that have names: what is right, what is wrong, and what costs nothing but itself."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.config.registries import REWARDS
from harness.tasks import Sample, Score, environment_of, make_task, observation_tokens, score_of
from harness.tasks.rewards.code import code
from harness.tasks.rewards.mathematics import math
from harness.tasks.rewards.reading import normalised
from harness.tasks.rewards.text import exact, form, length, numeric, regex
from harness.workers.reward_scorers import RewardLimits, RewardPool
from tests.support.text_folder import text_tokenizer

RIGHT, WRONG = Score(1.0, True), Score(0.0, False)


def said(response: str, answer: str, *, stopped: bool = True, tokens: int = 1) -> Sample:
    return Sample("", response, answer, stopped, tokens)


def test_exact_regex_form_and_length_do_what_they_say() -> None:
    assert exact(said(" a b\n", "a b")) == RIGHT
    assert exact(said("a b", "a b", stopped=False)) == exact(said("A b", "a b")) == WRONG
    assert exact(said("A b", "a b"), ignore_case=True) == RIGHT
    assert regex(said("it is (4)!", "(4)"), pattern=r"is {answer}") == RIGHT
    assert regex(said("it is 4", "(4)"), pattern=r"is {answer}") == WRONG
    answered = "<think>so\nit</think>\n<answer> {} </answer>"
    assert form(said(answered.format("4"), "4")) == RIGHT
    assert form(said(answered.format("5"), "4")) == Score(0.1, False)
    assert form(said("4", "4")) == WRONG
    lengths = [length(said("a", "a", tokens=n), limit=10, buffer=4).reward for n in (1, 6, 8, 10, 99)]
    assert lengths == [1.0, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("it is 72", "72", True), ("1,234", "1234", True), ("1e3", "1,000", True), ("3/4", "0.75", True),
        ("-5", "- 5", False), ("so -5.", "-5", True), ("$18", "18.00", True), ("12 or 13", "12", False),
        ("0.3333333", "1/3", True), ("0.333", "1/3", False), ("none", "3", False), ("1/0", "3", False),
        ("2024-05", "5", True), (".5", "1/2", True), ("10%", "10", True), ("0", "0", True), ("1e-9", "0", False),
        ("<<3*4=12>>12", "12", True), ("1,23", "23", True), ("a1b2", "2", True),
        # One minus, one set of digits, one space, fractions in one piece, in the response or in the row.
        *((f"{minus}5", "-5", True) for minus in "\u2212\ufe63\uff0d\u2013\u2012\u2010"), ("-5", "\u22125", True),
        *((f"{minus}5", "5", False) for minus in "\u2212\ufe63\uff0d\u2013\u2012"), ("5 \u2212 3 = 2", "2", True),
        ("so\u20135", "5", True), ("3\u20135", "5", True), ("\u2212\u200b5", "-5", True), ("\uff11\uff12", "12", True),
        ("\u0663\u0664", "34", True), ("\u096b", "5", True), ("\u0663\u066b\u0665", "3.5", True),
        *((f"1{space}800", "1800", True) for space in "\u00a0\u2009\u202f\u2007"), ("1 800", "1800", True),
        ("3 or 4 800", "800", True), ("1\u00bd", "1.5", True), ("\u2212\u00bd", "-.5", True), ("\U0001d7d3", "5", True),
        ("10\u00b2", "100", True),
        ("2.5\u00d710\u00b3", "2500", True), (r"3 \times 10^{5}", "3e5", True), (r"\boxed{\frac{3}{4}}", "0.75", True),
        (r"\boxed{1\frac12}", "1.5", True), (r"\boxed{1{,}800}", "1800", True), ("2^{10}", "10", False),
        ("9" * 5000, "9", False), ("miles/5", "5", True), ("1/2/3", "3", True), ("1e9e9", "9", True),
        # One final answer.
        (r"\boxed{3}, then 4", "3", True), (r"\boxed{3} and \boxed{4}", "4", True), (r"\boxed{2} \boxed{", "2", True),
        (r"\boxed{2} \boxed{}", "2", True), ("#### 5\nfor 2 reasons", "5", True), ("first 2, finally 1", "1", True),
        ("The answer is 5. I checked it 3 times", "5", True), ("It is 3. **Answer:** 7\n\n(8)", "7", True),
        ("Answer:\n\n7", "7", True), ("the answer is 5.5", "5.5", True), ("I answered 3 of 4", "4", True),
        ("<think>the answer is 3</think> 4", "4", True), ("<think>3</think>", "3", True),
        ("<answer>5</answer> of 6", "5", True), ("\u7b54\u6848\u662f\uff1a5\u3002\u51713\u6b65", "5", True),
        ("#### Step 2\nso 5", "5", True), ("#### 4\nNo: the answer is 5.", "5", True),
        ("so <answer></answer> 5", "5", True), ("the answer is\n\\[\nx = 5\n\\]\nin 3 steps", "5", True),
        ("it is 2 (answer: B)", "2", False),
        ("she ate 4\n#### 72", "she ate 3\n#### 72", True),
    ],
)  # fmt: skip
def test_numeric_holds_the_last_numbers_against_each_other(response: str, answer: str, right: bool) -> None:
    assert numeric(said(response, answer)).exact_match is right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        # By kind of expression.
        (r"$\frac{1}{2}$", r"$0.5$", True), (r"$\frac12$", r"$\frac{1}{2}$", True), (r"$1,000$", "$1000$", True),
        (r"\boxed{x^2 + 2x + 1}", r"$(x+1)^2$", True), (r"$\sqrt{12}$", r"$2\sqrt{3}$", True),
        (r"$\{1, 2, 3\}$", r"$\{3, 2, 1\}$", True), (r"$(1, 2)$", r"$(2, 1)$", False),
        (r"$[0, 1)$", r"$[0, 1]$", False),
        (r"$x = 5$", "$5$", True), (r"$3 + 4i$", r"$4i + 3$", True), (r"$\pi$", r"$3.14$", False),
        (r"$10\%$", r"$10$", True), (r"$\frac{3}{4}$", "0.75", True), (r"$-\frac{1}{3}$", r"$\frac{-1}{3}$", True),
        (r"$\infty$", r"$\infty$", True), (r"$2^{10}$", "1024", True), (r"$\ln(e^2)$", "2", True),
        (r"$\begin{pmatrix} 1 \\ 2 \end{pmatrix}$", r"$\begin{pmatrix} 1 \\ 2 \end{pmatrix}$", True),
        (r"$x < 3$", r"$x < 3$", True), (r"first \boxed{3}, then 4", "3", True), ("it is 72", "72", True),
        *((rf"\boxed{{{said}}}", answer, True) for said, answer in (
            ("18", r"\$18"), (r"\$18", r"\$18"), ("18", "$18"), (r"\$18", "18"), ("1800", r"\$1{,}800"),
            ("18", r"18\%"), (r"1\,800", "1800"), ("1 800", "1800"), ("\u20ac18", "18"), ("90\u00b0", "90"),
            ("18", "18 dollars"),
            ("\u2212\\frac13", r"-\frac{1}{3}"), ("\u2013\\frac13", r"-\frac13"), ("\u00bd", "0.5"), ("x\u00b2", "x^2"),
            ("2\u221a3", r"\sqrt{12}"), ("\u03c0", r"\pi"), (r"\boxed{5}", "5"), (r"\{3, 4\}", r"\{4, 3\}"),
        )), ("the answer is $18", "18", True), ("from $20 to $18", "18", True),
        *((r"\boxed{3}" + between + r"\boxed{4}", answer, answer == "4")
          for between in (" and ", ", ", "") for answer in "34"),
        ("$2$, $1$", "1", True), ("$2$, $1$", "2", False), (r"\boxed{3}, \fbox{4}", "4", True),
        (r"\boxed 5", "5", True), (r"\[ x = 7 \]", "7", True), ("**Answer: $\\frac{1}{2}$**", "0.5", True),
        (r"answer is \(\frac12\).", "0.5", True),
        (r"\frac{", "3", False), ("", "3", False), ("no idea", "3", False), (r"\boxed{1.0000001}", "1", False),
    ],
)  # fmt: skip
def test_math_knows_equal_expressions(response: str, answer: str, right: bool) -> None:
    assert math(said(response, answer)).exact_match is right


@given(st.text())
def test_a_normalised_text_is_its_own_normal_form_and_plain_text_its_own(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)
    assert normalised(ascii(text)) == ascii(text)


@pytest.mark.parametrize("reward", [exact, partial(regex, pattern="{answer}"), partial(form, pattern="(?P<answer>.*)")])
@pytest.mark.parametrize(
    "pair", ["caf\u00e9 cafe\u0301", "\u22125 -5", "\u0665 5", "a\u00a0b a_b", "\uff21 A", "\u200f5 5"]
)
def test_texts_that_say_the_same_are_the_same_by_every_reward(reward: Any, pair: str) -> None:
    one, other = (text.replace("_", " ") for text in pair.split(" "))
    assert reward(said(one, other)).exact_match and reward(said(other, one)).exact_match
    for so in ("so <answer>{}</answer>", "The answer is: **{}**.", r"\boxed{{\text{{{}}}}}", "so\n#### {}"):
        assert exact(said(so.format(one), other), final=True) == RIGHT
    assert regex(said("\uff08\u2212\uff09", ""), pattern="\uff08\u2212\uff09") == RIGHT, "a pattern names what it means"


CUT_OFF: dict[str, tuple[dict[str, Any], str, str]] = {
    "exact": ({}, "5", "5"), "numeric": ({}, "5", "5"), "math": ({}, r"\boxed{5}", "5"),
    "regex": ({"pattern": "5"}, "5", "5"), "format": ({"pattern": "(?P<answer>.*)"}, "5", "5"),
    "length": ({"limit": 9, "buffer": 1}, "5", "5"), "code": ({}, "f = 5", json.dumps({"tests": "assert f == 5"})),
    "tests.support.rewards:commanded": ({}, "5", "5"), "tests.support.rewards:judged": ({}, "5", "5"),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT_OFF)
async def test_no_reward_pays_a_response_that_the_limit_cut_off_unless_a_setting_says_so(name: str) -> None:
    """By name, the user's own, or, where the name is of none, the task's."""
    options, response, answer = CUT_OFF[name]
    settings = [f"task.reward={name}", *(f"task.reward_options.{key}='{value}'" for key, value in options.items())]
    for pay in (False, True):
        task = make_task(compose_job([*settings, f"task.pay_truncated={pay}"]))
        whole, cut = [await score_of(task, said(response, answer, stopped=end)) for end in (True, False)]
        assert whole.reward > 0 and cut.reward == whole.reward * pay and (pay or not cut.exact_match)
    penalised = make_task(compose_job(["task.reward=length", "task.reward_options={limit: 4, buffer: 2}"]))
    assert (await score_of(penalised, said("5", "5", stopped=False, tokens=4))).reward == -1.0, "penalties stay"
    assert (await score_of(make_task(compose_job([])), said("abc", "abc", stopped=False))).reward == 0.0


def test_a_reward_has_a_name_and_options_that_are_its_own() -> None:
    for name in REWARDS:
        needed = {"regex": {"pattern": "a"}, "length": {"limit": 4, "buffer": 2}}.get(name, {})
        options = [f"task.reward_options.{key}={value}" for key, value in needed.items()]
        make_task(compose_job([f"task.reward={name}", *options]))
    for wrong, told in (
        (["task.reward=best"], "task.reward=best is unknown; choose one of exact, numeric, math, "),
        (["task.reward=regex"], "task.reward_options.pattern has no value; "),
        (["task.reward=exact", "task.reward_options.best=1"], "task.reward_options.best is no option of exact"),
    ):
        with pytest.raises(ConfigError, match=told):
            make_task(compose_job(wrong))


# -- code

SQUARE = json.dumps({"tests": "assert f(2) == 4\nassert f(3) == 9"})
CASES = json.dumps({"cases": [{"input": "3\n", "output": "9\n"}, {"input": "4", "output": "16"}]})


def test_a_program_has_to_pass_its_tests() -> None:
    assert code(said("So:\n```python\ndef f(x):\n    return x * x\n```\nDone.", SQUARE)) == RIGHT
    assert code(said("def f(x): return x + x", SQUARE)) == WRONG
    assert code(said("print(int(input()) ** 2)", CASES)) == RIGHT
    assert code(said("print(9)", CASES), partial=True) == Score(0.5, False)
    for answer in ("assert", "{}", '{"cases": []}', '{"cases": [{"input": 1}]}'):
        with pytest.raises(ValueError, match="the answer "):
            code(said("", answer))


HOSTILE_PROGRAMS = {
    "exit": "import sys; sys.exit(0)",
    "os exit": "import os; os._exit(0)",
    "endless": "while True: pass",
    "sleep": "import time; time.sleep(99)",
    "memory": "x = [0] * 10 ** 10",
    "grow": "x = [1]\nwhile True: x += x",
    "big file": "open('x', 'wb').write(b'0' * 10 ** 9)\ndef f(x): return x * x",
    "flood": "while True: print('x' * 1000)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nfor i in range(1000): threading.Thread(target=time.sleep, args=(9,)).start()",
    "files": "fs = [open(__file__) for i in range(1000)]\ndef f(x): return x * x",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kill group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "recursion": "def f(x): return f(x)",
    "syntax": "def f(x) return",
    "nul": "\0",
    "surrogate": "'\ud800'",
    "deep": "(" * 100_000,
    "input": "input(); input(); input()",
}
"""Each fails alone: none passes its tests, none outlives its run."""


def test_hostile_programs_fail_alone_and_leave_nothing() -> None:
    before = set(psutil.Process().children(recursive=True))
    for name, program in HOSTILE_PROGRAMS.items():
        assert code(said(program, SQUARE), time_s=0.5) == WRONG, name
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(99)\ndef f(x): return x * x"
    assert code(said(daemon, SQUARE)) == RIGHT
    assert set(psutil.Process().children(recursive=True)) == before


@settings(deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(r"\boxed{ } <answer> </answer> #### answer&is \frac 1/ 9e9 ^ $ \( 1 , . \n".split()))
)
def test_numbers_of_any_response_are_a_score(parts: str | list[str]) -> None:
    """A response cannot make its own scoring fail."""
    response = "".join(parts).replace("&", " ").replace("\\n", "\n")
    assert numeric(said(response, "5")).reward in (0, 1) and exact(said(response, "5"), final=True).reward in (0, 1)


HOSTILE_TEXTS = {
    "deep braces": r"\boxed{" * 5000,
    "deep fractions": r"$" + r"\frac{1}{" * 2000 + "1" + "}" * 2000 + "$",
    "tower": r"$9^{9^{9^{9^{9}}}}$",
    "factorial": r"$100000000!$",
    "digits": "$" + "9" * 200_000 + "$",
    "long sum": "$" + "+".join(["x"] * 20_000) + "$",
    "unicode": "\u202e\U0001f600" * 1000 + "$\ufffd$",
    "nul": "\0" * 1000,
}


@pytest.mark.slow
async def test_hostile_mathematics_and_patterns_cost_their_own_sample() -> None:
    """Huge LaTeX is wrong, or fails by the limit; the samples between are right as ever."""
    asked = [one for text in HOSTILE_TEXTS.values() for one in (said(text, "3"), said(r"\boxed{3}", "3"))]
    scored = await _pooled(["task.reward=math"], asked, timeout_s=3.0)
    assert [one.score.exact_match for one in scored] == [False, True] * len(HOSTILE_TEXTS)
    assert all(one.failure is None for one in scored[1::2])
    catastrophic = ["task.reward=regex", "task.reward_options.pattern='(a+)+b'"]
    scored = await _pooled(catastrophic, [said("a" * 64, ""), said("aab", "")], timeout_s=1.0)
    assert [(one.failure, one.score.reward) for one in scored] == [("no score after 1 s", -1.0), (None, 1.0)]


async def _pooled(overrides: list[str], asked: list[Sample], timeout_s: float) -> list[Any]:
    limits = RewardLimits(timeout_s, 2 << 30)
    make = partial(make_task, compose_job(overrides))
    pool = RewardPool(make, 2, reward=overrides[0], failure_reward=-1.0, limits=limits)
    try:
        await pool.scores([said("3", "3")] * 2)  # so that imports are not in anyone's time
        return await pool.scores(asked)
    finally:
        pool.close()


# -- reasoning-gym


async def test_reasoning_gym_asks_and_judges_by_the_name_of_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    settings = ["task=reasoning_gym", "task.dataset=chain_sum"]
    folder = text_tokenizer(tmp_path)
    task = make_task(compose_job([*settings, f"model.tokenizer={folder}"]))
    problem, held_out = task.problem(3, 0), task.held_out(3)
    assert "+" in task.decode(problem.prompt) or "-" in task.decode(problem.prompt)
    right = task.decode(task.demonstration(problem)[:-1])
    assert await score_of(task, said(f"so <answer>{right}</answer>", problem.answer)) == RIGHT
    assert not (await score_of(task, said("<answer>no</answer>", problem.answer))).exact_match
    assert task.decode(held_out.prompt) != task.decode(problem.prompt)
    assert environment_of(task) is None
    with pytest.raises(ConfigError, match="task=reasoning_gym: dataset=chess_960 is unknown; choose one of "):
        make_task(compose_job(["task=reasoning_gym", "task.dataset=chess_960"]))


async def test_reasoning_gym_in_several_turns_scores_the_last_answer(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    settings = ["task=reasoning_gym", "task.dataset=chain_sum", "task.turns=3", "task.feedback=No."]
    task = make_task(compose_job([*settings, f"model.tokenizer={text_tokenizer(tmp_path)}"]))
    problem = task.problem(3, 0)
    right = task.decode(task.demonstration(problem)[:-1])
    environment = environment_of(task)
    assert environment is not None and environment.max_turns == 3

    async def played(*answers: str) -> tuple[list[bool], Score]:
        state = await environment.reset(problem, 0)
        steps = [await environment.step(state, answer) for answer in answers]
        assert [step.observation for step in steps] == ["" if step.done else "No." for step in steps]
        sample = replace(said("", problem.answer), environment_reward=sum(step.reward or 0.0 for step in steps))
        return [step.done for step in steps], await score_of(task, sample)

    assert await played(right) == ([True], RIGHT)
    assert await played("no", f"<answer>{right}</answer>") == ([False, True], RIGHT)
    done, score = await played("no", "no", "none")
    assert done == [False, False, True] and not score.exact_match and score.reward < 0.5
    assert await score_of(task, said(right, problem.answer)) == WRONG, "of a turn that did not come to its end"
    read = task.decode(observation_tokens(task, "No."))
    assert read == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n", "the end of the turn is there already"
    with pytest.raises(ConfigError, match="it needs turns of 1 or more"):
        make_task(compose_job([*settings, "task.turns=0"]))
    with pytest.raises(ConfigError, match="holds a character that the tokenizer"):
        make_task(compose_job(["task=reasoning_gym", "task.dataset=chain_sum", "task.turns=2"]))
