"""What a reader needs to trust the page or to make it again: gate, ledgers, what was held equal, code and machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from harness.comparison.fairness import fairness_key
from harness.comparison.result import Comparison


def checks(comparison: Comparison) -> list[tuple[str, bool | None, list[str]]]:
    """(name, whether it passed, lines) of the equivalence gate and the ledgers; None where it has not run."""
    gate, ledgers = comparison.gate, comparison.conservation
    ungated = "no real run is in this comparison" if comparison.simulated else "the gate has not run for these runs"
    return [
        ("Equivalence gate", gate.passed, gate.told()) if gate else ("Equivalence gate", None, [ungated]),
        ("Ledgers", ledgers.passed, [ledgers.told(), *ledgers.problems])
        if ledgers
        else ("Ledgers", None, ["they have not been checked"]),
    ]


def equal_settings(comparison: Comparison) -> dict[str, str]:
    """The fairness key that all cells share, by path of setting."""
    cell = comparison.cells[0]
    key = fairness_key(cell.runs[0].config, cell.seeds, comparison.axes)
    shared = {
        name: value
        for name, value in key.items()
        if all(
            fairness_key(other.runs[0].config, other.seeds, comparison.axes).get(name) == value
            for other in comparison.cells
        )
    }
    return {name: _told(value) for name, value in shared.items()}


def made_with(comparison: Comparison) -> dict[str, list[str]]:
    """Facts of the manifests, each with every value that occurs: code, Python, packages, machine."""
    manifests = [run.manifest for cell in comparison.cells for run in cell.runs]
    facts: dict[str, list[Any]] = {
        "code": [_commit(manifest["git"]) for manifest in manifests],
        "python": [manifest["python"] for manifest in manifests],
        "processor": [_processor(manifest["hardware"]) for manifest in manifests],
        "accelerators": [", ".join(manifest["hardware"]["gpus"]) or "none" for manifest in manifests],
        "platform": [manifest["hardware"]["platform"] for manifest in manifests],
    }
    for package in sorted({name for manifest in manifests for name in manifest["packages"]}):
        versions = [manifest["packages"].get(package) for manifest in manifests]
        if any(versions):
            facts[package] = [version or "not installed" for version in versions]
    return {name: list(dict.fromkeys(values)) for name, values in facts.items()}


def commands(comparison: Comparison) -> list[tuple[str, int, str, str, str]]:
    """(cell, seed, when it began, its folder, its command) of every run."""
    return [
        (
            cell.label,
            run.identity.seed,
            run.manifest["started_at"],
            "/".join(run.path.parts[-3:]),
            _command(run.manifest["command"]),
        )
        for cell in comparison.cells
        for run in cell.runs
    ]


def facts_list(facts: Mapping[str, str | Iterable[str]], name: str) -> str:
    """A definition list."""
    items = [
        f"<div><dt>{escape(key)}</dt><dd>{escape(value if isinstance(value, str) else ' / '.join(value))}</dd></div>"
        for key, value in facts.items()
    ]
    return f'<dl class="{name}">{"".join(items)}</dl>'


def checks_html(comparison: Comparison) -> str:
    words = {True: ("passed", "good"), False: ("failed", "bad"), None: ("not run", "unknown")}
    parts = []
    for name, passed, lines in checks(comparison):
        word, grade = words[passed]
        told = "".join(f"<p>{escape(line)}</p>" for line in lines)
        parts.append(f'<div class="check {grade}"><h3>{escape(name)}: {word}</h3>{told}</div>')
    return "".join(parts)


def commands_table(comparison: Comparison) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(cell)}</th><td>{seed}</td><td>{escape(began)}</td>'
        f"<td><code>{escape(folder)}</code></td><td><code>{escape(command)}</code></td></tr>"
        for cell, seed, began, folder, command in commands(comparison)
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("cell", "seed", "began", "folder", "command"))
    return f'<table class="runs"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _command(words: list[str]) -> str:
    """As one would type it."""
    program = ["python", "-m", "harness"] if words[0] == "__main__.py" else words[:1]
    return shlex.join([*program, *words[1:]])


def _commit(git: Mapping[str, Any] | None) -> str:
    if git is None:
        return "not tracked by git"
    return f"{git['commit'][:12]}{', with changes' if git['dirty'] else ''}"


def _processor(hardware: Mapping[str, Any]) -> str:
    memory = hardware["memory_bytes"] / 2**30
    return f"{hardware['cpu']}, {hardware['cores']} cores, {memory:.0f} GiB"


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
