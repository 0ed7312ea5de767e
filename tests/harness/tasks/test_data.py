"""Problems from files: every option, every preset, and 300 rows that are no problems, each of them named."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.config.compose import compose_job
from harness.tasks import Sample, load_tokenizer, make_task, sample_of, score_of
from harness.tasks.data import DataTask
from harness.tasks.data_prompts import Columns
from harness.tasks.data_source import text_of
from harness.tasks.rewards.reading import normalised
from harness.tasks.tokenizer import Tokenizer
from tests.support.text_folder import text_tokenizer

GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the `datasets` library, which copies every file it reads."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(text_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lines(path: Path, *rows: Any) -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return str(path)


def prompts_of(task: DataTask, groups: range, seed: int = 0) -> list[str]:
    return [task.decode(task.problem(group, seed).prompt) for group in groups]


def refused(**options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        DataTask(**options).problem(0, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- rows


def test_every_row_comes_once_per_pass_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = lines(tmp_path / "sums.jsonl", *({"prompt": f"{n}+1=", "answer": n + 1} for n in range(20)))
    task = DataTask(data=path, held_out_share=0.25)
    first, second = prompts_of(task, range(15)), prompts_of(task, range(15, 30))
    held_out = [task.decode(task.held_out(index).prompt) for index in range(5)]
    assert sorted(first) == sorted(second) and first != second != prompts_of(task, range(15), seed=1)
    assert sorted(first + held_out) == sorted(f"{n}+1=" for n in range(20)), "no problem is trained on and held out"
    assert task.held_out(5).answer == task.held_out(0).answer
    assert all(p.row == f"sums.jsonl:{p.answer}" for p in (task.problem(0, 0), task.held_out(0)))
    assert task.problem(2**63 + 7, 2**63).answer.isdecimal(), "far passes are passes too"
    assert task.summary.startswith(f"{path}: 15 problems to train on, 5 held out\n  tokens of prompts: median ")


def test_files_of_all_kinds_hold_the_same_problems(tmp_path: Path) -> None:
    """Text stays text: 007 and NA are answers as they stand."""
    rows = [{"prompt": "a,b=", "answer": "007"}, {"prompt": "c=", "answer": "NA"}, {"prompt": "d=", "answer": "1.50"}]
    table = io.StringIO()
    writer = csv.DictWriter(table, ["prompt", "answer"])
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "a.csv").write_text(table.getvalue())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines(tmp_path / "a.jsonl", rows[0], "", *rows[1:])
    found = []
    for kind in ("csv", "parquet", "jsonl"):
        task = DataTask(data=f"{tmp_path}/a.{kind}", tokenizer=_bytes(tmp_path), held_out_share=0.0)
        found.append(sorted((task.decode(p.prompt), p.answer) for p in (task.problem(n, 0) for n in range(3))))
    assert found[0] == found[1] == found[2] == [("a,b=", "007"), ("c=", "NA"), ("d=", "1.50")]


def _bytes(folder: Path) -> Tokenizer:
    return load_tokenizer(text_tokenizer(folder / "tokenizer", chat=False))


def test_prompts_that_are_too_long_or_repeated_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "answer": "b"} for n in (1, 2, 9, 2, 10)]
    task = DataTask(data=lines(tmp_path / "a.jsonl", *rows), max_prompt_tokens=8, drop_repeated=True)
    assert {len(task.problem(n, 0).prompt) for n in range(9)} <= {1, 2}
    told = "1 problem to train on, 1 held out, without 2 prompts of more than 8 tokens and 1 repeated prompt\n"
    assert told in task.summary
    told = refused(data=lines(tmp_path / "b.jsonl", *rows[2:3]), max_prompt_tokens=8)
    assert told == f"{tmp_path}/b.jsonl holds no problem: all 1 prompts have more than 8 tokens"


def odd(**options: Any) -> dict[str, Any]:
    """Census of rows of all kinds."""
    rows = [(n, n) for n in "abcdefgh"] + [(" a  ", "b"), ("\uff41", "a"), ("b", "b" * 9), ("a" * 20, "c")]
    path = lines(options.pop("folder") / "odd.jsonl", *({"prompt": p, "answer": a} for p, a in rows))
    return {"data": path, "max_prompt_tokens": 8, "max_response_tokens": 8, **options}


def test_a_census_counts_what_is_odd_about_rows_and_prompts(tmp_path: Path, chatty: Tokenizer) -> None:
    task = DataTask(**odd(folder=tmp_path, tokenizer=chatty, chat=False, held_out_share=0.4))
    census, source = task.census, task.census["source"]
    counted = ("rows", "kept", "too_long", "duplicates", "conflicting", "unreachable")
    assert [source[name] for name in counted] == [12, 11, 1, 3, 2, 1]
    assert source["prompt_tokens"] == {"median": 1, "p99": 20, "max": 20, "limit": 8}
    assert source["answer_tokens"] == {"median": 2, "p99": 10, "max": 10, "limit": 8}
    assert json.loads(json.dumps(census)) == census
    trained, held_out = (
        {" ".join(normalised(p).split()) for p in prompts}
        for prompts in (
            prompts_of(task, range(census["training"])),
            [task.decode(task.held_out(n).prompt) for n in range(census["held_out"])],
        )
    )
    assert not trained & held_out and trained | held_out == set("abcdefgh")
    told = task.summary.splitlines()
    assert max(map(len, told[1:])) <= 80
    for words in ("3 rows of a prompt", "2 prompts with several answers", "1 answer longer than", "fewer than the"):
        assert sum(words in line for line in told) == 1, words


def test_held_out_prompts_that_are_trained_are_refused_taken_out_or_allowed(tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", *({"prompt": p, "answer": "1"} for p in ("a", "b", "b ", "c")))
    other = lines(tmp_path / "b.jsonl", *({"prompt": p, "answer": "1"} for p in (" b", "d")))
    told = refused(data=data, held_out_data=other)
    assert told.startswith(f"1 of 2 held-out prompts of {other} are trained on, too, the first is b.jsonl:1: set task.")
    given = {"data": data, "held_out_data": other}
    found = {how: DataTask(**given, held_out_overlap=how).census for how in ("drop", "allow")}
    assert [(one["training"], one["shared"], one["taken_out"]) for one in found.values()] == [(2, 0, 2), (4, 1, 0)]
    whole = lines(tmp_path / "c.jsonl", {"prompt": "d", "answer": "1"})
    assert "holds no problem to train on" in refused(data=whole, held_out_data=other, held_out_overlap="drop")


def test_a_giant_row_is_left_out_in_little_memory(tmp_path: Path, chatty: Tokenizer) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "sun " * 100_000, "answer": "b"}]
    rows.append({"prompt": "c", "answer": "sun " * 100_000})
    data = lines(tmp_path / "a.jsonl", *rows)
    longest, encode = 0, type(chatty._text).encode

    class Watched:
        def encode(self, text: str, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return encode(chatty._text, text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(chatty._text, name)

    task = DataTask(data=data, tokenizer=replace(chatty, _text=Watched()), held_out_share=0.0)
    assert (task.census["source"]["too_long"], task.census["source"]["unreachable"]) == (1, 1)
    assert longest <= 1 << 16


def test_held_out_rows_may_be_another_file_and_a_changed_one_is_read_anew(tmp_path: Path) -> None:
    files = [lines(tmp_path / f"{name}.jsonl", {"prompt": f"{name}=", "answer": name}) for name in "ab"]
    task = DataTask(data=files[0], held_out_data=files[1])
    assert (task.problem(3, 1).answer, task.held_out(2).answer) == ("a", "b")
    with pytest.raises(ValueError, match="task data holds no row out; set task.held_out_share=0.1, or"):
        DataTask(data=files[0], held_out_share=0.0).held_out(0)
    first = DataTask(data=lines(tmp_path / "a.jsonl", {"prompt": "a=", "answer": "1"})).problem(0, 0)
    second = DataTask(data=lines(tmp_path / "a.jsonl", {"prompt": "a=", "answer": "12"})).problem(0, 0)
    assert (first.answer, second.answer) == ("1", "12")
    assert DataTask(data=lines(tmp_path / "a.jsonl", GOOD)).problem(0, 0).prompt.dtype == np.int64


# -- prompts


def test_a_text_becomes_a_chat_by_the_tokenizers_template_with_its_options(tmp_path: Path, chatty: Tokenizer) -> None:
    path = lines(tmp_path / "a.jsonl", {"q": "1+1", "a": {"b": [1, "x"]}, "hint": "add"})
    told = {"data": path, "tokenizer": chatty, "columns": Columns("q", "a.b")}
    plain = DataTask(**told)
    assert plain.decode(plain.problem(0, 0).prompt) == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert plain.problem(0, 0).answer == '[1, "x"]'
    options = {"enable_thinking": False}
    full = DataTask(**told, template="{prompt}? {{{hint}}}", system="Be brief.", chat_options=options)
    assert full.decode(full.problem(0, 0).prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? {add}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    bare = DataTask(**told, chat=False)
    assert bare.decode(bare.problem(0, 0).prompt) == "1+1"
    assert plain.stop_tokens == tuple(chatty.encode("<|im_end|><|endoftext|>")), "several tokens end a response"


def test_a_demonstration_is_the_answer_and_earns_everything(tmp_path: Path, chatty: Tokenizer) -> None:
    task = DataTask(data=lines(tmp_path / "a.jsonl", {"prompt": "p", "answer": "two words"}), tokenizer=chatty)
    problem = task.problem(0, 0)
    sample = sample_of(task, problem.prompt, task.demonstration(problem), problem.answer)
    assert sample.stopped and task.score(sample).exact_match


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"), (True, "true"), (5, "5"), (2**70, str(2**70)), (5.0, "5"), (-0.5, "-0.5"), (1e300, "1e+300"),
        (np.float32(2), "2"), (Decimal("5.00"), "5"), (Decimal("1.50"), "1.5"), (Decimal("100"), "100"),
        (Decimal("1" * 30 + ".10"), "1" * 30 + ".1"), (date(2026, 3, 1), "2026-03-01"),
        (datetime(2026, 3, 1, 12), "2026-03-01T12:00:00"), (time(1, 2), "01:02:00"), ("é".encode(), "é"),
        ({"a": [5.0, None, date(2026, 3, 1), Decimal("2.5")]}, '{"a": [5, null, "2026-03-01", 2.5]}'),
        ([1, "é"], '[1, "é"]'), (1j, ValueError),
        (None, ValueError), (math.nan, ValueError), (-math.inf, ValueError), (Decimal("NaN"), ValueError),
        (timedelta(1), ValueError), (b"\xff", ValueError), ([5], ValueError), ([math.nan, 1], ValueError),
    ],
)  # fmt: skip
def test_a_value_of_any_type_is_one_text_or_refused(value: Any, text: Any, tmp_path: Path, chatty: Tokenizer) -> None:
    """Also as it comes out of a Parquet file, as an answer and in a template, with row and column."""
    if text is ValueError:
        with pytest.raises(ValueError):
            text_of(value)
    else:
        assert text_of(value) == text
    if isinstance(value, dict | complex | np.generic) or str(value) in (str(2**70), "NaN", "[1, 'é']"):
        return
    pq.write_table(pa.table({"prompt": ["p"], "answer": pa.array([value])}), tmp_path / "a.parquet")
    told = {"data": str(tmp_path / "a.parquet"), "tokenizer": chatty, "chat": False, "held_out_share": 0.0}
    both = {"template": "{prompt}{answer}"}
    for options, read in (({}, lambda p: p.answer), (both, lambda p: chatty.decode(p.prompt)[1:])):
        if text is ValueError:
            assert re.search(r"a.parquet row 0: column 'answer' \S", refused(**told, **options))
        else:
            assert read(DataTask(**told, **options).problem(0, 0)) == text


def test_narrow_floats_of_parquet_are_what_was_written(tmp_path: Path) -> None:
    table = {"prompt": ["a"], "answer": pa.array([[0.1, 2.5]], pa.list_(pa.float32()))}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    whole = DataTask(data=str(tmp_path / "a.parquet"), columns=Columns("prompt", "answer"), tokenizer=_bytes(tmp_path))
    part = DataTask(data=str(tmp_path / "a.parquet"), columns=Columns("prompt", "answer.0"), tokenizer=_bytes(tmp_path))
    assert (whole.problem(0, 0).answer, part.problem(0, 0).answer) == ("[0.1, 2.5]", "0.1")


@pytest.mark.parametrize(
    ("reward", "options", "answer", "told"),
    [
        ("numeric", {}, "none", "column 'answer': the answer 'none' holds no number"), ("numeric", {}, "#### 5", ""),
        ("math", {}, r"\frac{1", "is no mathematical expression"), ("math", {}, r"\$1{,}800", ""),
        ("math", {}, "5", ""), ("exact", {}, "X", "that the tokenizer"), ("numeric", {}, "X 5", ""),
        ("code", {}, "assert", "is not JSON"), ("code", {}, {"tests": "assert f"}, ""),
        ("regex", {"pattern": "("}, "5", "pattern=( is no regular expression"),
        ("length", {"limit": 1, "buffer": 2}, "5", "buffer=2 tokens are no part of limit=1"),
        ("tests.support.rewards:particular", {"least": 3}, "2", "column 'answer': 2 is less than 3"),
        ("tests.support.rewards:particular", {"least": 3}, [4], ""),
    ],
)  # fmt: skip
def test_answers_go_through_the_reader_of_their_reward_before_the_run(
    reward: str, options: dict[str, Any], answer: Any, told: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": answer})
    settings = [f"task.reward_options.{name}='{value}'" for name, value in options.items()]
    task = make_task(compose_job(["task=data", f"task.data={path}", f"task.reward={reward}", *settings]))
    if not told:
        assert task.problem(0, 0).row == "a.jsonl:1"
        return
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}:1: .*{re.escape(told)}"):
        task.problem(0, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chat": True}, "has no chat template; leave it out"),
        ({"system": "s"}, "system is for chats"),
        ({"chat_options": {"a": 1}}, "chat_options is for chats"),
        ({"answer_pattern": "("}, "answer_pattern=( is no regular expression"),
        ({"template": "no place"}, "needs the names of columns in braces"),
        ({"template": "{"}, "write braces that are text twice"),
        ({"template": "{prompt} {nope}"}, "a.jsonl:1: the template names column 'nope'; there are prompt, answer"),
        ({"columns": Columns("question")}, "a.jsonl:1: there is no column 'question'; the row has prompt, answer"),
        ({"columns": Columns("prompt.text")}, "a.jsonl:1: there is no column 'prompt.text'"),
        ({"answer_pattern": "#### (.*)"}, "a.jsonl:1: column 'answer' has no match of #### (.*): '2'"),
        ({"held_out_share": 1.0}, "held_out_share=1.0 is no share of the rows"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1 is too small"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    assert told in refused(data=lines(tmp_path / "a.jsonl", GOOD), **options)


def test_sources_that_cannot_work_are_named_also_a_bad_row_by_number(tmp_path: Path) -> None:
    told = refused(data=f"{tmp_path}/a.jsonl")
    assert told.endswith("a.jsonl is no file; name one with a row for each problem")
    assert "is no file of a known kind; give .jsonl" in refused(data=f"{tmp_path}/a.txt")
    assert refused(data=lines(tmp_path / "a.jsonl")).endswith("holds no problem: it is empty")
    told = refused(data="hf:nobody/nothing")
    assert told.startswith("hf:nobody/nothing (subset None, split train) cannot be loaded: ")
    assert told.endswith("without a network name a file")
    pq.write_table(pa.Table.from_pylist([GOOD, {"prompt": None, "answer": "1"}]), tmp_path / "a.parquet")
    assert refused(data=f"{tmp_path}/a.parquet").startswith(f"{tmp_path}/a.parquet row 1: column 'prompt' must hold")


def test_what_is_wrong_with_a_file_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    from harness.checks.job import plan_job
    from harness.config.compose import make_schedule
    from harness.config.machine import Machine

    path = lines(tmp_path / "a.jsonl", GOOD, "{")
    config = compose_job(["task=data", f"task.data={path}", "task.max_prompt_tokens=8", "task.max_response_tokens=8"])
    with pytest.raises(ConfigError, match=rf"^task=data: {path}:2: not JSON"):
        plan_job(config, make_schedule(config), Machine(cores=2, gpus=0, gpu_bytes=0))


# -- presets

PUBLISHED: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many eggs?", "answer": "She has 3 * 4 = <<3*4=12>>12 eggs.\n#### 1,012"},
    "math500": {
        "problem": "Simplify.", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}",
        "subject": "Algebra", "level": 2, "unique_id": "test/algebra/1.json",
    },
    "dapo_math": {
        "data_source": "math_dapo", "prompt": [{"content": "Solve it.", "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"},
    },
    "aime": {
        "id": 60, "problem": "Find it.", "solution": "...", "answer": "204", "url": "https://", "year": "2024",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "asked", "right", "wrong"),
    [
        ("gsm8k", "How many eggs?\n\nThink", r"so \boxed{1012}", r"\boxed{12}"),
        ("math500", "Simplify.\n\nThink", r"\boxed{0.5}", r"\boxed{2}"),
        ("dapo_math", "Solve it.", "Answer: $34$", "Answer: $43$"),
        ("aime", "Find it.\n\nThink", r"it is \boxed{204}", "204 or 205"),
    ],
)
async def test_presets_read_published_columns(tmp_path: Path, name: str, asked: str, right: str, wrong: str) -> None:
    row = PUBLISHED[name]
    pq.write_table(pa.Table.from_pylist([row, row | {"id": 61}] if "id" in row else [row, row]), tmp_path / "a.parquet")
    folder = text_tokenizer(tmp_path / "tokenizer")
    task = make_task(compose_job([f"task={name}", f"task.data={tmp_path}/a.parquet", f"model.tokenizer={folder}"]))
    problem = task.problem(0, 0)
    assert task.decode(problem.prompt).startswith(f"<|im_start|>user\n{asked}")
    said = [await score_of(task, Sample("", text, problem.answer, True, 9)) for text in (right, wrong)]
    assert [score.exact_match for score in said] == [True, False]


# -- malformed rows: 300 in all, 50 of each kind

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
never_text = anything.filter(lambda value: not isinstance(value, str) or not value.strip())
no_answer = st.sampled_from([None, ""])
BAD_LINES = {
    "no JSON": st.text(alphabet='{}[]",:ab1\\', min_size=1, max_size=12).filter(lambda text: not _is_json(text)),
    "no object": anything.filter(lambda value: not isinstance(value, dict)).map(json.dumps),
    "no prompt": st.dictionaries(st.sampled_from(["answer", "promt", "Prompt", ""]), anything).map(json.dumps),
    "prompt of no text": never_text.map(lambda value: json.dumps(GOOD | {"prompt": value})),
    "no answer": no_answer.map(lambda value: json.dumps(GOOD | {"answer": value})),
    "not in the vocabulary": st.text(min_size=1).filter(lambda text: text.strip() and not _said(text)).map(
        lambda text: json.dumps(GOOD | {"prompt": text})
    ),
}  # fmt: skip


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return not text.strip()  # blank lines are no rows
    return True


def _said(text: str) -> bool:
    return set(text) <= set("_.= +-0123456789abcdefghijklmnop")


@pytest.mark.parametrize("kind", list(BAD_LINES))
def test_each_malformed_row_is_named_with_file_and_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"

    @settings(suppress_health_check=list(HealthCheck))
    @given(BAD_LINES[kind], st.integers(0, 3))
    def check(line: str, before: int) -> None:
        told = refused(data=lines(path, *[GOOD] * before, line, GOOD))
        assert told.startswith(f"{path}:{before + 1}: "), told

    check()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"prompt": "a=", "answer": "\xff"}\n', "a.jsonl:1: not UTF-8"),
        ("a.jsonl", b'{"prompt": "a=", "answer": "1"}\n{"prompt": "a", "answer": "\\ud800"}\n', "a.jsonl:2: "),
        ("a.jsonl", b'{"prompt": "a=", "answer": NaN}\n', "a.jsonl:1: not JSON (NaN is no number of JSON)"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl:1: not JSON"),
        ("a.jsonl", b"\x00\x01\n", "a.jsonl:1: not JSON"),
        ("a.csv", b"prompt,answer\na=,1\nb=,2,3\n", "a.csv:3: 3 cells under 2 columns"),
        ("a.csv", b'prompt,answer\n"a=\n,1', "a.csv:2: not CSV"),
        ("a.csv", b"prompt,answer\na=,1\n,2\n", "a.csv:3: column 'prompt' must hold a text"),
        ("a.csv", b"prompt,prompt\na=,1\n", "a.csv:1: the header has 'prompt' twice"),
        ("a.jsonl", b'{"prompt": "a= .", "answer": "1"}\n', "a.jsonl:1: column 'prompt' ends in '.', which ends"),
        ("a.jsonl", b'{"prompt": "a", "prompt": "b", "answer": "1"}\n', "a.jsonl:1: not JSON ('prompt' is there tw"),
        ("a.jsonl", b'{"prompt": "a=", "answer": "1.5"}\n', "a.jsonl:1: the answer '1.5' holds '.', which ends"),
        ("a.jsonl", b'{"prompt": "a=", "answer": " "}\n', "a.jsonl:1: column 'answer' is empty"),
        ("a.parquet", b"PAR1nothing", "a.parquet cannot be read as parquet"),
    ],
)
def test_files_that_are_not_what_they_say_are_named(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(re.escape(told), refused(data=str(tmp_path / name)))
