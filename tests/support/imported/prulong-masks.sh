#!/bin/bash
#SBATCH --nodes=2
model=${MODEL:-"models/llama-3.1-8b-instruct"}
bsz=${BSZ:-16}
seq=${SEQ:-1}
lr=${LR:-1e-5}
steps=${STEPS:-1000}
save_steps=${SAVE:-200}
warmup=${WARMUP:-0.1}
min_lr_ratio=${MIN_LR_RATIO:-0.01}
seq_parallel_size=${SEQ_PARALLEL_SIZE:-2}
fsdp=${FSDP:-"2"}
gc=${GC:-"1"}
max_toks=${MAX_TOKS:-65536}
end_head_sparsity=${END_HEAD_SPARSITY:-0.7}
start_head_sparsity=${START_HEAD_SPARSITY:-0.0}
freeze_weights=${FREEZE_WEIGHTS:-true}
freeze_masks=${FREEZE_MASKS:-false}
toggle_type=${TOGGLE_TYPE:-"local"}
context_window_if_toggled=${CONTEXT_WINDOW_IF_TOGGLED:-1024}
load_masks_from=${LOAD_MASKS_FROM:-"${model}/masks.tsv"}
dataset=${DATASET:-"datasets/book-65536@0.7 datasets/fineweb-edu@0.3"}
num_gpus=$(nvidia-smi -L | wc -l)
out_dir="checkpoints/run_$(date +%s)"
export LOGIT_BLOCK_SIZE=2048
export COLOUR="blue"
base_arguments=(
    --report_to tensorboard
    --learning_rate $lr
    --max_grad_norm 1.0
    --save_total_limit 3
    --bf16
)
torchrun --nproc-per-node=$num_gpus -m training.lh_train_language_model "${base_arguments[@]}"
