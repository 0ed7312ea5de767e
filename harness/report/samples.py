"""Samples of a run to look at: problem, response, reward and its parts, versions of its tokens, and its fate."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.metrics.definitions import CUSTOM
from harness.metrics.formatting import number, plural
from harness.metrics.run_files import load_kept, load_known_config, load_manifest, load_samples
from harness.tasks import Tokenizer, load_tokenizer

_MOST_REWARDS = 16  # of a group
_MOST_IDS = 256  # tokens that are shown where there is no text


def shortened(text: str, characters: int) -> str:
    """Text of so many characters at most, with how many more there are."""
    left = len(text) - characters
    return text if left <= 0 else f"{text[:characters]}… ({plural(left, 'character')} more)"


@dataclass(frozen=True)
class ShownSample:
    """One sample as texts for people. facts: by name; prompt, answer, response: None where not kept."""

    title: str
    facts: Mapping[str, str]
    prompt: str | None
    answer: str | None
    response: str | None

    @property
    def texts(self) -> dict[str, str]:
        """Prompt, answer and response, of which each says so where it is not there."""
        texts = {"prompt": self.prompt, "answer": self.answer, "response": self.response}
        return {name: "(not kept)" if text is None else text for name, text in texts.items()}

    def __str__(self) -> str:
        lines = [self.title, *(f"{name}: {text}" for name, text in self.facts.items())]
        return "\n".join([*lines, *(f"{name}:\n{text}" for name, text in self.texts.items())])


class RunSamples:
    """The samples of the run in a folder, also while it goes on. Raises DamagedFile where it is none."""

    def __init__(self, folder: Path, samples: pa.Table | None = None) -> None:
        """samples: samples.parquet, where it has been read already."""
        self.folder = folder
        self.config = load_known_config(folder)
        self.samples = load_samples(folder) if samples is None else samples

    @cached_property
    def held_out(self) -> pa.Table:
        """eval_responses.parquet."""
        return load_kept(self.folder, "eval_responses")

    @property
    def versions(self) -> list[int]:
        """Versions whose held-out responses are there, in order."""
        return np.unique(self.held_out["version"].to_numpy()).tolist()

    @property
    def counts(self) -> dict[str, str]:
        """Sentences on what there is."""
        fates = self.samples["fate"].value_counts().to_pylist()
        rows = pc.count_distinct(self.samples["row"]).as_py()
        return {
            "samples": ", ".join(f"{one['counts']:,} {one['values']}" for one in fates) or "none yet",
            "problems": f"{rows:,} rows" if rows else "their rows are not known",
            "held-out responses": f"{len(self.held_out):,}, of versions {', '.join(map(str, self.versions)) or 'none'}",
        }

    def chosen(
        self,
        most: int,
        *,
        sample: int | None = None,
        row: str | None = None,
        dropped: bool = False,
        best: bool | None = None,
        held_out: int | None = None,
    ) -> list[ShownSample]:
        """The first samples of which all that is given holds; or responses of this version to held-out problems.
        best: those with the highest rewards, or with the lowest, come first."""
        table = self.samples if held_out is None else self.held_out
        wanted = {"sample_id": sample, "row": row, "version": held_out}
        chosen = pc.scalar(True)
        for name, value in wanted.items():
            chosen = chosen if value is None else chosen & (pc.field(name) == value)
        if dropped:
            chosen = chosen & ~pc.field("fate").isin(["trained", "in_flight"])
        chosen = chosen if best is None else chosen & pc.is_finite(pc.field("reward"))
        table = table.filter(chosen)
        if dropped:  # one of each group: all of one have the same fate
            _, firsts = np.unique(table["group_id"].to_numpy(), return_index=True)
            table = table.take(firsts[:most])
        if best is not None:
            order = pc.sort_indices(table.select(["reward"]), [("reward", "descending" if best else "ascending")])
            table = table.take(order[:most])
        return self._shown(table.slice(0, most).to_pylist())

    def _shown(self, rows: Sequence[Mapping[str, Any]]) -> list[ShownSample]:
        if rows and "number" in rows[0]:
            return [self._held_out(row) for row in rows]
        problems = self._by("problems", "group_id", {row["group_id"] for row in rows})
        samples = {row["sample_id"] for row in rows}
        responses = {
            key: row
            for name in ("responses", "dropped_responses")
            for key, row in self._by(name, "sample_id", samples).items()
        }
        return [
            self._trained(row, problems.get(row["group_id"], {}), responses.get(row["sample_id"], {})) for row in rows
        ]

    def _by(self, name: str, key: str, values: Iterable[int]) -> dict[int, dict[str, Any]]:
        table = load_kept(self.folder, name, pc.field(key).isin(pa.array(sorted(values), pa.int64())))
        return {row[key]: row for row in table.to_pylist()}

    def _trained(self, row: Mapping[str, Any], problem: Mapping[str, Any], response: Mapping[str, Any]) -> ShownSample:
        facts = {
            "problem": self._problem(row["row"]),
            "fate": self.fate(row),
            **_scores(row),
            "group": self._group(row["group_id"]),
        }
        if row["version_first"] is not None:
            facts["versions"] = _versions(row, response.get("version_runs"))
            if row["lag_worst"] is not None:  # in runs of older versions one that was dropped has no lag
                facts["lag"] = (
                    f"{row['lag_worst']} at worst, {number(row['lag_mean'])} on average: {row['lag_in_flight']} while "
                    f"it was sampled, {row['lag_in_queue']} in the queue"
                )
            facts["length"] = f"{_ended(row)}, on engine {row['engine']}"
        elif response:
            facts["versions"] = _versions(row, response["version_runs"])
            facts["length"] = _ended({**row, "response_tokens": sum(response["loss_mask"])})
        times = {"admitted": "admitted_at", "begun": "started_at", "done": "finished_at", "trained": "trained_at"}
        facts["times"] = ", ".join(
            f"{what} {number(row[at], 2)} s" for what, at in times.items() if row[at] is not None
        )
        prompt = self._text(problem.get("prompt"), row["prompt_text"])
        said = self._text(response.get("response"), row["response_text"])
        return ShownSample(f"sample {row['sample_id']}", facts, prompt, problem.get("answer"), said)

    def _problem(self, row: str | None) -> str:
        """The row, of one that is made up with the task that makes it."""
        if row is None:
            simulated = load_manifest(self.folder)["backend"] != "real"
            return "none: nothing is asked where engines are simulated" if simulated else "of no row that is known"
        return f"{self.config['task']['name']} {row}" if row.isdecimal() else row

    def _group(self, group: int) -> str:
        """The rewards of all samples of a group, by which each is compared."""
        rewards = self.samples.filter(pc.field("group_id") == group)["reward"].to_pylist()
        told = ["–" if reward is None else number(reward) for reward in rewards[:_MOST_REWARDS]]
        return (
            f"{group}, {plural(len(rewards), 'sample')}: {', '.join(told)}{', …' if len(rewards) > len(told) else ''}"
        )

    def _held_out(self, row: Mapping[str, Any]) -> ShownSample:
        how = "greedy" if not row["number"] else f"sampled {row['number']}"
        title = f"held-out {self._problem(row['row'])}, {how}, version {row['version']}"
        facts = {**_scores(row), "length": _ended({**row, "response_tokens": len(row["response"])})}
        prompt, said = (self._text(row[name], row[f"{name}_text"]) for name in ("prompt", "response"))
        return ShownSample(title, facts, prompt, row["answer"], said)

    def fate(self, row: Mapping[str, Any]) -> str:
        """A sentence on what became of a sample, and why."""
        algorithm, engine = self.config["algorithm"], self.config["engine"]
        if row["fate"] == "trained":
            left_out = algorithm.get("mask_truncated") and row["finish_reason"] == "length"
            why = ", but in no loss: the limit on tokens ended it (algorithm.mask_truncated)" if left_out else ""
            why = ", but in no loss: it could not be scored" if row["reward"] is None and row["reward_failed"] else why
            return f"trained in iteration {row['trained_iteration']}{why}"
        reasons = {
            "dropped_stale": "dropped: too old when it was to be trained (schedule.on_stale)",
            "dropped_filtered": f"not trained: its group was refused by algorithm.filter={algorithm.get('filter')}",
            "dropped_baseline": "not trained: the greedy response that those of its group were compared with",
            "dropped_straggler": "dropped: a sample of its group took longer than engine.sample_limit_s="
            f"{engine.get('sample_limit_s')}",
            "dropped_failed": "not trained: a sample of its group could not be scored",
            "dropped_spare": "not trained: admitted beside the batch, and not needed (algorithm.over_sampling)",
            "in_flight": "in flight when the run ended",
        }
        return reasons[row["fate"]]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the run kept, or was made with, where it is on this machine."""
        model = self.config["model"]
        named = model.get("tokenizer") or model.get("checkpoint")
        found = [self.folder / "model", *([Path(named).expanduser()] if named else [])]
        try:
            for folder in found:
                if (folder / "tokenizer.json").is_file():
                    return load_tokenizer(folder.resolve())
            return None if named else load_tokenizer()
        except Exception:  # of a library that has no narrower class: tokens are shown instead
            return None

    def _text(self, tokens: Sequence[int] | None, kept: str | None) -> str | None:
        """The text that was kept, where it is whole; else all tokens as the tokenizer writes them, or their numbers."""
        whole = kept is not None and not kept.endswith("…")
        if whole or tokens is None:
            return kept
        if self._tokenizer is not None and all(0 <= token < 1 << 31 for token in tokens):
            return self._tokenizer.decode(np.asarray(tokens))
        if kept is not None:
            return kept
        more = f" … ({len(tokens) - _MOST_IDS:,} more)" if len(tokens) > _MOST_IDS else ""
        return f"tokens {' '.join(map(str, tokens[:_MOST_IDS]))}{more}"


