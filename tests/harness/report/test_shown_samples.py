"""Samples of a run to look at, in the shell and from Python: what is said of each, of anybody's folders, too."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

import cadence
from harness.cli import main as cli
from harness.metrics.formatting import visible
from harness.metrics.run_files import KEPT, load_samples
from harness.metrics.samples import FATES
from harness.report.samples import RunSamples
from tests.support.fabricated_cells import HOSTILE, Made, keep_samples, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations of eight samples."""
    path = make_run(tmp_path_factory.mktemp("made"), "cell", Made(iterations=2, exact_match=None), 0).path
    keep_samples(path)
    return path


def shown(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show", f"run={run}", *arguments]) == 0
    _, _, rest = capsys.readouterr().out.partition("\n")  # the first line is the folder, whole
    assert all(cell_len(line) <= 80 for line in rest.splitlines())
    return rest


@pytest.fixture(autouse=True)
def _of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cli.console.PIPE", 80)


def test_a_sample_is_shown_with_all_that_is_known(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(made, capsys, "sample=5")
    for part in (
        "sample 5",
        "a.jsonl:1",
        "trained in iteration 0",
        "0.250",
        "0 (2 tokens), 3 (1 token)",
        "4 samples: ",
    ):
        assert part in text
    assert text.index("prompt\n") < text.index("answer\n") < text.index("response\n")
    assert "\\x1b[2Jred\\x9b1m" in text and "\\u202egpj.exe\\u2066 \\u200b[bold]\\ufeff" in text
    assert not set(text) & set("\x1b\x9b\r\u202e\u2066\u200b\ufeff")


def test_samples_are_found_by_reward_row_fate_and_version(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(made, capsys, "worst=1").count("\nsample 5\n") == 1
    assert "sample 6" not in shown(made, capsys, "worst=16"), "it has no reward"
    assert [f"sample {one}\n" in shown(made, capsys, "row=a.jsonl:2") for one in (7, 8, 11, 12)] == [
        False,
        True,
        True,
        False,
    ]
    dropped = shown(made, capsys, "dropped=5")
    assert "sample 14" in dropped and "its group was refused" in dropped and "sample 15" not in dropped
    best = shown(made, capsys, "held_out=last", "best=1")
    assert "held-out reverse 7, sampled 2, version 2" in best and "1.00, exactly right" in best and "\\u202egpj" in best
    assert "13 trained" not in shown(made, capsys) and "of versions 0, 2" in shown(made, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample=99"], "has no such sample: sample=99"),
        (["sample=-1"], "sample=-1 is no id"),
        (["sample=9999999999999999999999"], "is no id"),
        (["worst=0"], "worst=0 is no number"),
        (["worst=1", "best=1"], "do not go together"),
        (["held_out=1"], "held_out=1 was not evaluated; use last, or one of 0, 2"),
        (["held_out=0", "sample=1"], "do not go together"),
        (["row=b.jsonl:1"], "has no such sample"),
        (["run=nowhere"], "run=nowhere is no folder"),
    ],
)
def test_what_lacks_is_told(arguments: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", f"run={made}", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["samples.parquet", "eval_responses.parquet", "config.yaml"])
def test_a_damaged_file_is_one_line(name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(made, tmp_path / "seed=0"))
    (other / name).write_bytes((other / name).read_bytes()[:40])
    assert cli.main(["show", f"run={other}"]) == 2
    assert f"{name} is damaged" in capsys.readouterr().err


def test_an_older_run_has_no_problems(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(made, tmp_path / "seed=0"))
    for name in KEPT:
        (other / f"{name}.parquet").unlink(missing_ok=True)
    pq.write_table(load_samples(other).drop_columns(["row", "prompt_text", "response_text"]), other / "samples.parquet")
    text = shown(other, capsys, "sample=5")
    assert "of no row that is known" in text and text.count("(not kept)") == 3


def test_every_fate_has_words_and_lines_stay_lines(made: Path) -> None:
    samples = RunSamples(made)
    row = samples.samples.slice(0, 1).to_pylist()[0]
    assert len({samples.fate(row | {"fate": fate}) for fate in FATES}) == len(FATES)
    samples.config["algorithm"]["mask_truncated"] = True
    assert "in no loss" in samples.fate(row | {"finish_reason": "length"})
    assert visible("a\nb\tc\u2028d\u0301é") == "a\nb\\tc\\u2028d\u0301é"


def test_python_reads_the_same(made: Path) -> None:
    done = cadence.load(made)
    assert done.problems.answer.tolist() == [HOSTILE] and done.held_out.groupby("version").reward.max().tolist() == [
        1,
        1,
    ]
    assert "0 (2 tokens), 3 (1 token)" in str(done.sample(5))
    with pytest.raises(KeyError):
        done.sample(99)
