"""Made checkpoints with a layer for drafts, and what transformers' own modules draft with it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.adapter import ModelAdapter, adapter_for
from epd.engine.base import StepSequence
from epd.model_files.checkpoint import read_checkpoint
from tests.engine.driver import Driver, Request
from tests.engine.reference import reference_model
from tests.engine.tiny_models import make_model

COUNT = 3
DRAFTING = EngineConfig(threads=1, kv_nbytes=4 << 20, speculative=SpeculativeConfig("mtp", COUNT))
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
PREFIXES = {  # where the layer lies behind those of the stack
    "deepseek_v3": "model.layers.3.",
    "kimi_k25": "language_model.model.layers.3.",
}
NAMES = {
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
}


class Drafting(Driver):
    """Whose requests are drafted by what the step before proposed."""

    agrees: bool

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.proposed: dict[str, list[int]] = {}
        self.made: dict[str, list[list[int]]] = {}

    async def step(self, requests: list[Request], chunk: int) -> None:  # type: ignore[override]
        active = [request for request in requests if not request.finished]
        batch = [self._wishing(request, request.next_step(chunk)) for request in active]
        result = await self.language.step(batch)
        for i, (request, sequence) in enumerate(zip(active, batch, strict=True)):
            outcome = result.outcomes[i]
            request.num_steps += 1
            said = outcome if isinstance(outcome, tuple) else (outcome,) if outcome else ()
            for token in said:
                if not request.finished:
                    request.output.append(token)  # type: ignore[arg-type]
            plain = len(sequence.token_ids) - sequence.num_drafts
            request.computed += plain if not sequence.num_drafts else len(said)
            drafts = list(result.drafts.get(i, ()))
            request.draft = lambda output, drafts=drafts: drafts  # type: ignore[misc]
            self.proposed[request.name] = drafts
            self.made.setdefault(request.name, []).append(drafts)

    def _wishing(self, request: Request, sequence: StepSequence) -> StepSequence:
        stop = sequence.start + len(sequence.token_ids)
        following = request.token_ids[stop] if stop < len(request.token_ids) else -1
        return replace(sequence, num_wanted=COUNT, next_id=following)


async def same_with_and_without(serving: Drafting, turn: Any, **wishes: Any) -> None:
    """Each token is drawn with its own number, so not the distribution alone stays: the answer."""
    plain = Driver(serving.model_dir, None, serving.language)
    plain.free = serving.free
    alone, drafted = [await d.request("r", turn, **wishes) for d in (plain, serving)]
    expected = await plain.run([alone])
    assert await serving.run([drafted]) == expected
    assert drafted.num_steps < alone.num_steps
    serving.release([alone, drafted])


def make_drafting(family: str, directory: Path, *, agreeing: bool, **text: Any) -> Path:
    """A checkpoint of this family with `mtp.*`.  `agreeing`: what comes next depends on the last
    token more than on anything, and the layer knows that, so most drafts are right."""
    behind = PREFIXES.get(family, "")
    make_model(family, directory, text | ({"num_nextn_predict_layers": 1} if behind else {}))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = draft_module(adapter_for(read_checkpoint(directory)))
        for parameter in module.parameters():
            scale = 0.1 if parameter.ndim == 1 else 0.15
            parameter.data = torch.randn_like(parameter) * scale
    if agreeing:
        size = module.fc.out_features
        module.fc.weight.data = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
        module.pre_fc_norm_embedding.weight.data.fill_(1.0 if behind else 0.0)
        (norm,) = (n for n in tensors if n.endswith("model.norm.weight"))
        module.norm.weight.data = tensors[norm].clone()
    own = {f"mtp.{name}": t.contiguous() for name, t in module.state_dict().items()}
    if agreeing:
        for some, scale in ((tensors, 0.015 if behind else 0.17), (own, 0.02)):
            some |= {
                name: tensor * scale
                for name, tensor in some.items()
                if name.endswith(OUTPUTS) and "vis" not in name
            }
    save_file(tensors | (_published(own, behind) if behind else own), path, {"format": "pt"})
    return directory


def _published(own: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """In DeepSeek-V3's layout: behind the last layer, experts apart, and copies that none reads."""
    found = {
        f"{prefix}{name}.weight": torch.ones(3) for name in ("embed_tokens", "shared_head.head")
    }
    for name, tensor in own.items():
        stem = name.removeprefix("mtp.").removeprefix("layers.0.")
        if ".experts." not in stem:
            found[prefix + NAMES.get(stem, stem)] = tensor
            continue
        mlp, kind = stem.split(".experts.")
        for number, expert in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            parts = dict(halves) if kind == "gate_up_proj" else {kind: expert}
            for part, half in parts.items():
                found[f"{prefix}{mlp}.experts.{number}.{part}.weight"] = half.contiguous()
    return found


