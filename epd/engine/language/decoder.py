"""A decoder stack as few kernels: transformers' weights, our order of operations.

Theory of operation
-------------------
transformers runs about a hundred small operations per layer.  On a GPU each costs a launch, and
each that is not a matrix product reads and writes all activations once more.  Here a layer is norm,
mixer, norm, MLP, and with common attention four products and five kernels.  The norm takes the
residual sum with it; query, key and value are one product, as are gate and up.  Head norms, rope
and the write into the KV pool are one kernel.

`FusedDecoder.fits` admits stacks of RMS norms, a mixer of the family (`mixers`) and SwiGLU, a
mixture of experts (`experts`) or any module in its place.  Other stacks run through transformers'
code and the seam of `epd.engine.language.attention`.

Weights of fused products are laid side by side in new memory and the modules' own become views of
it, so nothing is held twice.  Where they have eight bits (`fp8`), norm and gate give their rows so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from epd.engine.language.drafts.replay import Replays
from epd.engine.language.experts import Mixture
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import Mixer, MixerFamily, Norm, Step
from epd.engine.language.products import Foreign, is_swiglu, swiglu, takes_fp8
from epd.engine.language.row_splice import AddedRows

# Of rows and their tokens' slots: those of tokens that pad are below 0, and need not be computed.
Mlp = Callable[[Foreign, torch.Tensor], torch.Tensor]
_BESIDE = frozenset({"mlp", "input_layernorm", "post_attention_layernorm"})  # the mixer


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Norm
    mixer: Mixer
    mlp_norm: Norm
    mlp: Mlp
    mlp_input: Foreign  # its first product, if that may take rows of eight bits


class Decoder(Protocol):
    """The embedding, the decoder layers and the final norm of a loaded stack."""

    can_be_captured: bool
    captures_prompts: bool
    replays: Sequence[Replays]  # its mixers with states of sequences

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[T, H]`, which may be written, of tokens `[T]`."""

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        batch: FlatBatch,
        pool: KvPool,
        added: Sequence[AddedRows] = (),
    ) -> torch.Tensor:
        """Hidden states behind the final norm, `[T, H]`.

        embeds `[T, H]`, overwritten; positions `[3, 1, T]` or `[1, T]`.
        """


class FusedDecoder:
    """Layers of norm, mixer, norm, MLP."""

    def __init__(self, stack: Any, kernels: Any, family: MixerFamily) -> None:
        self._kernels = kernels
        self._family = family
        self.embed = stack.embed_tokens
        self._rotary = stack.rotary_emb
        self._norm = family.fused_norm(stack.norm)
        self.can_be_captured = True  # no module of unknown inside
        self._layers = [self._fuse(layer) for layer in stack.layers]
        self.captures_prompts = not any(layer.mixer.reads_chunks for layer in self._layers)
        self._watched: dict[int, torch.Tensor] = {}  # by layer
        self.replays: Sequence[Replays] = [
            one.mixer for one in self._layers if isinstance(one.mixer, Replays)
        ]

    @staticmethod
    def fits(stack: Any, family: MixerFamily) -> bool:
        for layer in stack.layers:
            names = {name for name, _ in layer.named_children()}
            if not (names > _BESIDE and len(names - _BESIDE) == 1 and _mixer_of(layer, family)):
                return False
        return True

    def watch(self, layers: Sequence[int], max_tokens: int) -> torch.Tensor:
        """`[max_tokens, len(layers) * H]`: where each step puts what these layers read."""
        seen: torch.Tensor = self.embed.weight[:1].repeat(max_tokens, len(layers))
        self._watched = dict(zip(layers, seen.chunk(len(layers), 1), strict=True))
        return seen

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        batch: FlatBatch,
        pool: KvPool,
        added: Sequence[AddedRows] = (),
    ) -> torch.Tensor:
        ops = self._kernels
        cos, sin = (part[0].contiguous() for part in self._rotary(embeds[None], positions))
        step = Step(batch, pool, cos, sin)
        residual = embeds
        first = self._layers[0]
        x = ops.norm(residual, *first.input_norm, fp8=first.mixer.takes_fp8)
        for index, layer in enumerate(self._layers):
            if index in self._watched:
                self._watched[index][: len(residual)].copy_(residual)
            x = layer.mixer(x, step)
            x = ops.norm(x, *layer.mlp_norm, residual=residual, fp8=takes_fp8(layer.mlp_input))
            x = layer.mlp(x, batch.slots)
            for addition in added:
                if index < len(addition.rows):
                    rows = addition.rows[index]
                    x[addition.at : addition.at + len(rows)] += rows
            if index + 1 < len(self._layers):
                following = self._layers[index + 1]
                norm, fp8 = following.input_norm, following.mixer.takes_fp8
                x = ops.norm(x, *norm, residual=residual, fp8=fp8)
        hidden: torch.Tensor = ops.norm(x, *self._norm, residual=residual)
        return hidden

    def _fuse(self, layer: Any) -> _Layer:
        norm_of = self._family.fused_norm
        mixer_of = _mixer_of(layer, self._family)
        assert mixer_of is not None, "the stack does not fit"
        fused = _Layer(
            norm_of(layer.input_layernorm),
            mixer_of(layer, self._kernels, norm_of),
            norm_of(layer.post_attention_layernorm),
            *self._fuse_mlp(layer.mlp),
        )
        # What the weights were made of, before those of the next layer are put into its place and
        # so keep the rest of it: the KV pool is made of whole pieces of the device.
        torch.cuda.empty_cache()
        return fused

    def _fuse_mlp(self, mlp: Foreign) -> tuple[Mlp, Foreign]:
        if isinstance(mlp, Mixture):
            return mlp, None
        if is_swiglu(mlp):
            product, first = swiglu(mlp, self._kernels)
            return (lambda x, slots: product(x)), first
        self.can_be_captured = False
        return (lambda x, slots: _only_tensor(mlp(x[None]))[0]), None


def _mixer_of(layer: Any, family: MixerFamily) -> type[Mixer] | None:
    return next((mixer for mixer in family.mixers if mixer.fits(layer)), None)


def _only_tensor(output: Any) -> torch.Tensor:
    """Mixtures of experts of some families give their router's logits too."""
    return output[0] if isinstance(output, tuple) else output
