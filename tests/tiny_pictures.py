"""Tiny checkpoints of the picture scorers, in the layouts and with the names in which the real ones are published, and
those networks in plain torch: what a scorer computes through transformers is compared with them."""

import json

import torch
from torch.nn import functional as F

WORDS = ("cat", "dog", "red", "photo", "depicts")
HEAD_SIZES = (1024, 128, 64, 16, 1)


def write_clip_tokenizer(folder):
    """A byte-level BPE of CLIP's make with WORDS in it. Returns the size of its vocabulary: the last two are ends."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocabulary, merges = letters + [f"{c}</w>" for c in letters], []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append(f"{parts[0]} {parts[1]}")
            parts[:2] = ["".join(parts[:2])]
            vocabulary.append(parts[0])
    vocabulary = [*dict.fromkeys(vocabulary), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges)]))
    tokenizer = transformers.CLIPTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    return len(vocabulary)


def clip_config(vocabulary, act="quick_gelu"):
    import transformers

    both = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 24}
    text = {"vocab_size": vocabulary, "hidden_size": 32, "max_position_embeddings": 20, "hidden_act": act,
            "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}  # fmt: skip
    vision = {"hidden_size": 48, "image_size": 28, "patch_size": 14, "hidden_act": act}
    return transformers.CLIPConfig(
        text_config={**both, **text}, vision_config={**both, **vision}, projection_dim=24, logit_scale_init_value=2.6592
    )


def shake(module, seed=0):
    """Random weights of a size that every layer matters, norms and biases too."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if value.ndim:
                value.copy_(torch.randn(value.shape, generator=rng) * 0.1 + (value.ndim == 1 and "weight" in name))


def write_clip(folder, seed=0):
    """A CLIP as `save_pretrained` leaves it, and its tokenizer."""
    import transformers

    model = transformers.CLIPModel(clip_config(write_clip_tokenizer(folder)))
    shake(model, seed)
    model.save_pretrained(folder)
    return model.eval()


def write_head(file, width, prefix="layers."):
    """The five layers with the published numbering (0, 2, 4, 6, 7). Returns the state that was written."""
    rng = torch.Generator().manual_seed(3)
    state, sizes = {}, (width, *HEAD_SIZES)
    for number, a, b in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        state[f"{prefix}{number}.weight"] = torch.randn((b, a), generator=rng) / a**0.5
        state[f"{prefix}{number}.bias"] = torch.randn((b,), generator=rng)
    if file is not None:
        torch.save(state, file)
    return state


def apply_head(state, x, prefix="layers."):
    for number in (0, 2, 4, 6, 7):
        x = x @ state[f"{prefix}{number}.weight"].to(x).T + state[f"{prefix}{number}.bias"].to(x)
    return x


def _random(shapes, seed=0):
    rng = torch.Generator().manual_seed(seed)
    gain = {name for name in shapes if name.endswith("weight") and len(shapes[name]) == 1}
    return {k: torch.randn(s, generator=rng) * 0.1 + (k in gain) for k, s in shapes.items()}


def _heads(x, heads):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _attend(q, k, v, heads, mask=None):
    q, k, v = (_heads(x, heads) for x in (q, k, v))
    weights = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    weights = weights if mask is None else weights.masked_fill(~mask, -torch.inf)
    return (weights.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Published:
    """A state dict with published names, and its layers by name."""

    def __init__(self, state):
        self.state = state

    def __contains__(self, name):
        return any(key.startswith(name) for key in self.state)

    def linear(self, name, x):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, name, x, eps):
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    def patches(self, name, pixels):
        weight, bias = self.state[f"{name}.weight"], self.state.get(f"{name}.bias")
        return F.conv2d(pixels, weight, bias, stride=weight.shape[-1]).flatten(2).transpose(1, 2)


# --- open_clip's ViT, as HPS v2 is published ---


def open_clip_state(vocabulary, width=48, text_width=32, out=24, layers=2, patch=14, grid=2, length=20):
    shapes = {
        "visual.conv1.weight": (width, 3, patch, patch),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (grid**2 + 1, width),
        "visual.proj": (width, out),
        "token_embedding.weight": (vocabulary, text_width),
        "positional_embedding": (length, text_width),
        "text_projection": (text_width, out),
    }
    norms = {"visual.ln_pre": width, "visual.ln_post": width, "ln_final": text_width}
    for stem, d in (("visual.transformer", width), ("transformer", text_width)):
        for i in range(layers):
            block = f"{stem}.resblocks.{i}"
            norms |= {f"{block}.ln_1": d, f"{block}.ln_2": d}
            shapes |= {f"{block}.attn.in_proj_weight": (3 * d, d), f"{block}.attn.in_proj_bias": (3 * d,),
                       f"{block}.attn.out_proj.weight": (d, d), f"{block}.attn.out_proj.bias": (d,),
                       f"{block}.mlp.c_fc.weight": (128, d), f"{block}.mlp.c_fc.bias": (128,),
                       f"{block}.mlp.c_proj.weight": (d, 128), f"{block}.mlp.c_proj.bias": (d,)}  # fmt: skip
    for name, d in norms.items():
        shapes |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
    return {**_random(shapes), "logit_scale": torch.tensor(4.6)}


def _open_clip_blocks(net, stem, x, mask):
    i = 0
    while (block := f"{stem}.resblocks.{i}") in net:
        qkv = net.norm(f"{block}.ln_1", x, 1e-5) @ net.state[f"{block}.attn.in_proj_weight"].T
        q, k, v = (qkv + net.state[f"{block}.attn.in_proj_bias"]).chunk(3, -1)
        x = x + net.linear(f"{block}.attn.out_proj", _attend(q, k, v, 2, mask))
        x = x + net.linear(
            f"{block}.mlp.c_proj", F.gelu(net.linear(f"{block}.mlp.c_fc", net.norm(f"{block}.ln_2", x, 1e-5)))
        )
        i += 1
    return x


