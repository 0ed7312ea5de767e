"""The reward `math` against the cases that math-verify's own tests hold true or false, read from its source archive."""

import ast
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.tasks import Sample
from harness.tasks.rewards.mathematics import math

pytestmark = pytest.mark.slow

OTHER_READINGS = {"1,22", "$9$", "$1$ and $2$ and $3$", "$21,16$ or $11$"}
"""Right answers of cases that allow LaTeX only, or none, or of several formulas, of which ours is the last. So are
`TEXTS` of several sentences. Where one side has several boxes the library makes a set of them."""
TEXTS = ("Let's assume the stock's value", "Since $25<30<36$")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("math-verify")
    name = f"math-verify=={version('math-verify')}"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    if subprocess.run([*fetch, "--dest", folder, name], capture_output=True, check=False, timeout=200).returncode:
        pytest.skip(f"needs a package index that has the source of {name}")
    (found,) = folder.glob("*.tar.gz")
    return found


def test_mathematics_is_judged_as_the_library_judges_its_own_cases(archive: Path) -> None:
    cases = [case for case in _cases(archive) if all(said.count("boxed") < 2 for said in case[:2])]
    assert len(cases) > 200
    judged = [(right, math(Sample("", said, right, True, 1)).exact_match is same) for right, said, same in cases]
    differ = [right for right, agrees in judged if not agrees]
    assert {right for right in differ if not right.startswith(TEXTS)} <= OTHER_READINGS and len(differ) <= 6


def _cases(archive: Path) -> Iterator[tuple[str, str, bool]]:
    """(gold, pred, expected) of every test that has just these parameters, as literals: nothing is run."""
    with tarfile.open(archive) as files:
        for member in files:
            if "/tests/test_" not in member.name:
                continue
            source = files.extractfile(member)
            assert source is not None
            for call in ast.walk(ast.parse(source.read())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.parametrize":
                    yield from _literals(*call.args[:2])


def _literals(names: ast.expr, values: ast.expr) -> Iterator[tuple[str, str, bool]]:
    if str(ast.literal_eval(names)).replace(" ", "") != "gold,pred,expected" or not isinstance(values, ast.List):
        return
    for value in values.elts:
        if isinstance(value, ast.Tuple) and not any(isinstance(part, ast.JoinedStr) for part in value.elts):
            right, said, same = ast.literal_eval(value)
            yield right, said, bool(same)
