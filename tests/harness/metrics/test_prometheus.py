"""What Prometheus reads of a run, parsed as Prometheus would."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from harness.service.metrics import run_text

ROLES = [
    {"name": "rollout[0]", "state": "computes", "heard_s_ago": 0.5, "version": 3},
    {"name": "actor[0]", "state": "ended: killed by signal 9", "heard_s_ago": None, "version": None},
]


def test_a_run_is_its_newest_iteration_and_what_is_known_of_each_role() -> None:
    health = {"seconds": 12.5, "version": 4, "roles": ROLES}
    text = run_text(health, {"throughput/samples_per_s": 900.0, "train/grad_norm": float("nan")}).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert str(found.pop(("cadence_metric", "train/grad_norm"))) == "nan"
    assert found == {
        ("cadence_run_seconds",): 12.5,
        ("cadence_version", "trainer"): 4,
        ("cadence_version", "rollout[0]"): 3,
        ("cadence_role_up", "rollout[0]"): 1,
        ("cadence_role_up", "actor[0]"): 0,
        ("cadence_role_heard_seconds_ago", "rollout[0]"): 0.5,
        ("cadence_metric", "throughput/samples_per_s"): 900.0,
    }
