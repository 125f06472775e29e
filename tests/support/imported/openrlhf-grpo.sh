set -x
MODEL=Qwen/Qwen2.5-7B-Instruct

python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 8 \
   --vllm_num_engines 8 \
   --vllm_enable_is_correction \
   --colocate_all_models \
   --pretrain Qwen/Qwen2.5-7B-Instruct \
   --remote_rm_url rewards/math.py \
   --prompt_data data/deepscaler.jsonl \
   --input_key problem \
   --label_key answer \
   --apply_chat_template \
   --advantage_estimator group_norm \
   --init_kl_coef 1e-3 \
   --use_kl_loss \
   --kl_estimator k3 \
   --eps_clip_low_high 0.2 0.27 \
   --dynamic_filtering \
   --dynamic_filtering_reward_range 0 1 \
   --rollout_batch_size 128 \
   --n_samples_per_prompt 8 \
   --train_batch_size 512 \
   --micro_train_batch_size 4 \
   --micro_rollout_batch_size 16 \
   --max_epochs 1 \
   --num_episodes 2 \
   --prompt_max_len 1024 \
   --generate_max_len 2048 \
   --temperature 0.9 \
   --zero_stage 3 \
   --bf16 \
   --gradient_checkpointing \
   --packing_samples \
   --actor_learning_rate 5e-7 \
   --save_path ./runs/qwen-grpo \
   --save_steps 20 \
   --use_wandb token
