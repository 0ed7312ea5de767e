"""Which packages a module may bring along: the rules of docs/architecture.md, in processes of their own."""

import ctypes
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.bare_machine import bare_environment
from tests.support.processes import run_in_processes
from tests.support.project import ROOT, python
from tests.support.real_runs import SMALL, bench

GPU_MACHINE = ("ray", "hydra", "mlflow", "omegaconf")
"""What a machine that only runs and profiles engines need not have."""
HEAVY = ("torch", "ray", "vllm", "transformers")


def modules(folder: str) -> list[str]:
    """Every module of a package, by its dotted name."""
    paths = sorted((ROOT / folder).glob("*.py"))
    found = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem != "__init__"]
    assert found, f"{folder} has no modules"
    return found


def brought_along(module: str, unwanted: tuple[str, ...]) -> list[str]:
    program = f"import sys, {module}\nprint(*(name for name in {unwanted!r} if name in sys.modules))"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_engines_weight_sync_and_losses_load_where_only_torch_and_transformers_are(tmp_path: Path) -> None:
    folders = (
        *("engines", "engines/torch", "engines/vllm", "engines/sglang", "harness/weight_sync", "harness/rl"),
        *("harness/rl/losses", "harness/calibration/profile", "harness/acceptance/gpu_gate"),
        "harness/acceptance/gpu_gate/parts",
    )
    more = {"harness.rl.warm_start", "harness.calibration.profile.fitting", "harness.acceptance.gpu_gate.parts.jobs"}
    together = [module for folder in folders for module in modules(folder) if module not in more]
    program = f"import {', '.join(together)}\nprint('loaded')\nimport msgspec"
    environment = bare_environment(tmp_path)
    done = python("-c", program, env=environment)
    assert done.stdout == "loaded\n" and program.count(",") > 50, done.stderr
    assert done.stderr.strip().endswith("No module named 'msgspec'"), "the machine is not bare"


@pytest.mark.slow
def test_metrics_reports_and_comparisons_load_without_torch_ray_or_vllm() -> None:
    together = [name for folder in ("metrics", "report", "comparison") for name in modules(f"harness/{folder}")]
    assert brought_along(", ".join(together), HEAVY) == []


def test_a_run_is_written_down_without_pandas(tmp_path: Path) -> None:
    """It takes a third of a second, and pyarrow loads it whenever it is asked for an array."""
    rows = "rows = Ragged.from_rows([np.array([1, 2]), np.array([3])])"
    written = (
        f"SampleParts(Path({str(tmp_path)!r}), ['x'], None)",
        "parts.samples([untrained_record(1, 'in_flight', group_id=0, admitted_at=.5, prompt_tokens=3)])",
        "versions = Ragged(np.ones(3, np.float32), rows.lengths)",
        "parts.responses(np.arange(2), [rows, versions, rows, rows], trained=True)",
    )
    imports = (
        "numpy as np\nfrom pathlib import Path\nfrom harness.metrics.parts import SampleParts",
        "from harness.metrics.samples import untrained_record\nfrom harness.transfer_queue import Ragged",
        "import harness.workers.recording",
    )
    program = "\n".join([*imports, rows, f"parts = {written[0]}", *written[1:]])
    assert brought_along(program, ("pandas",)) == []


def test_the_command_line_answers_without_torch_ray_or_mlflow() -> None:
    light = (
        "harness.cli.main, harness.cli.doctor, harness.config.compose as compose, harness.checks.job as job, "
        "harness.config.machine as machine, schedules, harness.studies.papers.experiment"
    )
    planned = "job.plan_job(c, compose.make_schedule(c), machine.this_machine())"
    assert brought_along(f"{light}; c = compose.compose_job(['backend=real']); {planned}", (*HEAVY, "mlflow")) == []
    commands = (
        "harness.cli.bench, harness.cli.compare, harness.cli.plan, harness.cli.predict, harness.studies.papers.run"
    )
    assert brought_along(commands, ("seaborn",)) == [], "a second, and only what draws needs it"


def test_the_package_itself_loads_nothing_and_its_functions_neither_torch_nor_ray() -> None:
    assert brought_along("harness", ("numpy", "pandas", "pyarrow", "rich", "pydantic", *GPU_MACHINE, *HEAVY)) == []
    assert brought_along("cadence.api", ("mlflow", "hydra", "pandas", *HEAVY)) == []


def test_a_package_that_is_brought_along_would_be_noticed() -> None:
    assert brought_along("harness.protocols", ("numpy", "torch")) == ["numpy"]


@pytest.mark.slow
def test_a_real_run_needs_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "ray.py").write_text('raise ImportError("there is no Ray on this machine")')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "absent"), str(ROOT)]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    folder = bench(tmp_path, "no_ray", *SMALL.split(), "loggers=[mlflow]", "iterations=2", "task.reward_processes=2")

    assert (folder / "DONE").is_file()


def threads_of_the_server() -> list[str]:
    return [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{os.getppid()}/task").iterdir()]


def test_they_are_forked_where_no_other_thread_runs() -> None:
    """Of a lock that another thread held at a fork, nobody is left to let go."""
    (threads,) = run_in_processes(threads_of_the_server, [()], timeout_s=60)
    assert len(threads) == 1, threads


def end_by_a_thread_without_python() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(30)


def test_of_one_that_a_native_thread_ended_it_is_told_why_and_where() -> None:
    """As Gloo's own ends its process where a peer sends a tensor of another size."""
    with pytest.raises(RuntimeError) as caught:
        run_in_processes(end_by_a_thread_without_python, [()], timeout_s=60)
    said = str(caught.value)
    assert "process 0 died without a word, exit code -6" in said
    assert re.search(r"frame #\d+: abort", said), said  # the thread that ended the process
    assert re.search(r"Fatal Python error: Aborted.* in end_by_a_thread_without_python", said, re.DOTALL)