def open_clip_image(state, pixels):
    """(N,3,S,S) -> (N,D), not normalised."""
    net = Published(state)
    x = net.patches("visual.conv1", pixels)
    x = torch.cat([state["visual.class_embedding"].expand(len(x), 1, -1), x], 1) + state["visual.positional_embedding"]
    x = _open_clip_blocks(net, "visual.transformer", net.norm("visual.ln_pre", x, 1e-5), None)
    return net.norm("visual.ln_post", x[:, 0], 1e-5) @ state["visual.proj"]


def open_clip_text(state, ids, end):
    """(N,L) -> (N,D), pooled at the first `end`."""
    net, length = Published(state), ids.shape[1]
    x = state["token_embedding.weight"][ids] + state["positional_embedding"][:length]
    x = _open_clip_blocks(net, "transformer", x, torch.ones(length, length).tril().bool())
    x = net.norm("ln_final", x, 1e-5)
    return x[torch.arange(len(x)), (ids == end).int().argmax(1)] @ state["text_projection"]


# --- BLIP, as ImageReward is published ---

BERT_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "dog", "red", "and")
MED_CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": len(BERT_WORDS), "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "add_cross_attention": True, "encoder_width": 128,
}  # fmt: skip


def write_image_reward(folder):
    """ImageReward.pt, med_config.json and a tokenizer. Returns the state."""
    import transformers

    vision, text, inner, words, positions = 128, 32, 64, len(BERT_WORDS), 40
    eye, read = "blip.visual_encoder", "blip.text_encoder"
    linear, norms = {f"{read}.pooled_by_nobody.dense": (text, text)}, {f"{eye}.norm": vision}
    for i in range(2):
        block, layer = f"{eye}.blocks.{i}", f"{read}.encoder.layer.{i}"
        norms |= {f"{block}.norm1": vision, f"{block}.norm2": vision}
        linear |= {f"{block}.attn.qkv": (3 * vision, vision), f"{block}.attn.proj": (vision, vision),
                   f"{block}.mlp.fc1": (4 * vision, vision), f"{block}.mlp.fc2": (vision, 4 * vision)}  # fmt: skip
        for name, seen in (("attention", text), ("crossattention", vision)):
            stem = f"{layer}.{name}"
            linear |= {f"{stem}.self.query": (text, text), f"{stem}.self.key": (text, seen),
                       f"{stem}.self.value": (text, seen), f"{stem}.output.dense": (text, text)}  # fmt: skip
            norms[f"{layer}.{name}.output.LayerNorm"] = text
        linear |= {f"{layer}.intermediate.dense": (inner, text), f"{layer}.output.dense": (text, inner)}
        norms[f"{layer}.output.LayerNorm"] = text
    norms[f"{read}.embeddings.LayerNorm"] = text
    linear |= {
        "blip.vision_proj": (256, vision),
        "blip.text_proj": (256, text),
        f"{eye}.patch_embed.proj": (vision, 3, 8, 8),
    }
    shapes = {f"{eye}.cls_token": (1, 1, vision), f"{eye}.pos_embed": (1, 10, vision),
              f"{read}.embeddings.word_embeddings.weight": (words, text),
              f"{read}.embeddings.position_embeddings.weight": (positions, text)}  # fmt: skip
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    state = {**_random(shapes), **write_head(None, text, "mlp.layers.")}
    state[f"{read}.embeddings.position_ids"] = torch.arange(positions)[None]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    transformers.BertTokenizer(vocab={w: i for i, w in enumerate(BERT_WORDS)}).save_pretrained(folder)
    return state


def blip_features(state, pixels, ids, mask):
    """What the published network makes of pictures (N,3,S,S) and tokens (N,L): the first text state (N,D)."""
    net, eye, read = Published(state), "blip.visual_encoder", "blip.text_encoder"
    x = net.patches(f"{eye}.patch_embed.proj", pixels)
    x = torch.cat([state[f"{eye}.cls_token"].expand(len(x), 1, -1), x], 1) + state[f"{eye}.pos_embed"]
    for i in range(2):
        block = f"{eye}.blocks.{i}"
        q, k, v = net.linear(f"{block}.attn.qkv", net.norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + net.linear(f"{block}.attn.proj", _attend(q, k, v, 2))
        x = x + net.linear(
            f"{block}.mlp.fc2", F.gelu(net.linear(f"{block}.mlp.fc1", net.norm(f"{block}.norm2", x, 1e-6)))
        )
    image = net.norm(f"{eye}.norm", x, 1e-6)
    words = state[f"{read}.embeddings.word_embeddings.weight"][ids]
    h = words + state[f"{read}.embeddings.position_embeddings.weight"][: ids.shape[1]]
    h = net.norm(f"{read}.embeddings.LayerNorm", h, 1e-12)
    for i in range(2):
        layer = f"{read}.encoder.layer.{i}"
        for name, seen, allowed in (("attention", None, mask[:, None, None].bool()), ("crossattention", image, None)):
            stem, seen = f"{layer}.{name}", h if seen is None else seen
            q, k, v = (
                net.linear(f"{stem}.self.query", h),
                *(net.linear(f"{stem}.self.{n}", seen) for n in ("key", "value")),
            )
            h = net.norm(
                f"{stem}.output.LayerNorm", h + net.linear(f"{stem}.output.dense", _attend(q, k, v, 4, allowed)), 1e-12
            )
        inner = F.gelu(net.linear(f"{layer}.intermediate.dense", h))
        h = net.norm(f"{layer}.output.LayerNorm", h + net.linear(f"{layer}.output.dense", inner), 1e-12)
    return h[:, 0]
