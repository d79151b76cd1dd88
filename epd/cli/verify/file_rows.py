"""Rows that need no model: what is in the files, and what both sides make of texts and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from epd.api.http.errors import ApiError
from epd.cli.verify import questions
from epd.cli.verify.findings import Apart, Finding, LeftOut, judged, parting
from epd.cli.verify.sides import Sides
from epd.families.registry import family_of
from epd.model_files.checkpoint import read_eos_token_ids
from epd.model_files.config_sizes import Sizes, parameters
from epd.model_files.model_directory import check_config, check_processors, check_tensors, some

# Of a config, what no number of a model depends on, or what --layers and --dtype change.
_NOT_COMPARED = re.compile(
    r"(^|\.)(_\w+|transformers_version|architectures|dtype|torch_dtype|num_hidden_layers|"
    r"layer_types|deepstack_visual_indexes|first_k_dense_replace|use_cache|quantization_config)(\.|$)"
)
PIXEL_LIMIT = 1e-4  # spreads: float32 rounds far less, and a grey level is a hundred times more


def tensors(sides: Sides) -> Finding:
    checkpoint = sides.whole
    check_tensors(checkpoint)
    family = family_of(checkpoint.directory, checkpoint.config)
    skipped = [n for n in checkpoint.tensors if any(re.search(p, n) for p in family.skipped)]
    sizes = Sizes(checkpoint.directory / "config.json", checkpoint.config, family)
    count = len(parameters(family, sizes))
    files = {entry.file for entry in checkpoint.tensors.values()}
    left = f"; not read on purpose: {some(skipped)}" if skipped else ""
    detail = (
        f"{len(checkpoint.tensors)} tensors of {len(files)} files fill {count} parameters{left}"
    )
    return judged((), detail, tensors=len(checkpoint.tensors), skipped=skipped)


def config(sides: Sides) -> Finding:
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


def template(sides: Sides) -> Finding:
    faults, refused = [], 0
    asked = questions.conversations(sees=sides.sees)
    for number, body in enumerate(asked):
        right = sides.theirs.text(body)
        try:
            text = sides.ours.text(body)
        except ApiError as error:
            # A template without tools writes none: asking for them is refused here.
            is_known = not right or ("tools" in body and error.param in ("tools", "messages"))
            refused += is_known
            if not is_known:
                faults.append(f"conversation {number} is refused: {error}")
            continue
        if not right:
            faults.append(f"conversation {number}: transformers refuses it")
        elif (place := parting(text, right)) is not None:
            mine, wanted = (one[place : place + 24] for one in (text, right))
            where = f"conversation {number}, character {place}"
            faults.append(f"{where}: {mine!r} here, {wanted!r} there")
    if refused == len(asked):
        raise LeftOut("the template refuses all conversations")
    more = f"; {refused} are refused" if refused else ""
    return judged(faults, f"{len(asked) - refused} conversations{more}", refused=refused)


def tokenizer(sides: Sides) -> Finding:
    """What AutoTokenizer reads otherwise is noted: it may build another pre-tokenizer than the file
    has, by which the model was trained."""
    ours, theirs, auto = sides.ours, sides.theirs, sides.theirs.auto_tokenizer
    texts = list(filter(None, map(theirs.text, questions.conversations(sees=sides.sees))))
    apart = {text: parting(ours.ids(text), theirs.ids(text)) for text in texts}
    faults = [
        f"{text[:24]!r}… becomes other tokens from token {place} on"
        for text, place in apart.items() if place is not None
    ]  # fmt: skip
    ends = ours.renderer.end_token_ids
    missing = sorted(set(read_eos_token_ids(theirs.directory)) - set(ends))
    faults += [f"token {token} does not end an answer here" for token in missing]
    otherwise = [t for t in texts if auto(t, add_special_tokens=False).input_ids != theirs.ids(t)]
    note = (
        f"; AutoTokenizer ({type(auto).__name__}) does not keep to tokenizer.json, which is read "
        f"here, in {len(otherwise)} of them" if otherwise else ""
    )  # fmt: skip
    detail = f"{len(apart)} texts, token for token; ends: {ends}{note}"
    return judged(faults, detail, auto_differs=len(otherwise))


def pictures(sides: Sides) -> Finding:
    faults, found = [], []
    for number, size in enumerate(questions.SIZES):
        image = questions.picture(number)
        ours, right = sides.ours.patches(image), sides.theirs.pixels(image)
        theirs = _cut(right, ours.pixels)
        grid = right.get("image_grid_thw", torch.tensor([ours.grid_thw]))[0].tolist()
        if list(ours.grid_thw) != grid:
            faults.append(f"{size}: grid {list(ours.grid_thw)}, not {grid}")
        elif ours.pixels.numel() != theirs.numel():
            faults.append(f"{size}: {ours.pixels.numel()} numbers, not {theirs.numel()}")
        else:
            found.append(Apart.of(ours.pixels.reshape(theirs.shape), theirs))
            if not found[-1].largest <= PIXEL_LIMIT:
                faults.append(f"{size}: patches differ by {found[-1].largest:.2g} spreads")
    apart = Apart.worst(found)
    return judged(faults, f"grids and patches of {len(found)} pictures: {apart}", **asdict(apart))


def _cut(right: Mapping[str, torch.Tensor], ours: torch.Tensor) -> torch.Tensor:
    """Patches: where a tower takes a whole image, ours are cut before it; theirs may be padded."""
    theirs = right["pixel_values"]
    if ours.ndim == 1:  # views of several sizes, those of tiles first
        return torch.cat([right.get("pixel_values_local", theirs[:0]).flatten(), theirs.flatten()])
    if (places := right.get("image_position_ids")) is not None:
        return theirs[(places >= 0).all(-1)]
    if theirs.ndim != 4 or len(theirs) == len(ours):
        return theirs
    side = math.isqrt(ours[0].numel() // theirs.shape[1])
    return torch.nn.functional.unfold(theirs, side, stride=side)[0].T


def placeholders(sides: Sides) -> Finding:
    """Of prompts with pictures, as the gateway sends them."""
    faults = []
    asked = sides.asked("images")
    for number, body in enumerate(asked):
        ours = sides.ours.run(sides.ours.prompt(body)).token_ids
        theirs = sides.theirs.inputs(body)["input_ids"][0].tolist()
        if list(ours) != theirs:
            faults.append(f"prompt {number}: {len(ours)} tokens, not these {len(theirs)}")
    return judged(faults, f"{len(asked)} prompts with pictures, token for token")
