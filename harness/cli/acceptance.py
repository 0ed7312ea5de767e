"""`make chaos`, `make gate-gpu`: random faults over runs and what is promised of them; what only a machine shows."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.cli.steps import working
from harness.config import ConfigError
from harness.config.fields import whole_number
from harness.metrics.formatting import say

DEFAULTS = {"first": 0, "seeds": 800, "limit": 1800, "real": 0}


def chaos(arguments: Sequence[str], results: Path, console: Console) -> int:
    """seeds: simulated runs, from seed `first` on; limit: seconds after which none is begun; real: faults on real
    runs, numbered from `first` on. Writes results/chaos/. 1 where a promise was broken."""
    chosen, folder = _chosen(arguments), results / "chaos"
    code = _simulated(chosen, folder, console) if chosen["seeds"] else 0
    return max(code, _real(chosen, folder, console) if chosen["real"] else 0)


def _chosen(arguments: Sequence[str]) -> dict[str, int]:
    chosen = dict(DEFAULTS)
    for name, value in own_arguments(arguments, *DEFAULTS)[0].items():
        if (number := whole_number(value)) is None:
            raise ConfigError(f"{name}={value} is no number; use a whole number from 0 on")
        chosen[name] = number
    return chosen


def _simulated(chosen: dict[str, int], folder: Path, console: Console) -> int:
    from harness.acceptance.chaos.simulated import ChaosCampaign, repeat_command, run_campaign, summary, write_campaign

    campaign, late = ChaosCampaign(chosen["first"], chosen["seeds"]), ""
    try:
        with working("simulating", console) as show:
            run_campaign(campaign, chosen["limit"], lambda said: show(f"simulating: {said}"))
    except TimeoutError as error:
        late = f"{error}: a run that had begun did not end; is the machine busy? What ended is below"
    finally:
        paths = write_campaign(campaign, folder)
    if late:
        say(console, late, "red")
    say(console, summary(campaign))
    for one in campaign.failed:
        line = f"{repeat_command(one.seed)}   {one.schedule}: {one.problems[0].splitlines()[0]}"
        say(console, line, "red")
    for path in paths:
        say(console, path)
    return 1 if campaign.failed or late else 0


def _real(chosen: dict[str, int], folder: Path, console: Console) -> int:
    from harness.acceptance.chaos.real import draw_real_faults, feel, line_of, write_felt

    felt, began = [], time.monotonic()
    for fault in draw_real_faults(chosen["real"], chosen["first"]):
        if time.monotonic() - began > chosen["limit"]:
            say(console, f"no time was left for faults {fault.number} and beyond", "yellow")
            break
        with working(f"fault {fault.number}: {fault.what}, {fault.whom}, {fault.schedule}", console):
            felt.append(feel(fault, folder / "runs"))
        style = "red" if felt[-1].problems else ""
        say(console, line_of(felt[-1]), style)
        paths = write_felt(felt, folder)
    for path in paths if felt else ():
        say(console, path)
    return 1 if any(one.problems for one in felt) else 0


def gate_gpu(arguments: Sequence[str], results: Path, console: Console) -> int:
    """Run the parts that are missing; returns 0 where all passed, 1 where some failed, 3 where some were left out."""
    from harness.acceptance.gpu_gate import gate

    given, _ = own_arguments(arguments, "device", "parts", "force", "limit_s")
    return gate.run(given, results, lambda line: say(console, line))
