"""Tiny checkpoints of the film scorers, in the layouts and with the names in which the real ones are published."""

import json
import math
import zlib

import numpy as np
import torch

from tests.qwen_tokenizer import VOCAB, write_tokenizer

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>")
REWARD = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
UNITS = {"VQ_mean": 0.5, "VQ_std": 2.0, "MQ_mean": -0.25, "MQ_std": 0.5, "TA_mean": 1.0, "TA_std": 4.0}
# Stand-ins for the prompts that the models were trained with, which are not in this repository.
QUESTIONNAIRE = """
Look at this film three times.

First, are its pictures sharp and whole? <|VQ_reward|>
Then, does what moves in it move as things do? <|MQ_reward|>

Last, is it a film of this: {text_prompt}
<|TA_reward|>
"""
SYSTEM = """You look for what is wrong in films:

- things that float, vanish or melt
- hands with too many fingers

Say Yes or No first."""
# What Qwen2-VL's template makes of a message with a video and a text.
TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def noise(name, shape):
    """Numbers in [-1,1) that depend on the name only: the same in every version of every library."""
    with np.errstate(over="ignore"):
        x = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(zlib.crc32(name.encode()))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((x >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape)).float()


def fill(state):
    """Weights for every name of a state dict: fans kept at their scale, biases small, norms and slopes about 0.6."""
    out = {}
    for name, value in state.items():
        x = noise(name, tuple(value.shape))
        if value.ndim > 1:
            x = x * math.sqrt(3 / math.prod(value.shape[1:]))
        else:
            x = 0.6 + 0.3 * x if name.endswith("weight") else 0.1 * x
        out[name] = x
    return out


def clip(frames=4, height=56, width=84, name="clip"):
    """A film (3,T,H,W) in [-1,1]: gratings that move, and a little noise that does not."""
    t, y, x = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    waves = [torch.sin(0.11 * x * (1 + c) + 0.07 * y + 0.4 * t * (c - 1)) for c in range(3)]
    return 0.8 * torch.stack(waves) + 0.2 * noise(name, (3, 1, height, width))


def qwen_tokenizer(folder):
    """The tests' Qwen tokenizer with the tokens around a video."""
    from tokenizers import AddedToken, Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokens.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    ids = {token: tokens.token_to_id(token) for token in SPECIAL}
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "video_token_id": ids["<|video_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
    }


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_qwen2_vl(folder):
    """Qwen2-VL-2B-Instruct as on the hub: flat config of transformers 4, first names. Returns its tensors."""
    import transformers

    ids = qwen_tokenizer(folder)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    config |= TEXT | ids | {"vision_config": {**vision, "model_type": "qwen2_vl"}}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = transformers.Qwen2VLModel(transformers.Qwen2VLConfig.from_pretrained(folder)).state_dict()
    first = {n.replace("language_model.", "model."): v for n, v in shapes.items()}
    state = fill(first | {"lm_head.weight": torch.empty(VOCAB, 32)})
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    return state


def write_video_reward(folder, outputs=1, adapter=False):
    """KwaiVGI/VideoReward, its base and a prompt. Returns the tensors it amounts to: bare names, LoRA added."""
    from safetensors.torch import save_file

    base = write_qwen2_vl(folder / "Qwen2-VL-2B-Instruct")
    state = dict(base)
    rows = max(base["model.embed_tokens.weight"].shape[0] - 30, 0)  # the tokenizer is shorter than the table
    state["model.embed_tokens.weight"] = noise("table", (rows, 32))
    state["rm_head.weight"] = noise("rm_head", (outputs, 32))
    wanted, saved = dict(state), {}
    for name, value in state.items():
        layer = name.removesuffix(".weight")
        if ".layers." in name and name.endswith("proj.weight"):
            a, b = noise(f"{name}.A", (4, value.shape[1])) * 0.2, noise(f"{name}.B", (value.shape[0], 4)) * 0.2
            wanted[name] = value + 16 / 4 * b @ a
            saved |= {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
            saved[f"{layer}.base_layer.weight"] = value
        elif ".layers." in name and name.endswith("proj.bias"):
            saved[name.replace("proj.bias", "proj.base_layer.bias")] = value
        else:
            saved[name] = value
    saved = {f"base_model.model.{n}": v.clone() for n, v in saved.items()}
    (folder / "checkpoint-90").mkdir()  # an older one; 100 comes after 90
    newest = folder / "checkpoint-100"
    newest.mkdir()
    if adapter:
        lora = {n.replace(".default.", "."): v for n, v in saved.items() if ".lora_" in n}
        save_file(lora, newest / "adapter_model.safetensors")
        own = ("rm_head", "embed_tokens", "visual")
        rest = {n: v for n, v in saved.items() if any(o in n for o in own)}
        torch.save(rest, newest / "non_lora_state_dict.pth")
    else:
        torch.save(saved, newest / "model.pth")
    config = {
        "data_config": {"meta_data": "x.csv", "data_dir": "x", "max_frame_pixels": 100352, "num_frames": None,
                        "fps": 2.0, "sample_type": "uniform", "prompt_template_type": "detailed_special",
                        "eval_dim": ["VQ", "MQ", "TA"]},
        "model_config": {"model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct", "output_dim": outputs,
                         "use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 16, "use_rslora": False},
        "inference_config": UNITS,
    }  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(config))
    (folder / "prompt.txt").write_text(QUESTIONNAIRE)
    return wanted


def write_cosmos_reason1(folder):
    """nvidia/Cosmos-Reason1-7B-Reward as transformers saves it, and a prompt."""
    import transformers

    ids = qwen_tokenizer(folder)
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 64,
              "fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2}  # fmt: skip
    config = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    config |= TEXT | ids | {"vision_config": {**vision, "model_type": "qwen2_5_vl"}}
    (folder / "config.json").write_text(json.dumps(config))
    net = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig.from_pretrained(folder))
    net.load_state_dict(fill(net.state_dict()))
    net.save_pretrained(folder / "saved")
    (folder / "saved/model.safetensors").rename(folder / "model.safetensors")
    (folder / "prompt.txt").write_text(SYSTEM)
    return net.eval()


