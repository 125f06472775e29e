#!/bin/bash
#SBATCH --nodes=4
model=${MODEL:-"models/llama-3.1-8b"} # !!! -> a checkpoint of PruLong
bsz=${BSZ:-64}
seq=${SEQ:-1}
lr=${LR:-2e-5}
steps=${STEPS:-250}
fsdp=${FSDP:-"1"}
start_head_sparsity=${START_HEAD_SPARSITY:-0.0}
end_head_sparsity=${END_HEAD_SPARSITY:-0.0}
mask_learning_rate=${MASK_LEARNING_RATE:-0}
freeze_weights=${FREEZE_WEIGHTS:-false}
freeze_masks=${FREEZE_MASKS:-true}
seq_parallel_size=${SEQ_PARALLEL_SIZE:-2}
dataset=${DATASET:-"datasets/sft"}
domains=${DOMAINS:-"ultrachat@0.8 books@0.2"}
if [[ $freeze_masks == "true" ]]; then
    extra_name="${extra_name}_mfrozen"
fi
accu=$(($bsz / $seq / $num_gpus / $num_nodes))
export WANDB_MODE="offline"
base_arguments=(
    --report_to wandb
    --learning_rate $lr
    --start_head_sparsity $start_head_sparsity
    --freeze_mask_parameters $freeze_masks
    --lr_scheduler_type cosine

    # what only fine-tuning has
    --apply_instruct_masks
    --token_scaled_loss
    --load_masks_sparsity 0.0
)
base_arguments+=( --tokenized_mds_train )
for domain in $domains; do
    base_arguments+=( $dataset/$domain )
done
base_arguments+=( $@ )
${header} "${base_arguments[@]}" 2>&1 | tee -a $out_dir/log.out
