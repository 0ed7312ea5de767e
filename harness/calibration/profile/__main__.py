"""Records a profile on a machine without the rest of Cadence:

python -m harness.calibration.profile experiments/model/qwen7b.yaml profile.json [--layout packed] [--recompute] [--cpu]

`make profile PROFILE=profile.json` fits costs to it, anywhere."""

import argparse
from functools import partial
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from harness.calibration.profile.record import record
from harness.calibration.profile.rows import write_profile
from harness.config import ModelConfig, TrainingConfig
from harness.config.files import read_yaml


def main() -> None:
    """Parse the command line, record a profile and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a file of experiments/model")
    parser.add_argument("profile", type=Path, help="where to write what was timed")
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    parser.add_argument("--recompute", action="store_true", help="compute activations again for the backward pass")
    parser.add_argument("--cpu", action="store_true", help="time one core, even where there is a GPU")
    given = parser.parse_args()
    try:
        model = TypeAdapter(ModelConfig).validate_python(read_yaml(given.model))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        parser.error(f"{given.model} cannot be read: {error}")
    training = TrainingConfig(layout=given.layout, recompute_activations=given.recompute)
    if given.cpu or not torch.cuda.is_available():
        torch.set_num_threads(1)
    device = torch.device("cpu" if given.cpu or not torch.cuda.is_available() else "cuda")
    write_profile(given.profile, record(model, training, device=device, progress=partial(print, flush=True)))


if __name__ == "__main__":
    main()
