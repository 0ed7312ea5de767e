# Makes the reference results again that the README and docs/convergence.md show: a few hours on two quiet cores.
set -eu

# matrix_new/, devices apart and in rounds
make matrix SCHEDULES=rolling_update,windowed,lending STALENESS=2 CORRECTIONS=none,clip,tis ITERATIONS=70 SEEDS=3 DEVICES=2 ARGS=schedule.split.rollout=1
make matrix SCHEDULES=partial_rollout_sync,tail_rounds,sorted_batches STALENESS=2 CORRECTIONS=none,clip,tis ITERATIONS=70 SEEDS=3 DEVICES=2 ARGS=schedule.split.rollout=actor

# matrix_tiny/
make matrix SCHEDULES=fully_async STALENESS=0,2,8 ITERATIONS=60 SEEDS=3 EXPERIMENT=matrix-tiny \
  CORRECTIONS=clip@5e-4,clip_4@1.25e-4,decoupled_4@1.25e-4,none@1.25e-4,dual_clip@5e-4,tis@2.5e-4,mis@2.5e-4,sequence_mis@2.5e-4,cispo@1.25e-4,gspo@5e-4,m2po@5e-4 \
  ARGS="algorithm.recompute_log_probs=false algorithm.options.unbiased=false cluster.devices=2 schedule.split.rollout=1"

# layouts/
make sweep EXPERIMENT=dense SCHEDULE=fully_async ITERATIONS=40 SEEDS=3 DEVICES=3 ARGS="schedule.split.rollout=1 cluster.oversubscribe=true \
  training.engine=torch,megatron training.tensor_parallel=1,2 training.pipeline_parallel=1,2"
make sweep EXPERIMENT=experts SCHEDULE=fully_async ITERATIONS=40 SEEDS=3 DEVICES=3 ARGS="schedule.split.rollout=1 cluster.oversubscribe=true \
  training.expert_parallel=1,2 model.architecture=qwen3_moe model.experts=4 model.active_experts=2 model.ff=128"

# matrix_text/ and front/
make sample FOLDER=my
TEXT="task.data=my/train.jsonl task.held_out_data=my/test.jsonl algorithm.recompute_log_probs=false"
make matrix SCHEDULES=fully_async STALENESS=0,2,8 ITERATIONS=30 SEEDS=3 EXPERIMENT=matrix-text MODEL=my/model TASK=data \
  CORRECTIONS=clip@5e-4,clip_4@2.5e-4,decoupled_4@1.25e-4,none@2.5e-4,dual_clip@5e-4,tis@5e-4,mis@2.5e-4,sequence_mis@5e-4,cispo@5e-4,gspo@5e-4,m2po@5e-4 \
  ARGS="$TEXT cluster.devices=2 schedule.split.rollout=1"
make compare EXPERIMENT=front-text SEEDS=5 ITERATIONS=30 DEVICES=2 MODEL=my/model TASK=data \
  SCHEDULES=colocate_sync,separated_sync,one_step_off,fully_async@1,fully_async@4,rolling_update,windowed,partial_rollout_sync,tail_rounds,sorted_batches,lending \
  ARGS="$TEXT algorithm.correction=clip algorithm.learning_rate=5e-4"
