"""The mirror of a run in MLflow, while the run goes on. The files are the truth: a mirror that is lost costs no run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from harness.metrics.manifest import RunIdentity
from harness.metrics.mlflow_store import (
    COMPLETE,
    Metric,
    MlflowException,
    Store,
    first_line,
    iteration_metrics,
    system_metrics,
)

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker:
    """Mirrors one run. `log` only takes note; a thread writes every `flush_seconds`, so that training never waits.

    As a context manager it ends the run as FINISHED, FAILED, or KILLED (interrupted). Where MLflow's store fails (a
    server that went away, a full disk) the mirror is lost: `on_lost` is told once, on whatever thread saw it, nothing
    more is mirrored, and no call raises. `harness.metrics.mlflow_sync` mends it from the run's folder.
    """

    def __init__(
        self,
        results: Path,
        identity: RunIdentity,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        *,
        on_lost: Callable[[str], None],
        flush_seconds: float = 3.0,
    ) -> None:
        """Create the child run. config: nested mappings, logged flat as params; manifest: of `build_manifest`. The
        caller must hold the run's folder: an earlier try of the same cell and seed that still counts as running is
        dead, and is marked KILLED."""
        self.lost = ""
        """Why nothing is mirrored any more, if so."""
        self.run_id = ""
        self._on_lost = on_lost
        self._pending: list[Metric] = []
        self._system_samples = 0
        self._taking = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._attempt(lambda: self._create(results, identity, config, manifest))
        self._thread = threading.Thread(
            target=self._write_now_and_then, args=(flush_seconds,), name="mlflow-mirror", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, int | float]) -> None:
        """Take note of one iteration's object ("iteration" is the step) and return. NaN and None are left out."""
        self._note(iteration_metrics(metrics, int(time.time() * 1000)))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Take note of what `SystemSampler` found and return."""
        self._note(system_metrics(sample, self._system_samples))
        self._system_samples += 1

    def flush(self) -> None:
        """Write what was noted so far, and wait for it."""
        self._attempt(self._write_pending)

    def finish(self, status: Status = "FINISHED", artifacts: Iterable[Path] = ()) -> None:
        """Stop the thread, write the rest, store `artifacts` (files), and end the run with this status."""
        self._closing.set()
        self._thread.join()
        self._attempt(lambda: self._end(status, artifacts))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._closing.is_set():
            return
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")

    def _create(
        self, results: Path, identity: RunIdentity, config: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        self._store = Store(results)
        self._store.bury(identity)
        self.run_id = self._store.create(identity, config, manifest)

    def _end(self, status: Status, artifacts: Iterable[Path]) -> None:
        self._write_pending()
        self._store.log_files(self.run_id, artifacts)
        if status == "FINISHED":
            self._store.client.set_tag(self.run_id, COMPLETE, "true")
        self._store.client.set_terminated(self.run_id, status)

    def _write_now_and_then(self, seconds: float) -> None:
        """Consumes what was noted, every `seconds`; ends when the tracker closes or the mirror is lost."""
        while not self.lost and not self._closing.wait(seconds):
            self.flush()

    def _note(self, metrics: list[Metric]) -> None:
        with self._taking:
            if not self.lost:
                self._pending += metrics

    def _write_pending(self) -> None:
        with self._writing:
            with self._taking:
                pending, self._pending = self._pending, []
            self._store.log_metrics(self.run_id, pending)

    def _attempt(self, mirror: Callable[[], None]) -> None:
        """Do it, unless the mirror is lost; it is lost from now on where that fails."""
        if self.lost:
            return
        try:
            mirror()
        except (MlflowException, OSError) as failure:
            with self._taking:
                first, self.lost = not self.lost, first_line(failure)
                self._pending.clear()
            if first:
                self._on_lost(self.lost)
