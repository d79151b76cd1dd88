"""Drafts by an EAGLE-3 head: a layer that was trained for a model, in a directory of its own.

Theory of operation
-------------------
It drafts as the checkpoint's own layer would (`layer`).  In place of the last hidden state it has
what a low, a middle and a high layer have read.  Each step leaves that side by side in one place
(`FusedDecoder.watch`), and `fc` makes a hidden state of it.  Its attention reads the norm of that
behind the embedding's.  Its vocabulary is a part of the model's: `d2t` is added to its tokens.
Ranks share its layer as they do the model's; each has all of its head.

Source: EAGLE-3, https://arxiv.org/abs/2503.01840; layout of published heads (`midlayer.*`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from epd.config import EngineConfig
from epd.engine.adapter import ModelAdapter
from epd.engine.language.decoder import FusedDecoder
from epd.engine.language.drafts.layer import DraftLayer
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.graphs import LARGE_STEP
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import PagedAttention, Step, plain_norm
from epd.engine.language.products import Foreign
from epd.engine.weights.loading import DTYPES, parameters_on_meta
from epd.model_files.checkpoint import ModelError, read_config, read_header, weight_files
from epd.model_files.model_directory import some

_IDS = "eagle_aux_hidden_state_layer_ids"


class Head(nn.Module):
    def __init__(self, config: Foreign, layer_idx: int, watched: Sequence[int], most: int) -> None:
        """`watched`: layers of the model, over steps of so many tokens; `layer_idx`: its own."""
        from transformers.models.llama import modeling_llama as theirs

        super().__init__()
        size, self.watched = int(config.hidden_size), (watched, most)
        middle = theirs.LlamaDecoderLayer(config, layer_idx)
        self.layers = nn.ModuleList([middle])
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(middle.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(middle.self_attn, name, wide)
        norms = (theirs.LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        middle.hidden_norm, self.norm = norms
        count = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(len(watched) * size, size, bias=False)
        self.lm_head = nn.Linear(size, count, bias=False)
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64))
        has_own = "mrope_section" not in config.rope_parameters  # and else the model's
        self.rotary_emb = theirs.LlamaRotaryEmbedding(config) if has_own else None


def load_head(adapter: ModelAdapter, engine_config: EngineConfig, num_ranks: int) -> Head:
    """Whole.  Raises ModelError where it is not one for the model, or for so many ranks."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    dtype, dummy = DTYPES[engine_config.dtype], engine_config.load_format == "dummy"
    directory = Path(engine_config.speculative.model).expanduser()
    told, rows, text = read_config(directory), adapter.paged_rows(), adapter.text_config
    config: Foreign = LlamaConfig.from_dict(dict(told))
    layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    # Under `eagle_config` they are those behind which hidden states are taken.
    behind = (told.get("eagle_config") or {}).get(_IDS) or (1, layers // 2 - 1, layers - 4)
    watched = told.get(_IDS) or [1 + layer for layer in behind]
    shape = {"hidden_size": text.hidden_size, "vocab_size": vocabulary, "head_dim": rows.head_dim}
    shape |= {"num_key_value_heads": rows.num_heads, "norm_before_residual": False}
    if num_ranks > 1:
        shape |= {"num_attention_heads": text.num_attention_heads}
    given = [(name, getattr(config, name, needed), needed) for name, needed in shape.items()]
    wrong = [f"{name} is {has}, not {needed}" for name, has, needed in given if has != needed]
    if len({*watched} & {*range(layers)}) < len(watched):
        wrong += [f"{_IDS} {watched} are not some of {layers} layers"]
    if rows.num_parts != 2 or rows.kinds:  # its rows lie beside the model's
        wrong += ["it has keys and values of one shape, and the model has not"]
    with parameters_on_meta():
        most = engine_config.max_step_tokens + LARGE_STEP  # captured ones are rounded up
        head = Head(config, rows.num_layers - 1, watched, most)
    like = head.state_dict()
    state = {"d2t": like["d2t"]} if len(like["d2t"]) == vocabulary else {}
    for file in () if dummy or wrong else weight_files(directory):
        read_header(file)  # it is whole
        state |= {n.replace("midlayer.", "layers.0."): t for n, t in load_file(file).items()}
    if not dummy and not wrong:
        odd = [n for n, t in like.items() if n not in state or state[n].shape != t.shape]
        if odd := odd or sorted(state.keys() - like.keys() - {"t2d", "embed_tokens.weight"}):
            wrong = [f"it lacks {some(odd)}, or they are not as config.json has them"]
        elif set((state["d2t"] + torch.arange(len(like["d2t"]))).tolist()) - set(range(vocabulary)):
            wrong = [f"d2t names tokens beyond a vocabulary of {vocabulary}"]
    if why := "; ".join(wrong):
        raise ModelError(f"{directory} is no EAGLE-3 head of this model: {why}; give one that is")
    if dummy:
        state = {n: torch.randn(t.shape) * 0.02 for n, t in head.named_parameters()}
    kept = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items() if n in like}
    head.load_state_dict(kept, strict=False, assign=True)
    return head.to(engine_config.device).eval().requires_grad_(False)


class _Beside(PagedAttention):
    """Whose input is twice as wide: norms of embeddings come first."""

    def __call__(self, x: Foreign, step: Step) -> torch.Tensor:
        return super().__call__(torch.cat([*step.batch.derived[_Beside], x], -1), step)


class EagleLayer(DraftLayer):
    def __init__(
        self, model: Foreign, stack: Foreign, kernels: Foreign, target: Foreign, *, multi_axis: bool
    ) -> None:
        """model.mtp is a `Head`; `target`: the model's layers."""
        head, middle = model.mtp, model.mtp.layers[0]
        self._kernels, self._join, self._head = kernels, head.fc, head.lm_head
        self._norms = [plain_norm(middle.input_layernorm), plain_norm(head.norm)]
        middle.input_layernorm = middle.hidden_norm  # of what the layer adds to
        self._multi_axis = multi_axis and head.rotary_emb is None
        head.embed_tokens, head.rotary_emb = stack.embed_tokens, head.rotary_emb or stack.rotary_emb
        family = SimpleNamespace(mixers=(_Beside,), fused_norm=plain_norm)
        self._decoder = FusedDecoder(head, kernels, family)
        self._offsets, self._seen = head.d2t, target.watch(*head.watched)
        self.num_drafts, self.graphs = 0, None

    def _known(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._join(self._seen[: len(hidden)])  # type: ignore[no-any-return]

    def _best(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._head(self._kernels.norm(hidden, *self._norms[1])).argmax(-1)
        return found + self._offsets[found]  # type: ignore[no-any-return]

    def _run(
        self, embeds: torch.Tensor, hidden: torch.Tensor, flat: FlatBatch, pool: KvPool
    ) -> torch.Tensor:
        """Hidden states before the last norm, which the decoder leaves in place of its input."""
        flat.derived[_Beside] = (self._kernels.norm(embeds, *self._norms[0]),)
        places = flat.positions[:, None] if self._multi_axis else flat.positions[:1]
        self._decoder.forward(hidden, places, flat, pool)
        return hidden
