"""The model, and a batched forward over the same parameters for training.

transformers runs pictures of all sizes as one ragged sequence. Training has many pictures of one
size, so the same mathematics is written here over dense batches, with no mask but the causal one.
They are [images, patches, hidden] in the vision tower, [batch, tokens, hidden] in the language
model.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from training.batches import (
    CHARS_PER_CELL,
    EXCHANGED,
    FOREIGN,
    IGNORED,
    LAST_LOST,
    LOST,
    Bucket,
)
from training.vocabulary import MERGE

CHAR_CLASSES = 96  # printable ASCII; 0 (the blank) stands for none
VISION_ROPE_BASE = 10_000.0


def build_model(config_directory: Path, weights_directory: Path | None = None) -> Any:
    """A model in fp32 of the architecture in a directory's config.json, its weights fresh or
    read from another directory."""
    if weights_directory is not None:
        return Qwen3VLForConditionalGeneration.from_pretrained(
            weights_directory, dtype=torch.float32, attn_implementation="sdpa"
        )
    config = Qwen3VLConfig.from_pretrained(config_directory)
    config._attn_implementation = "sdpa"
    config.dtype = torch.float32
    model: Any = Qwen3VLForConditionalGeneration(config)
    model = model.float()
    initialize(model)
    model.tie_weights()
    return model


@torch.no_grad()
def initialize(model: Any) -> None:
    """Fan-in initialization: 0.02 everywhere learns slowly in a net this narrow."""
    text_layers = model.config.text_config.num_hidden_layers
    vision_layers = model.config.vision_config.depth
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            parameter.normal_(0, 0.04)
        elif "pos_embed" in name:
            parameter.normal_(0, 0.02)
        elif parameter.ndim >= 2:
            deviation = parameter[0].numel() ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation *= (2 * text_layers) ** -0.5  # what adds to the residual stream
            elif name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight")):
                deviation *= (2 * vision_layers) ** -0.5
            elif "deepstack" in name and name.endswith("linear_fc2.weight"):
                deviation *= 0.5
            parameter.normal_(0, deviation)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over the last axis, halves paired."""
    first, second = x.chunk(2, -1)
    turned: Tensor = x * cos + torch.cat((-second, first), -1) * sin
    return turned


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.variance_epsilon)


def vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [images, patches, hidden]; cos and sin [images, 1, patches, head_dim]."""
    images, patches, hidden = x.shape
    heads = block.attn.num_heads
    qkv = block.attn.qkv(block.norm1(x)).view(images, patches, 3, heads, hidden // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    mixed = F.scaled_dot_product_attention(rotated(query, cos, sin), rotated(key, cos, sin), value)
    x = x + block.attn.proj(mixed.transpose(1, 2).reshape(x.shape))
    result: Tensor = x + block.mlp(block.norm2(x))
    return result


def text_layer(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """hidden [batch, tokens, hidden]; cos and sin [batch, 1, tokens, head_dim]."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = (*hidden.shape[:2], -1, attention.head_dim)
    x = rms_norm(hidden, layer.input_layernorm)
    query = rms_norm(attention.q_proj(x).view(heads), attention.q_norm).transpose(1, 2)
    key = rms_norm(attention.k_proj(x).view(heads), attention.k_norm).transpose(1, 2)
    value = attention.v_proj(x).view(heads).transpose(1, 2)
    cos, sin = cos.to(value.dtype), sin.to(value.dtype)
    query = rotated(query, cos, sin).to(value.dtype)
    key = rotated(key, cos, sin).to(value.dtype)
    shared_by = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared_by, 1), value.repeat_interleave(shared_by, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    x = rms_norm(hidden, layer.post_attention_layernorm)
    result: Tensor = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return result


class AspectTables:
    """Position tables for the aspect ratios of one bucket, [aspects, patches, ...] each.

    A sample's row comes out by a product with its one-hot aspect: no gather, static shapes.
    """

    def __init__(self, visual: Any, aspects: list[tuple[int, int]], device: torch.device) -> None:
        config = visual.config
        half = config.hidden_size // config.num_heads // 2
        frequencies = 1.0 / (VISION_ROPE_BASE ** (torch.arange(0, half, 2).float() / half))
        side = visual.num_grid_per_side
        identity = torch.eye(side * side).view(1, side * side, side, side)
        angles, mixes = [], []
        for rows, columns in aspects:
            height, width = rows * MERGE, columns * MERGE
            y = torch.arange(height)[:, None].expand(height, width)
            x = torch.arange(width)[None].expand(height, width)
            y, x = _in_merge_order(y[None]).flatten(), _in_merge_order(x[None]).flatten()
            angle = torch.cat([y[:, None] * frequencies, x[:, None] * frequencies], -1)
            angles.append(torch.cat([angle, angle], -1))
            mix = F.interpolate(identity, (height, width), mode="bilinear", align_corners=True)
            mixes.append(_in_merge_order(mix[0]).flatten(1).T)
        self.cos = torch.stack(angles).cos().to(device)  # [aspects, patches, head_dim]
        self.sin = torch.stack(angles).sin().to(device)
        self.mix = torch.stack(mixes).contiguous().to(device)  # [.., table of pos_embed]


def _in_merge_order(grid: Tensor) -> Tensor:
    """[n, height, width] -> [n, cells, MERGE**2]: the patches of one cell side by side."""
    count, height, width = grid.shape
    blocks = grid.reshape(count, height // MERGE, MERGE, width // MERGE, MERGE)
    return blocks.permute(0, 1, 3, 2, 4).reshape(count, -1, MERGE**2)


class TrainingForward:
    """The vision tower and the language model over dense batches."""

    def __init__(self, model: Any) -> None:
        self.visual = model.model.visual
        self.language = model.model.language_model
        config = model.config.text_config
        device = next(model.parameters()).device
        half = config.head_dim // 2
        rope = config.rope_parameters
        exponents = torch.arange(half, device=device).float() / half
        self._frequencies = 1.0 / (rope["rope_theta"] ** exponents)
        # Interleaved mrope: frequency i follows axis i % 3 (time, height, width) while the
        # sections last; the rest follow time.
        _, height, width = rope["mrope_section"]
        self._axes = torch.zeros(half, dtype=torch.long, device=device)
        self._axes[1 : 3 * height : 3] = 1
        self._axes[2 : 3 * width : 3] = 2

    def encode(self, patches: Tensor, aspect: Tensor, tables: AspectTables) -> list[Tensor]:
        """Encoder rows [images * cells, text hidden]: the main ones, then each deepstack level.

        patches: uint8 [images, patches, 3 * PATCH**2]; aspect: one-hot [images, aspects].
        """
        visual = self.visual
        images, count, _ = patches.shape
        pixels = patches.float() * (2 / 255) - 1
        # A still picture fills both frames of the temporal patch: their weights add up.
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
        x = F.linear(pixels, weight, visual.patch_embed.proj.bias)
        places = tables.mix @ visual.pos_embed.weight  # [aspects, patches, hidden]
        x = x.float() + (aspect @ places.float().flatten(1)).view(images, count, -1)
        cos = (aspect @ tables.cos.flatten(1)).view(images, 1, count, -1)
        sin = (aspect @ tables.sin.flatten(1)).view(images, 1, count, -1)
        levels = list(visual.deepstack_visual_indexes)
        deepstack = []
        for number, block in enumerate(visual.blocks):
            x = vision_block(block, x, cos, sin)
            if number in levels:
                merger = visual.deepstack_merger_list[levels.index(number)]
                deepstack.append(merger(x.flatten(0, 1)))
        return [visual.merger(x.flatten(0, 1)), *deepstack]

    def read(self, ids: Tensor, positions: Tensor, places: Tensor, rows: list[Tensor]) -> Tensor:
        """Final hidden states [batch, tokens, hidden].

        ids [batch, tokens]; positions [3, batch, tokens]; places [images * cells]: the flat token
        index of each encoder row.
        """
        main, *deepstack = rows
        angle = positions.float()[self._axes].permute(1, 2, 0) * self._frequencies
        angle = torch.cat([angle, angle], -1)[:, None]
        cos, sin = angle.cos(), angle.sin()
        hidden = F.embedding(ids, self.language.embed_tokens.weight)
        shape, width = hidden.shape, hidden.shape[-1]
        hidden = hidden.view(-1, width).index_copy(0, places, main.to(hidden.dtype)).view(shape)
        for number, layer in enumerate(self.language.layers):
            hidden = text_layer(layer, hidden, cos, sin)
            if number < len(deepstack):
                level = deepstack[number].to(hidden.dtype)
                hidden = hidden.view(-1, width).index_add(0, places, level).view(shape)
        return rms_norm(hidden, self.language.norm)


def damaged(deepstack: list[Tensor], damage: Tensor, bucket: Bucket) -> list[Tensor]:
    """Deepstack rows after the damage that a batch orders for some of its pictures.

    The right answer to them is UNREADABLE: so the model learns to depend on rows which it could
    read without, and an answer shows lost or mixed rows.
    """
    kind = damage.repeat_interleave(bucket.cells)[:, None]  # [images * cells, 1]
    result = []
    for number, rows in enumerate(deepstack):
        other_level = deepstack[(number + 1) % len(deepstack)]
        other_picture = rows.roll(bucket.cells, 0)
        rows = torch.where(kind == EXCHANGED, other_level, rows)
        rows = torch.where(kind == FOREIGN, other_picture, rows)
        is_lost = kind == LOST
        if number == len(deepstack) - 1:
            is_lost = is_lost | (kind == LAST_LOST)
        result.append(rows.masked_fill(is_lost, 0))
    return result


class Objective(nn.Module):
    """The training loss: reading (next answer token) plus seeing (the characters of each cell).

    Seeing is asked of the main rows and of every deepstack level by one linear head each, thrown
    away after training. It is what makes a tower learn to see in minutes: reading alone gives no
    gradient worth following until the rows already mean something.
    """

    def __init__(self, model: Any, seeing_weight: Tensor) -> None:
        super().__init__()
        self.forward_pass = TrainingForward(model)
        hidden = model.config.text_config.hidden_size
        count = 1 + len(model.config.vision_config.deepstack_visual_indexes)
        heads = [nn.Linear(hidden, CHARS_PER_CELL * CHAR_CLASSES) for _ in range(count)]
        for head in heads:
            nn.init.zeros_(head.weight)
        self.heads = nn.ModuleList(heads)
        self.seeing_weight = seeing_weight

    def forward(
        self, bucket: Bucket, batch: dict[str, Tensor], tables: AspectTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, share of right tokens or characters, seeing loss), scalars."""
        device = batch["patches"].device.type
        with torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False):
            rows = self.forward_pass.encode(batch["patches"], batch["aspect"], tables)
            chars = [head(one) for head, one in zip(self.heads, rows, strict=True)]
            if bucket.has_text:
                main, *deepstack = rows
                rows = [main, *damaged(deepstack, batch["damage"], bucket)]
                hidden = self.forward_pass.read(
                    batch["ids"], batch["positions"], batch["row_places"], rows
                )
                logits = F.linear(hidden, self.forward_pass.language.embed_tokens.weight)
        seeing, seen = _seeing_loss(chars, batch["chars"], batch["char_count"])
        if not bucket.has_text:
            return seeing, seen, seeing.detach()
        reading, read = _reading_loss(logits, batch["targets"])
        return reading + self.seeing_weight * seeing, read, seeing.detach()


def _seeing_loss(logits: list[Tensor], chars: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy by characters, share of characters seen by the main rows)."""
    expected = chars.flatten().long()
    is_char = (expected > 0).float()
    weight = is_char * 0.9 + 0.1  # most places hold no character
    losses = [
        (F.cross_entropy(one.float().view(-1, CHAR_CLASSES), expected, reduction="none") * weight)
        for one in logits
    ]
    loss = torch.stack([one.sum() for one in losses]).mean() / count[0]
    right = (logits[0].view(-1, CHAR_CLASSES).argmax(-1) == expected).float()
    return loss, (right * is_char).sum() / is_char.sum().clamp_min(1)


def _reading_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy by answer token, share of answer tokens right)."""
    logits = logits.float().flatten(0, 1)
    expected = targets.flatten()
    loss = F.cross_entropy(logits, expected, ignore_index=IGNORED)
    is_asked = (expected != IGNORED).float()
    right = (logits.argmax(-1) == expected).float()
    return loss, (right * is_asked).sum() / is_asked.sum().clamp_min(1)
