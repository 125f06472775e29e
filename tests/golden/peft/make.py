"""Makes the files beside it with PEFT itself: `python tests/golden/peft/make.py` in an environment with torch, transformers and peft.

A small Qwen 2 (it has biases) with random weights, a LoRA and a DoRA adapter of it as PEFT saves them, and what PEFT computes with them:
logits, and the gradients of every adapter tensor for the loss sum(logits * direction).
"""

import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CASES = {
    "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {
            "v_proj": 2,
            "model.layers.1.self_attn.q_proj": 6,
            "^model.layers.0.mlp.down_proj": 3,
        },
        "alpha_pattern": {"layers.0.self_attn.v_proj": 12, "down_proj": 5},
    },
    "dora": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "use_dora": True,
        "modules_to_save": ["input_layernorm"],
    },
}


def base() -> AutoModelForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPE,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def main() -> None:
    shutil.rmtree(HERE / "base", ignore_errors=True)
    base().save_pretrained(HERE / "base")
    tokens = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    direction = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))
    for kind, options in CASES.items():
        shutil.rmtree(HERE / kind, ignore_errors=True)
        model = get_peft_model(
            base(), LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, **options)
        ).eval()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if (
                parameter.requires_grad
            ):  # B begins at zero: move everything, so that every gradient counts
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        logits = model(tokens).logits
        (logits * direction).sum().backward()
        model.save_pretrained(HERE / kind)
        (HERE / kind / "README.md").unlink()
        gradients = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        named = get_peft_model_state_dict(model, state_dict=gradients)
        seen = {f"gradient.{name}": value.contiguous() for name, value in named.items()}
        save_file(
            {"tokens": tokens, "direction": direction, "logits": logits.detach(), **seen},
            HERE / kind / "seen.safetensors",
        )


if __name__ == "__main__":
    main()