def write_vit(folder):
    """facebook/dino-vitb16, small, by the hub's names: 224 x 224 pixels in patches of 16."""
    from safetensors.torch import save_file

    width, inner = 48, 96
    shapes = {
        "embeddings.cls_token": (1, 1, width),
        "embeddings.position_embeddings": (1, 197, width),
        "embeddings.patch_embeddings.projection.weight": (width, 3, 16, 16),
        "embeddings.patch_embeddings.projection.bias": (width,),
        "layernorm.weight": (width,),
        "layernorm.bias": (width,),
    }
    for i in range(2):
        for layer, (rows, columns) in {
            "attention.attention.query": (width, width), "attention.attention.key": (width, width),
            "attention.attention.value": (width, width), "attention.output.dense": (width, width),
            "intermediate.dense": (inner, width), "output.dense": (width, inner),
        }.items():  # fmt: skip
            shapes[f"encoder.layer.{i}.{layer}.weight"] = (rows, columns)
            shapes[f"encoder.layer.{i}.{layer}.bias"] = (rows,)
        for norm in ("layernorm_before", "layernorm_after"):
            shapes |= {f"encoder.layer.{i}.{norm}.{part}": (width,) for part in ("weight", "bias")}
    state = fill({name: torch.empty(shape) for name, shape in shapes.items()})
    state["embeddings.position_embeddings"] *= 4  # at a real net's scale, so that their interpolation shows
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    config = {"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": width, "intermediate_size": inner,
              "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 224, "patch_size": 16,
              "layer_norm_eps": 1e-12}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return state


def write_clip_vision(folder, patch):
    """openai/clip-vit-*, small: a whole CLIP, of which the picture half is needed."""
    import transformers

    both = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**both, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 48, "eos_token_id": 49}
    vision = {**both, "image_size": 224, "patch_size": patch}
    net = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
    net.load_state_dict(fill(net.state_dict()) | {"logit_scale": torch.tensor(2.0)})
    net.save_pretrained(folder)
    return net.eval()


def write_vbench(folder):
    """The folder of VBench's networks, AMT-S in its own size. Returns the two that transformers makes no part of."""
    from ddrl_jax.sidecar.scorers import vbench
    from ddrl_jax.sidecar.scorers.amt import AmtS
    from ddrl_jax.sidecar.scorers.musiq import Musiq

    write_vit(folder / vbench.DINO)
    clips = [write_clip_vision(folder / name, p) for name, p in ((vbench.CLIP_B, 32), (vbench.CLIP_L, 14))]
    musiq, amt = Musiq(128, 96, 2), AmtS()
    for net, file in ((musiq, vbench.MUSIQ), (amt, vbench.AMT)):
        net.load_state_dict(fill(net.state_dict()))
        torch.save({"state_dict": net.state_dict()} if net is amt else net.state_dict(), folder / file)
    head = torch.nn.Linear(32, 1)
    head.load_state_dict({"weight": 5 * noise("aesthetic", (1, 32)), "bias": torch.tensor([5.0])})
    torch.save(head.state_dict(), folder / vbench.AESTHETIC)
    return [*clips, head.eval(), musiq.eval(), amt.eval()]
