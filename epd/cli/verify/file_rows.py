"""Rows that need no model: what is in the files, and what both sides make of texts and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from epd.api.http.errors import ApiError
from epd.cli.verify.findings import Distance, Finding, judged, same
from epd.cli.verify.questions import SIZES, conversations, picture, prompts
from epd.cli.verify.sides import Sides
from epd.model_files.checkpoint import read_eos_token_ids
from epd.model_files.config_sizes import Sizes, parameters
from epd.model_files.families import family_of
from epd.model_files.model_directory import check_config, check_processors, check_tensors, some

# Of a config, what no number of a model depends on, or what --layers and --dtype change.
_NOT_COMPARED = re.compile(
    r"(^|\.)(_\w+|transformers_version|architectures|dtype|torch_dtype|num_hidden_layers|"
    r"layer_types|deepstack_visual_indexes|first_k_dense_replace|use_cache|quantization_config)(\.|$)"
)
PIXEL_LIMIT = 1e-4  # spreads


async def tensors(sides: Sides) -> Finding:
    checkpoint = sides.whole
    check_tensors(checkpoint)
    family = family_of(checkpoint.directory, checkpoint.config)
    skipped = [n for n in checkpoint.tensors if any(re.search(p, n) for p in family.skipped)]
    sizes = Sizes(checkpoint.directory / "config.json", checkpoint.config, family)
    count = len(parameters(family, sizes))
    files = {entry.file for entry in checkpoint.tensors.values()}
    left = f"; not read on purpose: {some(skipped)}" if skipped else ""
    return same(
        f"{len(checkpoint.tensors)} tensors of {len(files)} files fill {count} parameters{left}",
        tensors=len(checkpoint.tensors), skipped=skipped,
    )  # fmt: skip


async def config(sides: Sides) -> Finding:
    from transformers import AutoConfig

    check_config(sides.whole)
    check_processors(sides.whole)
    theirs = dict(_flat(AutoConfig.from_pretrained(sides.theirs.directory).to_dict()))
    ours = dict(_flat(sides.ours.adapter.config.to_dict()))
    faults = [
        f"{name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
        for name in sorted(ours.keys() | theirs.keys())
        if not _NOT_COMPARED.search(name) and ours.get(name) != theirs.get(name)
    ]
    return judged(faults, f"{sides.whole.model_type}, {len(ours)} settings that are implemented")


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


async def template(sides: Sides) -> Finding:
    faults, refused = [], 0
    asked = conversations(sees=sides.sees)
    for number, body in enumerate(asked):
        right = sides.theirs.texts(body)
        try:
            text = sides.ours.text(body)
        except ApiError as error:
            # A template without tools writes none: asking for them is refused here.
            is_known = not right or ("tools" in body and error.param in ("tools", "messages"))
            refused += is_known
            if not is_known:
                faults.append(f"conversation {number} is refused: {error}")
            continue
        if text not in right:
            faults.append(f"conversation {number}: {_apart(text, right)}")
    more = f"; {refused} are refused" if refused else ""
    return judged(faults, f"{len(asked) - refused} conversations{more}", refused=refused)


def _apart(text: str, right: list[str]) -> str:
    """Where a text and the right one part."""
    if not right:
        return "transformers refuses it"
    pairs = zip(text, right[-1], strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(right[-1])))
    show = slice(place, place + 24)
    return f"{text[show]!r} here, {right[-1][show]!r} there, at character {place}"


async def tokenizer(sides: Sides) -> Finding:
    asked = conversations(sees=sides.sees)
    faults, otherwise = [], 0
    auto = sides.theirs.auto_tokenizer
    for number, body in enumerate(asked):
        for text in sides.theirs.texts(body):
            otherwise += auto(text, add_special_tokens=False)["input_ids"] != sides.theirs.ids(text)
            ours, theirs = sides.ours.ids(text), sides.theirs.ids(text)
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                faults.append(f"conversation {number} is another token sequence from {place} on")
    missing = set(read_eos_token_ids(sides.theirs.directory)) - set(sides.ends)
    faults += [f"token {token} does not end an answer here" for token in sorted(missing)]
    note = (
        f"; {type(auto).__name__} of AutoTokenizer reads {otherwise} texts otherwise than "
        "tokenizer.json, which is read here"
    )
    detail = f"{len(asked)} conversations, token for token; ends: {sides.ends}"
    return judged(faults, detail + (note if otherwise else ""), auto_differs=otherwise)


async def pictures(sides: Sides) -> Finding:
    faults, distance = [], Distance()
    for number, size in enumerate(SIZES):
        image = picture(number)
        ours, grid, _ = sides.ours.pixels(image)
        right = sides.theirs.pixels(image)
        theirs = right["pixel_values"]
        if "image_grid_thw" in right and tuple(right["image_grid_thw"][0].tolist()) != grid:
            faults.append(f"{size}: grid {grid}, not {right['image_grid_thw'][0].tolist()}")
        elif ours.numel() != theirs.numel():
            faults.append(f"{size}: {tuple(ours.shape)} numbers, not {tuple(theirs.shape)}")
        elif not (apart := distance.add(ours.flatten(), theirs.flatten())) <= PIXEL_LIMIT:
            faults.append(f"{size}: patches differ by {apart:.2g} spreads")
    return judged(faults, f"grids and patches of {len(SIZES)} pictures: {distance}",
                  **distance.numbers)  # fmt: skip


async def placeholders(sides: Sides) -> Finding:
    """Of prompts with pictures, as the gateway sends them."""
    faults = []
    asked = [body for n, body in enumerate(prompts(sees=True)) if n % 2]
    for number, body in enumerate(asked):
        ours = list((await sides.ours.prompt(body)).token_ids)
        theirs = sides.theirs.inputs(body)["input_ids"][0].tolist()
        if ours != theirs:
            faults.append(f"prompt {number}: {len(ours)} tokens, not these {len(theirs)}")
    return judged(faults, f"{len(asked)} prompts with pictures, token for token")