def draft_module(adapter: ModelAdapter) -> Any:
    modelling = importlib.import_module(f"transformers.models.{adapter.modelling}")
    return adapter.draft_layer(modelling)


@cache
def _theirs(model_dir: Path) -> Any:
    """Transformers' own module for layers of DeepSeek-V3's layout, as it reads the checkpoint."""
    from transformers.modeling_layers import MtpModel, get_model_conversion_mapping

    model, stored = reference_model(model_dir), load_file(model_dir / "model.safetensors")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
    if not hasattr(model.model, "language_model"):
        return MtpModel.from_pretrained(model)
    stored = {n.removeprefix("language_model."): t for n, t in stored.items() if ".layers.3." in n}
    with tempfile.TemporaryDirectory() as directory:  # it reads those of text alone
        save_file(stored, f"{directory}/model.safetensors")
        model.config.name_or_path = directory
        model._weight_conversions = get_model_conversion_mapping(model.model.language_model)
        return MtpModel.from_pretrained(model)


@cache
def _drafter(model_dir: Path) -> Any:
    module = draft_module(adapter_for(read_checkpoint(model_dir)))
    stored = load_file(model_dir / "model.safetensors")
    own = {name.removeprefix("mtp."): t for name, t in stored.items() if name.startswith("mtp.")}
    module.load_state_dict(own)
    return module.eval()


@torch.no_grad()
def reference_drafts(model_dir: Path, token_ids: Sequence[int], count: int) -> list[int]:
    """Of a text without images, of which all but the last token are computed."""
    model = reference_model(model_dir)
    if hasattr(model.config.get_text_config(), "num_nextn_predict_layers"):
        return _drafts_of_theirs(model_dir, token_ids, count)
    module = _drafter(model_dir)
    stack: nn.Module = model.model.language_model
    ids = torch.tensor([list(token_ids)])
    known = model.model(input_ids=ids[:, :-1]).last_hidden_state[0]
    embeds = stack.embed_tokens(ids[0, 1:])
    drafts: list[int] = []
    for _ in range(count):
        pair = module.pre_fc_norm_embedding(embeds), module.pre_fc_norm_hidden(known)
        x = module.fc(torch.cat(pair, -1))[None]
        places = torch.arange(x.shape[1])[None, None].expand(3, 1, -1)
        turned = stack.rotary_emb(x, places)
        found = module.layers[0](x, position_embeddings=turned, attention_mask=None)
        found = found[0] if isinstance(found, tuple) else found
        hidden = module.norm(found)[0, -1:]
        drafts.append(int(model.lm_head(hidden).argmax()))
        embeds = torch.cat([embeds, stack.embed_tokens(torch.tensor(drafts[-1:]))])
        known = torch.cat([known, hidden])
    return drafts


def _drafts_of_theirs(model_dir: Path, token_ids: Sequence[int], count: int) -> list[int]:
    model, module = reference_model(model_dir), _theirs(model_dir)
    ids = torch.tensor([list(token_ids)])
    known = model.model(input_ids=ids[:, :-1]).last_hidden_state
    for _ in range(count):
        places = torch.arange(1, ids.shape[1])[None]
        hidden = module.forward_layer(0, known, places, None, input_ids=ids[:, 1:])[:, -1:]
        best = model.lm_head(hidden).argmax(-1)
        ids, known = torch.cat([ids, best], 1), torch.cat([known, hidden], 1)
    return ids[0, len(token_ids) :].tolist()  # type: ignore[no-any-return]
