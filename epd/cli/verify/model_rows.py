"""Rows that need the model: weights, rows of the tower, positions, logits, answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from epd.cli.ask.client import Client
from epd.cli.ask.temporary import with_server
from epd.cli.start.plan import Placing, plan_topology
from epd.cli.start.ports import settle_port
from epd.cli.verify import questions
from epd.cli.verify.findings import FACTOR, Apart, Finding, judged, parting
from epd.cli.verify.sides import Sides
from epd.engine.adapter import adapter_for
from epd.engine.weights.loading import load_stage
from epd.errors import INTERRUPTED, OK
from epd.frontend import JsonObject
from epd.model_files.checkpoint import read_checkpoint


def rounding(sides: Sides) -> Finding:
    """First, while nothing else is in memory."""
    found = {row: apart for row, (_, apart) in sides.right.items()}
    each = ", ".join(f"{row} {apart.largest:.2g}" for row, apart in found.items())
    numbers = {row: asdict(apart) for row, apart in found.items()}
    return judged((), f"moves {each} spreads; {FACTOR} times as far is the same", **numbers)


def weights(sides: Sides) -> Finding:
    """Stage by stage, as each is loaded, before anything is exchanged in it."""
    named = dict(sides.theirs.model.named_parameters(remove_duplicate=False))
    right = named | dict(sides.theirs.model.named_buffers())
    adapter = adapter_for(read_checkpoint(sides.directory))
    faults, seen = [], set()
    for stage in ("vision", "language") if sides.sees else ("language",):
        model = load_stage(
            adapter, stage, sides.theirs.dtype, sides.device,
            allow_unused=sides.settings.engine.allow_unused_tensors,
        )  # fmt: skip
        for name, value in model.named_parameters(remove_duplicate=False):
            seen.add(name)
            if name not in right:
                faults.append(f"{name} is not in transformers' model")
            elif value.shape != right[name].shape:
                faults.append(f"{name}: {tuple(value.shape)}, not {tuple(right[name].shape)}")
            elif not torch.equal(value, right[name].to(value.dtype)):
                apart = (value.float() - right[name].float()).abs().max()
                faults.append(f"{name} differs by {float(apart):.2g}")
    faults += [f"{name} is not loaded" for name in sorted(named.keys() - seen)]
    return judged(faults, f"{len(seen)} parameters, bit for bit")


def _rotation(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Frequencies and factors, of each kind of layers that has its own."""
    frequencies = {n: v.float() for n, v in module.named_buffers() if n.endswith("inv_freq")}
    factors = {n: v for n, v in vars(module).items() if n.endswith("attention_scaling")}
    return frequencies, factors


def positions(sides: Sides) -> Finding:
    """The frequencies of rotary positions, and where the tokens of prompts with pictures stand."""
    faults = []
    models = (sides.ours.language.model, sides.theirs.model)
    stacks = (sides.ours.adapter.language_model(model) for model in models)
    ours, theirs = (getattr(stack, "rotary_emb", None) for stack in stacks)
    if theirs is not None and ours is not None:
        (mine, my_scaling), (right, scaling) = map(_rotation, (ours, theirs))
        apart = max(float((mine[name] - right[name]).abs().max()) for name in right)
        if not apart <= 1e-6 or my_scaling != scaling:
            faults.append("the frequencies of rotary positions differ")
    find = getattr(sides.theirs.model.model, "get_rope_index", None)
    asked = sides.asked("images") if find else []
    for number, body in enumerate(asked):
        request, record = sides.ours.run(sides.ours.request(body, 1))
        assert find is not None
        inputs = sides.theirs.inputs(body)
        right, delta = find(**{name: v for name, v in inputs.items() if "pixel" not in name})
        mine = torch.as_tensor(record.positions)
        if not torch.equal(mine, right[:, 0].cpu()) or int(delta[0]) != request.rope_delta:
            faults.append(f"prompt {number}: its tokens stand elsewhere")
    places = f", and places in {len(asked)} prompts with pictures" if asked else ""
    return judged(faults, f"frequencies of rotary positions{places}")


def _numbers(sides: Sides, row: str) -> Finding:
    right, rounding = sides.right[row]
    kind = "picture" if row == "tower" else "prompt"
    faults, found = [], []
    for number, (asked, theirs) in enumerate(zip(sides.asked(row), right, strict=True)):
        ours = sides.ours.run(sides.ours.numbers(asked))
        if ours.shape != theirs.shape:
            return judged([f"{kind} {number}: {tuple(ours.shape)}, not {tuple(theirs.shape)}"], "")
        apart = Apart.of(ours, theirs)
        if not math.isfinite(apart.largest):  # no rounding does that, nor another expert
            return judged([f"{kind} {number} has numbers that are none"], "")
        found.append(apart)
        if not apart.within(rounding):
            faults.append(f"{kind} {number} differs by {apart}")
    apart = Apart.worst(found)
    detail = f"{len(found)} {kind}s: {apart}; rounding alone: {rounding}"
    return _few(sides, faults, len(found), detail, asdict(apart))


tower, text, images = (partial(_numbers, row=row) for row in ("tower", "text", "images"))


def _few(sides: Sides, faults: list[str], total: int, detail: str, numbers: JsonObject) -> Finding:
    """Fewer than such a share may differ where rounding gives tokens to other experts."""
    if faults and len(faults) < sides.most_jumps * total:
        detail += f"; further apart, as where a token gets another expert: {'; '.join(faults)}"
        faults = []
    return judged(faults, detail, **numbers)


def answers(sides: Sides) -> Finding:
    ours = sides.ours
    return _compared(
        [ours.run(ours.answer(b, questions.NUM_NEW_TOKENS)) for b in sides.to_answer()], sides
    )


def _compared(said: Sequence[Sequence[int]], sides: Sides) -> Finding:
    """Answers, with transformers'; they may part where two tokens are as likely: where rounding of
    both sides explains that another one is chosen."""
    limit = 2 * FACTOR * max(apart.largest for _, apart in sides.right.values())
    faults, partings = [], []
    for number, (mine, (right, logits)) in enumerate(zip(said, sides.answers, strict=True)):
        if (place := parting(mine, right)) is None:
            continue
        ours, theirs = ((*ids, None)[place] for ids in (mine, right))  # None: it has ended
        margin = math.inf
        if ours is not None and theirs is not None:
            margin = float((logits[place, theirs] - logits[place, ours]) / logits[place].std())
        partings.append([number, place, ours, theirs, margin])
        if not margin <= limit:
            faults.append(
                f"answers to question {number} part at token {place}: {ours} here, {theirs} there, "
                f"whose logits are {margin:.2g} spreads apart"
            )
    total = sum(len(right) for right, _ in sides.answers)
    ties = len(partings) - len(faults)
    close = f"; {ties} part where two tokens are as likely" if ties else ""
    detail = f"{len(said)} greedy answers of {total} tokens{close}"
    return _few(sides, faults, len(said), detail, {"partings": partings})


def processes(sides: Sides) -> Finding:
    """The same questions, when nothing else is in memory."""
    sides.unload()
    settings = settle_port(sides.settings, wanted=None)
    topology = "1e1p1d" if sides.sees else "1p1d"
    said: list[list[int]] = []

    async def ask(client: Client) -> int:
        fixed = {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True}
        for body in sides.to_answer():
            reply = await client.complete(body | fixed | {"max_tokens": questions.NUM_NEW_TOKENS})
            said.append(reply["choices"][0]["token_ids"])
        return OK

    if with_server(plan_topology(topology, settings, Placing(), sides.log), ask) == INTERRUPTED:
        raise KeyboardInterrupt
    return _compared(said, sides)
