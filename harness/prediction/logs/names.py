"""Names that training software has for what it logs, as its sources have them; the versions read stand beside each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Framework:
    """Names of one framework.

    marks: numbers that only its logs have. seconds: by fields of StepRow, names whose values add up to each. logged: by
    fields of Workload, `samples` and others, names of which the first that is there counts. settings: by fields of
    Workload, and devices, endings of dotted names, where * is anything. overlaps: numbers that there are only where
    generation goes on beside training, with the schedule that it then is; a wait for samples is what `waits` says.
    interrupted: times of what only some steps do, as evaluation; those are left out. scores_apart: whether both
    scorings have times of their own, so that what is not logged was not done."""

    name: str
    version: str
    marks: tuple[str, ...]
    seconds: Names
    logged: Names
    settings: Names
    overlaps: Mapping[str, str] = field(default_factory=dict)
    waits: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    scores_apart: bool = False


VERL = Framework(
    name="verl",
    version="0.8.0.dev, b178a3c: trainer/ppo/{ray_trainer,metric_utils}.py, experimental/*_policy",
    marks=("timing_s/step", "timing_s/update_actor"),
    seconds={
        "step_s": ("timing_s/step",),
        "rollout_s": ("timing_s/gen",),
        "generate_s": ("timing_s/generate_sequences",),
        "old_log_prob_s": ("timing_s/old_log_prob",),
        "ref_log_prob_s": ("timing_s/ref",),
        "update_s": ("timing_s/update_actor",),
        "reward_s": ("timing_s/reward",),
        "sync_s": ("timing_s/update_weights", "timing_s/sync_rollout_weights", "timing_s/param_sync"),
        "serial_s": ("timing_s/adv", "timing_s/values", "timing_s/update_critic"),
    },
    logged={
        "prompt_mean": ("prompt_length/mean",),
        "response_mean": ("response_length/mean",),
        "response_max": ("response_length/max",),
        "clipped_share": ("response_length/clip_ratio",),
        "tokens": ("perf/total_num_tokens",),
        "tokens_per_s_of_one": ("perf/throughput",),  # device
    },
    settings={
        "model": ("actor_rollout_ref.model.path",),
        "batch_groups": ("data.train_batch_size",),
        "group_size": ("actor_rollout_ref.rollout.n",),
        "cap": ("data.max_response_length",),
        "mini_batch": ("actor_rollout_ref.actor.ppo_mini_batch_size",),  # prompts
        "tensor_parallel": ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
        "slots": ("actor_rollout_ref.rollout.max_num_seqs",),
        "nodes": ("trainer.nnodes",),
        "per_node": ("trainer.n_gpus_per_node",),
        "rollout_nodes": ("rollout.nnodes",),
        "rollout_per_node": ("rollout.n_gpus_per_node",),
        "max_staleness": ("async_training.staleness_threshold",),
    },
    overlaps={
        "trainer/idle_ratio": "fully_async",
        "fully_async/count/current_param_version": "fully_async",
        "fully_async/count/stale_samples_processed": "fully_async",
        "timing_s/param_sync": "fully_async",
        "timing_s/generate_async": "one_step_off",
        "timing_s/sync_rollout_weights": "one_step_off",
    },
    waits=("timing_s/gen",),
    interrupted=("timing_s/testing", "timing_s/save_checkpoint"),
    scores_apart=True,
)

NEMO_RL = Framework(
    name="NeMo-RL",
    version="0.6.0, 7ea279a: algorithms/grpo.py, algorithms/utils.py, experience/rollouts.py, rollout_manager.py",
    marks=("timing/train/total_step_time",),
    seconds={
        "step_s": ("timing/train/total_step_time",),
        "rollout_s": ("timing/train/generation",),
        "log_probs_s": ("timing/train/policy_and_reference_logprobs",),
        "update_s": ("timing/train/policy_training",),
        "reward_s": ("timing/train/reward_calculation",),
        "sync_s": ("timing/train/prepare_for_generation/total", "timing/train/weight_sync"),
        "serial_s": ("timing/train/data_processing", "timing/train/advantage_calculation"),
        "sharing_only_s": ("timing/train/logprob_inference_prep", "timing/train/training_prep"),
    },
    logged={
        "prompt_mean": ("train/mean_prompt_length",),
        "response_mean": ("train/gen_tokens_per_sample/mean", "train/mean_gen_tokens_per_sample"),
        "response_max": ("train/gen_tokens_per_sample/max", "train/max_gen_tokens_per_sample"),
        "clipped_share": ("train/truncation_rate",),
        "samples_per_s": ("performance/samples_per_sec",),
        "tokens_per_s_of_one": ("performance/tokens_per_sec_per_gpu",),
        "tokens_per_s_together": ("performance/tokens_per_sec",),
    },
    settings={
        "model": ("policy.model_name",),
        "batch_groups": ("num_prompts_per_step",),
        "group_size": ("num_generations_per_prompt",),
        "cap": ("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
        "global_batch": ("policy.train_global_batch_size",),  # samples
        "tensor_parallel": ("policy.generation.*.tensor_parallel_size",),
        "nodes": ("cluster.num_nodes",),
        "per_node": ("cluster.gpus_per_node",),
        "shared": ("policy.generation.colocated.enabled",),
        "rollout_nodes": ("policy.generation.colocated.resources.num_nodes",),
        "rollout_per_node": ("policy.generation.colocated.resources.gpus_per_node",),
        "max_staleness": ("async_grpo.max_trajectory_age_steps",),
    },
    overlaps={"timing/train/exposed_generation": "fully_async", "train/avg_trajectory_age": "fully_async"},
    waits=("timing/train/exposed_generation",),
    interrupted=(
        "timing/train/checkpointing",
        "timing/train/idle/validation",
        "timing/validation/total_validation_time",
    ),
)

SLIME = Framework(
    name="slime",
    version="0.3.1, 624b824: observability/train_metric_utils.py, rollout_metrics.py, backends/megatron_utils/actor.py",
    marks=("perf/step_time", "perf/actor_train_time", "perf/rollout_time"),
    seconds={
        "step_s": ("perf/step_time",),
        "rollout_s": ("perf/rollout_time",),
        "old_log_prob_s": ("perf/log_probs_time",),
        "ref_log_prob_s": ("perf/ref_log_probs_time",),
        "update_s": ("perf/actor_train_time",),
        "sync_s": ("perf/update_weights_time",),
        "serial_s": ("perf/data_preprocess_time",),
        "sharing_only_s": ("perf/sleep_time", "perf/wake_up_time"),
    },
    logged={
        "response_mean": ("rollout/response_len/mean", "rollout/response_lengths"),
        "response_max": ("rollout/response_len/max",),
        "clipped_share": ("rollout/truncated_ratio",),
        "tokens_a_sample": ("rollout/total_lengths",),
    },
    settings={
        "model": ("hf_checkpoint",),
        "batch_groups": ("rollout_batch_size",),
        "group_size": ("n_samples_per_prompt",),
        "cap": ("rollout_max_response_len",),
        "global_batch": ("global_batch_size",),
        "tensor_parallel": ("rollout_num_gpus_per_engine",),
        "nodes": ("actor_num_nodes",),
        "per_node": ("actor_num_gpus_per_node",),
        "shared": ("colocate",),
        "rollout_devices": ("rollout_num_gpus",),
    },
    waits=("perf/train_wait_time",),
    interrupted=("perf/save_model_time",),
    scores_apart=True,
)

TRL = Framework(
    name="TRL",
    version="1.10.0.dev0, f2cd577: trainer/grpo_trainer.py, extras/profiling.py, experimental/async_grpo",
    marks=("step_time", "train/step_time", "training_tok/s", "train/training_tok/s"),
    seconds={
        "step_s": ("step_time", "train/step_time"),
        "rollout_s": (
            "profiling/Time taken: GRPOTrainer.vLLM.generate",
            "profiling/Time taken: GRPOTrainer.transformers.generate",
            "profiling/Time taken: GRPOTrainer.transformers.generate_batch",
        ),
        "reward_s": ("profiling/Time taken: GRPOTrainer._calculate_rewards",),
        "sync_s": ("profiling/Time taken: GRPOTrainer.sync_weights", "weight_sync_time_s", "train/weight_sync_time_s"),
    },
    logged={
        "response_mean": ("completions/mean_length", "train/completions/mean_length"),
        "response_max": ("completions/max_length", "train/completions/max_length"),
        "clipped_share": ("completions/clipped_ratio", "train/completions/clipped_ratio"),
    },
    settings={
        "model": ("model_name_or_path", "_name_or_path"),
        "group_size": ("num_generations",),
        "cap": ("max_completion_length",),
        "per_device": ("per_device_train_batch_size",),
        "accumulated": ("gradient_accumulation_steps",),
        "tensor_parallel": ("*_tensor_parallel_size",),
        "max_staleness": ("max_staleness",),
    },
    overlaps={"training_tok/s": "fully_async", "train/training_tok/s": "fully_async"},
)

PRIME_RL = Framework(
    name="prime-rl",
    version="0.8.0, 559b447: trainer/rl/train.py, orchestrator/orchestrator.py, monitors/file.py",
    marks=("time/step", "time/forward_backward", "time/wait_for_batch"),
    seconds={
        "step_s": ("time/step",),
        "update_s": ("time/forward_backward",),
        "sync_s": ("time/broadcast_weights",),
        "serial_s": ("time/load_data",),
    },
    logged={
        "prompt_mean": ("train/agg/effective/num_input_tokens/mean",),
        "response_mean": ("train/agg/effective/num_output_tokens/mean",),
        "response_max": ("train/agg/effective/num_output_tokens/max",),
        "clipped_share": ("train/agg/effective/agent/is_truncated/mean",),
        "samples": ("progress/rollouts",),
        "groups": ("progress/tasks",),
        "max_staleness": ("off_policy/max",),
    },
    settings={
        "model": ("model.name",),
        "group_size": ("group_size", "rollouts_per_example"),
        "global_batch": ("batch_size",),
        "cap": ("max_completion_tokens", "sampling.max_tokens"),
        "rollout_devices": ("deployment.num_infer_gpus",),
        "train_devices": ("deployment.num_train_gpus",),
        "tensor_parallel": ("inference.parallel.tp",),
        "max_staleness": ("max_off_policy_steps",),
    },
    overlaps={"time/step": "fully_async"},  # it always does
    waits=("time/wait_for_batch",),
    interrupted=("time/save_ckpt",),
)

CADENCE = Framework(
    name="Cadence",
    version="this checkout",
    marks=("time/iteration_s",),
    seconds={
        "step_s": ("time/iteration_s",),
        "rollout_s": ("time/generate_s",),
        "old_log_prob_s": ("time/old_log_prob_s",),
        "ref_log_prob_s": ("time/reference_s",),
        "update_s": ("time/update_actor_s",),
        "sync_s": ("time/weight_sync_exposed_s",),
    },
    logged={
        "response_mean": ("response_length/mean",),
        "clipped_share": ("response_length/truncated",),
        "samples": ("samples",),
    },
    settings={
        "model": ("model.name",),
        "device": ("device.name",),
        "batch_groups": ("algorithm.batch_groups",),
        "group_size": ("algorithm.group_size",),
        "tensor_parallel": ("engine.tensor_parallel",),
        "slots": ("engine.slots",),
        "optimizer_steps": ("algorithm.mini_batches",),
        "schedule": ("schedule.name",),
        "max_staleness": ("schedule.max_staleness",),
        "nodes": ("cluster.devices",),
        "cap": ("cost.lengths.cap",),
    },
    waits=("time/wait_for_samples_s",),
    scores_apart=True,
)

MLPERF = Framework(
    name="MLPerf GRPO",
    version="mlcommons/logging 7bbf792, training 6.1.0 (qwen35_397b_grpo); tracked_stats of NeMo-RL's logger for it",
    marks=("mllog/train_step_time",),
    seconds={
        "step_s": ("mllog/train_step_time",),
        "rollout_s": ("mllog/generation_time",),
        "update_s": ("mllog/policy_training_time",),
        "sync_s": ("mllog/weight_sync_time",),
    },
    logged={},
    settings={
        "batch_groups": ("num_prompts_per_step",),
        "group_size": ("num_generations_per_prompt",),
        "global_batch": ("global_batch_size",),
        "cap": ("max_sequence_length",),
        "tensor_parallel": ("generation_tensor_parallelism",),
        "nodes": ("number_of_nodes",),
        "per_node": ("accelerators_per_node",),
    },
    overlaps={"mllog/exposed_generation_time": "fully_async"},
    waits=("mllog/exposed_generation_time",),
)

FRAMEWORKS = (VERL, NEMO_RL, SLIME, TRL, PRIME_RL, CADENCE, MLPERF)
