"""Rows that need the model: weights, rows of the tower, positions, logits, answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.cli.ask.client import Client
from epd.cli.verify.findings import (
    TOLERANCES,
    Distance,
    Finding,
    Parting,
    differs,
    judged,
    parting,
)
from epd.cli.verify.questions import NUM_NEW_TOKENS, SIZES, Body, picture, prompts, sent
from epd.cli.verify.sides import Sides
from epd.engine.weights.loading import DTYPES, load_stage
from epd.families.registry import adapter_for
from epd.model_files.checkpoint import read_checkpoint


async def weights(sides: Sides) -> Finding:
    """Stage by stage, as each is loaded, before anything is exchanged in it."""
    right = dict(sides.theirs.model.named_parameters(remove_duplicate=False))
    right |= dict(sides.theirs.model.named_buffers())
    adapter = adapter_for(read_checkpoint(sides.directory))
    faults, seen = [], set()
    for stage in ("vision", "language") if sides.sees else ("language",):
        model = load_stage(
            adapter, stage, DTYPES[sides.dtype], sides.device,
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
    lacking = {n for n, _ in sides.theirs.model.named_parameters(remove_duplicate=False)} - seen
    faults += [f"{name} is not loaded" for name in sorted(lacking)]
    return judged(faults, f"{len(seen)} parameters, bit for bit")


async def tower(sides: Sides) -> Finding:
    faults, distance, limit = [], Distance(), TOLERANCES[sides.dtype].largest
    for number, size in enumerate(SIZES):
        ours, theirs = await sides.ours.rows_of(picture(number)), sides.theirs.rows(picture(number))
        if ours.shape != theirs.shape:
            faults.append(f"{size}: {tuple(ours.shape)} rows, not {tuple(theirs.shape)}")
        elif not (apart := distance.add(ours, theirs)) <= limit:
            faults.append(f"{size}: rows differ by {apart:.2g} spreads")
    return judged(faults, f"rows of {len(SIZES)} pictures: {distance}", **distance.numbers)


async def positions(sides: Sides) -> Finding:
    """The frequencies of rotary positions, and where the tokens of prompts with pictures stand."""
    faults = []
    stacks = [
        sides.ours.adapter.language_model(model)
        for model in (sides.ours.language.model, sides.theirs.model)
    ]
    ours, theirs = (getattr(stack, "rotary_emb", None) for stack in stacks)
    if theirs is not None and ours is not None:
        apart = (ours.inv_freq.float() - theirs.inv_freq.float()).abs().max()
        if apart > 1e-6 or ours.attention_scaling != theirs.attention_scaling:
            faults.append("the frequencies of rotary positions differ")
    find = getattr(sides.theirs.model.model, "get_rope_index", None)
    asked = [b for n, b in enumerate(prompts(sees=sides.sees)) if n % 2] if find else []
    for number, body in enumerate(asked):
        assert find is not None
        placed = await sides.ours.place(body, 1)
        inputs = sides.theirs.inputs(body)
        kept = {name: v for name, v in inputs.items() if "pixel" not in name}
        right, delta = find(**kept)
        mine = torch.as_tensor(placed.rope.positions)
        if not torch.equal(mine, right[:, 0].cpu()) or int(delta[0]) != placed.rope.delta:
            faults.append(f"prompt {number}: its tokens stand elsewhere")
    places = f", and places in {len(asked)} prompts with pictures" if asked else ""
    return judged(faults, f"frequencies of rotary positions{places}")


async def text_logits(sides: Sides) -> Finding:
    return await _logits(sides, [b for n, b in enumerate(prompts(sees=False)) if n % 2 == 0])


async def picture_logits(sides: Sides) -> Finding:
    return await _logits(sides, [b for n, b in enumerate(prompts(sees=True)) if n % 2])


async def _logits(sides: Sides, asked: Sequence[Body]) -> Finding:
    faults, distance, limit = [], Distance(), TOLERANCES[sides.dtype]
    for number, body in enumerate(asked):
        ours = await sides.ours.logits(body)
        theirs = sides.theirs.logits(sides.theirs.inputs(body))
        apart = distance.add_logits(ours, theirs)
        if not apart <= limit.largest:
            faults.append(f"prompt {number}: logits differ by {apart:.2g} spreads")
    if distance.kl > limit.kl and not faults:
        faults.append(f"divergence of {distance.kl:.2g} nats")
    detail = f"{len(asked)} prompts: {distance}, {distance.kl:.1g} nats apart"
    found = judged(faults, detail, **distance.numbers)
    return found if not faults else differs(f"{found.detail} ({detail})", **found.numbers)


async def answers(sides: Sides) -> Finding:
    asked = sides.questions()
    said = [await sides.ours.answer(body, NUM_NEW_TOKENS, sides.ends) for body in asked]
    return compared(said, sides)


def compared(said: Sequence[Sequence[int]], sides: Sides) -> Finding:
    """Answers, with transformers'."""
    faults, ties, total = [], 0, 0
    partings: list[Parting | None] = []
    for number, (mine, (right, logits)) in enumerate(zip(said, sides.answers(), strict=True)):
        total += len(right)
        found = parting(mine, right, logits)
        partings.append(found)
        if found is not None and found.margin <= TOLERANCES[sides.dtype].margin:
            ties += 1
        elif found is not None:
            faults.append(f"answers to question {number} {found}")
    close = f"; {ties} part where two tokens are as likely" if ties else ""
    told = [None if p is None else [p.place, p.ours, p.theirs, p.margin] for p in partings]
    return judged(faults, f"{len(said)} greedy answers of {total} tokens{close}", partings=told)


async def served(sides: Sides, client: Client) -> Finding:
    """The same questions, of processes."""
    said = []
    for body in sides.questions():
        asked = {"max_tokens": NUM_NEW_TOKENS, "temperature": 0, "return_token_ids": True}
        reply = await client.complete(sent(body) | asked | {"repetition_penalty": 1.0})
        said.append(reply["choices"][0]["token_ids"])
    return compared(said, sides)
