"""A job as a client of the service describes it: a prompt, a response of any length, and two tasks."""

COLUMNS = {"prompt": {"dtype": "int64"}, "response": {"dtype": "int64", "ragged": True}}
TASKS = {
    "rollout": {"reads": ["prompt"], "writes": ["response"], "lease_s": 10.0},
    "train": {"reads": ["prompt", "response"], "whole_groups": True},
}