def _scores(row: Mapping[str, Any]) -> dict[str, str]:
    """The reward and its parts."""
    reward = "none that is known" if row["reward"] is None else number(row["reward"])
    reward += ", exactly right" if row["exact_match"] else ""
    if row.get("failure") or row.get("reward_failed"):
        reward = f"{'none' if row['reward'] is None else reward}: it could not be scored, {row.get('failure') or ''}"
    custom = {name: value for name, value in row.items() if name.startswith(CUSTOM) and value is not None}
    return {"reward": reward} | {name: number(value) for name, value in custom.items()}


def _ended(row: Mapping[str, Any]) -> str:
    reasons = {"stop": "ended by itself", "length": "ended by the limit on tokens", "cut": "cut: it took too long"}
    reasons |= {"turns": "ended by the limit on turns", "failed": "ended: its environment failed"}
    turns = f" in {plural(row['turns'], 'turn')}" if (row["turns"] or 1) > 1 else ""
    environment = f" and {row['environment_tokens']:,} of its environment" if row.get("environment_tokens") else ""
    stale = f" ({row['stale_tokens']:,} too old for a loss)" if row.get("stale_tokens") else ""
    return (
        f"{plural(row['response_tokens'], 'token')}{stale}{environment}{turns}, {reasons.get(row['finish_reason'], '')}"
    )


def _versions(row: Mapping[str, Any], runs: Sequence[Mapping[str, int]] | None) -> str:
    """Versions with their tokens, in the order in which they were sampled."""
    if runs is None:
        return f"{row['version_first']} to {row['version_last']}"
    return ", ".join(f"{run['version']} ({plural(run['tokens'], 'token')})" for run in runs)
