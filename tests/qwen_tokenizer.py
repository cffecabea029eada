"""A small tokenizer of Qwen's make, and the golden tower with a table large enough for it."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.paths import GOLDEN

HUB = GOLDEN / "text_encoder/hf_hub_layout_prefix_model"
VOCAB = 400
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# How Qwen2's tokenizer cuts text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What Qwen2.5-VL's template makes of messages whose content is a text or a list of parts.
TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def write_tokenizer(folder):
    """tokenizer.json and tokenizer_config.json as transformers saves a Qwen2 tokenizer: byte-level BPE behind NFC."""
    tokens = Tokenizer(models.BPE())
    tokens.normalizer = normalizers.NFC()
    tokens.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 50, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = ["system user assistant", "You are a helpful assistant who will provide prompts to an image generator."]
    tokens.train_from_iterator(corpus * 3 + ["Café in the snow, 東京の夜, Привет, red fox " * 3], trainer)
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokens.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "bos_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_tower(folder):
    """The golden weights, their table extended to VOCAB tokens, and a tokenizer beside them, as on the hub."""
    folder.mkdir()
    values = {name: value for file in sorted(HUB.glob("*.safetensors")) for name, value in load_file(file).items()}
    table = values["model.embed_tokens.weight"]
    more = np.random.default_rng(0).normal(0, table.std(), (VOCAB - len(table), table.shape[1])).astype(table.dtype)
    values["model.embed_tokens.weight"] = np.concatenate([table, more])
    save_file(values, folder / "model.safetensors")
    config = json.loads((HUB / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    return write_tokenizer(folder)
