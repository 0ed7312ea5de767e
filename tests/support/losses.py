"""Losses by what they need: those of whole batches are others where a batch is cut."""

from harness.config.registries import CORRECTIONS, find

WHOLE_BATCH = [name for name in CORRECTIONS if hasattr(find("algorithm.correction", name), "whole_batch")]
CUTTABLE = sorted(CORRECTIONS.keys() - set(WHOLE_BATCH))
