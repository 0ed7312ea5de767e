"""Results of the gate's parts: a file of JSON for each, written anew whenever there is more in it; all of them as one
page (`gate.md`), and as one file of figures, by which `make calibrate` fits costs (`results.json`)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from harness.calibration.profile.rows import GATE
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table

Status = Literal["running", "unfinished", "passed", "failed", "crashed", "timed out", "left out"]
AGAIN: tuple[Status, ...] = ("running", "unfinished", "left out")
"""Parts that the next command asks again; of unfinished ones only what is missing."""


class LeftOut(Exception):
    """A part, or the rest of it, cannot be asked of this machine; says what is missing."""


class Unfinished(Exception):
    """No time was left for the rest of a part: the same command goes on with it."""


@dataclass(frozen=True)
class Figure:
    """A number that was measured. card: of the device by its maker; model: by the cost model; None: nothing."""

    what: str
    value: float
    unit: str
    card: float | None = None
    model: float | None = None


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. found: the figures, with units. left_out: this machine cannot be asked."""

    what: str
    found: str
    passed: bool = True
    figures: tuple[Figure, ...] = ()
    left_out: bool = False


@dataclass(frozen=True)
class PartResult:
    """The result of a part. why: where it did not pass. seconds: of the whole part, its process's start included."""

    part: str
    status: Status = "running"
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    why: str = ""

    def ended(self, status: Status, seconds: float, why: str = "") -> Self:
        """The result of a part that has ended."""
        return replace(self, status=status, seconds=round(seconds, 1), why=why)

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or something that it looked at did not pass."""
        return self.status not in ("passed", *AGAIN) or not all(check.passed for check in self.checks)

    @property
    def left_out(self) -> list[str]:
        """Names of what of it could not be asked of this machine, or was not yet."""
        if self.status in AGAIN:
            return [self.part]
        return [f"{self.part}: {check.what}" for check in self.checks if check.left_out]


def result_path(folder: Path, part: str) -> Path:
    """The file of a part's result."""
    return folder / f"{part}.json"


def write_result(folder: Path, result: PartResult) -> None:
    """Write a part's result as JSON."""
    write_text(result_path(folder, result.part), json.dumps(asdict(result), indent=1) + "\n")


def read_result(folder: Path, part: str) -> PartResult | None:
    """None where the part has not begun."""
    path = result_path(folder, part)
    if not path.exists():
        return None
    tree = json.loads(path.read_text(encoding="utf-8"))
    checks = tuple(
        Check(**check | {"figures": tuple(Figure(**figure) for figure in check["figures"])}) for check in tree["checks"]
    )
    return PartResult(**tree | {"checks": checks})


NOT_PASSED, NOT_ASKED = 1, 3


def exit_status(results: Sequence[PartResult], missing: Sequence[str]) -> tuple[int, str]:
    """The status of the command, and a line that says why it is not 0: NOT_PASSED where something failed, else
    NOT_ASKED where something was left out. missing: parts that were not begun."""
    left = [name for result in results for name in result.left_out] + list(missing)
    if failed := [result.part for result in results if result.failed]:
        return NOT_PASSED, f"exit status {NOT_PASSED}: {', '.join(failed)} did not pass"
    return (NOT_ASKED, f"exit status {NOT_ASKED}: nothing failed; not asked: {', '.join(left)}") if left else (0, "")


REPORT = "gate.md"


def lines(result: PartResult) -> list[str]:
    """Lines on one part, for a console."""
    checks = [f"    {_mark(check)} {check.what}: {check.found}" for check in result.checks]
    why = [f"    {result.why}"] if result.why else []
    return [f"{result.part}: {result.status}, {result.seconds:.1f} s", *checks, *why]


def _mark(check: Check) -> str:
    return "-- " if check.left_out else "ok " if check.passed else "NO "


def summary(results: Sequence[PartResult]) -> str:
    """One line, such as: 8 of 10 parts passed, 2 left out (engines, bench); 241 s."""
    by_status: dict[str, list[str]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result.part)
    good = len(by_status.pop("passed", []))
    others = [f"{len(names)} {status} ({', '.join(names)})" for status, names in by_status.items()]
    seconds = sum(result.seconds for result in results)
    return f"{', '.join([f'{good} of {len(results)} parts passed', *others])}; {seconds:.0f} s"


def write_report(folder: Path, device: str, results: Sequence[PartResult], missing: Sequence[str] = ()) -> Path:
    """One page: parts, figures against the device and the cost model, what failed, what was left out. Beside it
    GATE, with every check, and the times by which costs are fitted."""
    status, why = exit_status(results, missing)
    outcome = {0: "passed", NOT_PASSED: "did not pass", NOT_ASKED: "nothing failed, not everything was asked"}[status]
    page = [f"# The gate on {device}: {outcome}", "", summary(results), *[why] * bool(why)]
    of_parts = [
        [one.part, one.status, f"{one.seconds:.1f}", f"{len(one.checks)}", f"{len(one.left_out)}"] for one in results
    ]
    page += ["", markdown_table(("part", "outcome", "s", "checks", "left out"), of_parts)]
    every = [(result.part, check) for result in results for check in result.checks]
    if figures := [_row(figure) for _, check in every for figure in check.figures]:
        heads = ("figure", "measured", "the device has", "of it", "the cost model says", "of it")
        page += ["", markdown_table(heads, figures)]
    noted = [(part, check) for part, check in every if not check.passed or check.left_out]
    page += [""] * bool(noted) + [f"- {_mark(check)}{part}, {check.what}: {check.found}" for part, check in noted]
    page += ["", *(f"- {result.part}: {result.why}" for result in results if result.why)]
    write_text(folder / REPORT, "\n".join(page).rstrip() + "\n")
    profiles = sorted(folder.glob("*.profile.json"))
    tree = {
        "device": device,
        "status": status,
        "parts": [asdict(result) for result in results],
        "profile": json.loads(profiles[0].read_text(encoding="utf-8")) if profiles else None,
    }
    write_text(folder / GATE, json.dumps(tree, indent=1) + "\n")
    return folder / REPORT


def _row(figure: Figure) -> list[str]:
    def against(other: float | None) -> list[str]:
        return ["-", "-"] if other is None else [amount(other, figure.unit), f"{figure.value / other:.0%}"]

    return [figure.what, amount(figure.value, figure.unit), *against(figure.card), *against(figure.model)]


def amount(value: float, unit: str) -> str:
    """Such as 3.21 GB/s."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"
