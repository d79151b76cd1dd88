"""The graft's mathematics over dense batches, and what it is trained for.

Published weights are constants in the arithmetic's dtype; the parameters are those of transformers'
own tower and connector and the rows of two tokens.  One layer of each kind is compiled, for all.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.modeling_idefics3 import (
    Idefics3Connector,
    Idefics3VisionTransformer,
)

from training.batches import CHARS_PER_CELL
from training.graft.checkpoint import ADDED, ADDED_ROWS, PATCH, ROWS, Tensors, config, with_rows
from training.model import CHAR_CLASSES, rotated

USUAL = 0.13  # root mean square of the published embedding
SHARPNESS = 25.0  # of the likeness of a row and a token's embedding
END_OF_TURN = 2  # a token
BLANK = 216  # the token of one blank, which empty patches are to be like


def vision_layer(x: Tensor, heads: int, dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """x [images, patches, hidden] in float32; `weights` as `_vision_weights` lists them."""
    norm1, bias1, *mixing, norm2, bias2, up, up_bias, down, down_bias = weights
    images, patches, hidden = x.shape
    y = F.layer_norm(x, (hidden,), norm1, bias1, 1e-6).to(dtype)
    query, key, value, out = (
        (w.to(dtype), b.to(dtype)) for w, b in zip(mixing[::2], mixing[1::2], strict=True)
    )
    query_heads, key_heads, value_heads = (
        F.linear(y, *one).view(images, patches, heads, -1).transpose(1, 2)
        for one in (query, key, value)
    )
    mixed = F.scaled_dot_product_attention(query_heads, key_heads, value_heads)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), *out)
    y = F.layer_norm(x, (hidden,), norm2, bias2, 1e-6).to(dtype)
    y = F.gelu(F.linear(y, up.to(dtype), up_bias.to(dtype)), approximate="tanh")
    return x + F.linear(y, down.to(dtype), down_bias.to(dtype))


def text_layer(x: Tensor, cos: Tensor, sin: Tensor, heads: int, *weights: Tensor) -> Tensor:
    """x [batch, tokens, hidden]; cos and sin [tokens, head_dim]."""
    norm1, query, key, value, out, norm2, gate, up, down = weights
    batch, tokens, hidden = x.shape
    y = F.rms_norm(x, (hidden,), norm1, 1e-5)
    split = (batch, tokens, -1, hidden // heads)
    q, k, v = (F.linear(y, w).view(split).transpose(1, 2) for w in (query, key, value))
    mixed = F.scaled_dot_product_attention(
        rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
    )
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), out)
    y = F.rms_norm(x, (hidden,), norm2, 1e-5)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


class Graft(nn.Module):
    """Tower, connector, added rows and a head that is thrown away, before a frozen text model."""

    def __init__(self, checkpoint: Path, device: str, compiled: bool) -> None:
        super().__init__()
        whole: Any = Idefics3ForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32
        )
        self.vision, self.connector = whole.model.vision_model, whole.model.connector
        text = whole.config.text_config
        self.heads, self.vision_heads = (
            text.num_attention_heads,
            self.vision.config.num_attention_heads,
        )
        embedding = whole.model.text_model.embed_tokens.weight.detach()
        self.image = whole.config.image_token_id
        self.first_added = first = self.image - ADDED
        self.added = nn.Parameter(embedding[first : first + ADDED].clone())
        self.see_head = nn.Linear(text.hidden_size, CHARS_PER_CELL * CHAR_CLASSES)
        nn.init.zeros_(self.see_head.weight)
        self.to(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        frozen = {"device": device, "dtype": self.dtype}
        self.published = embedding[:first].to(**frozen)
        self.directions = F.normalize(embedding[:first], dim=-1).to(**frozen)
        layers = whole.model.text_model.layers
        self.layers = [[p.detach().to(**frozen) for p in _text_weights(one)] for one in layers]
        self.norm = whole.model.text_model.norm.weight.detach().to(**frozen)
        half = text.hidden_size // self.heads // 2
        base = text.rope_parameters["rope_theta"]
        self.frequencies = (1.0 / base ** (torch.arange(half) / half)).to(device)
        self.compiled: dict[Any, Any] = {}
        if compiled:
            self.compiled = {one: torch.compile(one) for one in (text_layer, vision_layer)}

    def _layer(self, layer: Callable[..., Tensor], *arguments: Any) -> Tensor:
        run = self.compiled.get(layer, layer) if torch.is_grad_enabled() else layer
        result: Tensor = run(*arguments)
        return result

    def see(self, pixels: Tensor) -> Tensor:
        """uint8 [images, side, side, 3] to rows [images, ROWS, text hidden]."""
        images, side, _, _ = pixels.shape
        split = pixels.view(images, side // PATCH, PATCH, side // PATCH, PATCH, 3)
        patches = split.permute(0, 1, 3, 5, 2, 4).reshape(images, ROWS, -1).to(self.dtype)
        embed = self.vision.embeddings
        weight, bias = embed.patch_embedding.weight.flatten(1), embed.patch_embedding.bias
        x = F.linear(patches / 127.5 - 1, weight.to(self.dtype), bias.to(self.dtype)).float()
        x = x + embed.position_embedding.weight
        for layer in self.vision.encoder.layers:
            x = self._layer(vision_layer, x, self.vision_heads, self.dtype, *_vision_weights(layer))
        x = self.vision.post_layernorm(x).to(self.dtype)
        return F.linear(x, self.connector.modality_projection.proj.weight.to(self.dtype))

    def read(self, ids: Tensor, rows: Tensor, start: int) -> Tensor:
        """Final hidden states [batch, tokens, hidden]; rows stand at `start` in each prompt."""
        x = F.embedding(ids.clamp_max(self.first_added - 1), self.published)
        around, whole = self.added.to(self.dtype).expand(len(ids), ADDED, -1).split(1, 1)
        end = start + ROWS
        x = torch.cat([x[:, : start - 2], around, whole, rows, around, x[:, end + 1 :]], 1)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        for layer in self.layers:
            x = self._layer(text_layer, x, cos, sin, self.heads, *layer)
        return F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, with_rows(self.published, self.added))

    def losses(self, batch: Tensors, where: Tensors, start: int) -> dict[str, Tensor]:
        """Means by character, by written token, by empty patch and, with text, by answer token.

        `where`: places in the flat arrays with a token to be written, without, and of answers.
        """
        rows = self.see(batch["pixels"])
        flat = rows.flatten(0, 1)
        chars = batch["chars"].long()
        weight = (chars > 0) * 0.9 + 0.1  # most places hold no character
        seen = self.see_head(flat.float()).view(-1, CHAR_CLASSES)
        seeing = F.cross_entropy(seen, chars.flatten(), reduction="none") * weight.flatten()
        like = F.normalize(flat.float(), dim=-1).to(self.dtype)
        expected = batch["tokens"].flatten()[where["tokens"]].long()
        near = F.linear(like[where["tokens"]], self.directions) * SHARPNESS
        far = flat.float().square().mean(-1).log() - 2 * math.log(USUAL)
        found = {
            "seeing": seeing.sum() / (chars > 0).sum().clamp_min(1),
            "writing": F.cross_entropy(near.float(), expected),
            "blank": 1 - (like[where["blanks"]] @ self.directions[BLANK]).float().mean(),
            "size": far.square().mean(),
            "written": (near.argmax(-1) == expected).float().mean().detach(),
        }
        if "answers" in where:
            hidden = self.read(batch["ids"], rows, start).flatten(0, 1)[where["answers"]]
            logits = self.logits(hidden).float()
            expected = batch["targets"].flatten()[where["answers"]].long()
            found["reading"] = F.cross_entropy(logits, expected)
            found["right"] = (logits.argmax(-1) == expected).float().mean().detach()
        return found

    def tensors(self) -> Tensors:
        """What is trained and kept, under published names."""
        parts = {"vision_model": self.vision, "connector": self.connector}
        return {
            f"model.{part}.{name}": tensor.detach().float().cpu()
            for part, module in parts.items()
            for name, tensor in module.state_dict().items()
        } | {ADDED_ROWS: self.added.detach().float().cpu()}

    def load(self, tensors: Tensors) -> None:
        """The opposite of `tensors`."""
        with torch.no_grad():
            self.added.copy_(tensors[ADDED_ROWS])
        for part, module in (("vision_model", self.vision), ("connector", self.connector)):
            start = f"model.{part}."
            module.load_state_dict(
                {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            )

    @torch.no_grad()
    def answer(
        self, pixels: Tensor, prompts: list[list[int]], start: int, most: int
    ) -> list[list[int]]:
        """Greedy answers without their end, computed anew for each token: for many at once."""
        rows = self.see(pixels)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=pixels.device)
        longest = -(-(int(lengths.max()) + most) // 64) * 64
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=pixels.device)
        for number, prompt in enumerate(prompts):
            ids[number, : len(prompt)] = torch.tensor(prompt)
        each = torch.arange(len(prompts), device=pixels.device)
        going = torch.ones_like(each, dtype=torch.bool)
        for step in range(most):
            hidden = self.read(ids, rows, start)[each, lengths + step - 1]
            token = self.logits(hidden).argmax(-1)
            going &= token != END_OF_TURN
            ids[each, lengths + step] = torch.where(going, token, 0)
            if not going.any():
                break
        found = [ids[i, n:].tolist() for i, n in enumerate(lengths.tolist())]
        return [tokens[: tokens.index(0)] if 0 in tokens else tokens for tokens in found]


def _vision_weights(layer: Any) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    modules = (
        layer.layer_norm1, attention.q_proj, attention.k_proj, attention.v_proj,
        attention.out_proj, layer.layer_norm2, mlp.fc1, mlp.fc2,
    )  # fmt: skip
    return [weight for module in modules for weight in (module.weight, module.bias)]


def _text_weights(layer: Any) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    modules = (
        layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj,
        attention.o_proj, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj,
        mlp.down_proj,
    )  # fmt: skip
    return [module.weight for module in modules]


def fresh(text: dict[str, Any]) -> Tensors:
    """Tensors to begin with; fan-in initialization, as `training.model.initialize` does it."""
    settings = Idefics3Config(**config(text))
    parts = {
        "vision_model": Idefics3VisionTransformer(settings.vision_config),
        "connector": Idefics3Connector(settings),
    }
    made = {ADDED_ROWS: torch.randn(ADDED, text["hidden_size"]) * USUAL}
    for part, module in parts.items():
        for name, tensor in module.state_dict().items():
            if tensor.ndim >= 2:
                deviation = 0.05 if "position" in name else tensor[0].numel() ** -0.5
                if name.endswith(("out_proj.weight", "fc2.weight")):
                    deviation *= 16**-0.5  # what adds to the residual stream: twice a layer
                tensor = torch.randn(tensor.shape) * deviation
            elif name == "post_layernorm.weight":
                tensor = torch.full(tensor.shape, USUAL)  # rows are as large as embeddings
            elif name.endswith("bias"):
                tensor = torch.zeros(tensor.shape)
            made[f"model.{part}.{name}"] = tensor
    return made
