"""Is this a model directory that can be served?  Answered without torch, before any process starts.

One check for `epd run` and `epd doctor`: what one refuses the other refuses, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from epd.families.registry import family_of
from epd.model_files.checkpoint import Checkpoint, ModelError, is_there, read_checkpoint
from epd.model_files.model_directory import check_config, check_processors, check_tensors
from epd.topology import ROLES

BUNDLED_NAME = "epd-tiny"


def bundled_model() -> Path:
    from epd.tiny import CHECKPOINT

    return CHECKPOINT


def served_name(model_dir: str) -> str:
    """In the API, if nothing else is asked for; empty: like the directory."""
    if not model_dir:
        return BUNDLED_NAME
    from epd.cli.configure.hub import is_hub_name

    return model_dir if is_hub_name(model_dir) else ""


def fault_of_texts(directory: Path, template: str) -> str:
    """What is wrong with tokenizer, chat template and generation_config.json; empty: nothing."""
    from epd.api.prompts.model_texts import fault_of

    return fault_of(directory, template)


def check_model(
    model_dir: str,
    roles: Collection[str] = ROLES,
    with_gateway: bool = True,
    *,
    weights: bool = True,
    allow_unused: bool = False,
    template: str = "",
    fault_of_texts: Callable[[Path, str], str] = fault_of_texts,
) -> Checkpoint:
    """A model that these roles can serve, but for its weights; its directory is absolute.

    `model_dir`: a directory, ORG/NAME of the Hugging Face hub, or "" for the bundled one.

    `weights`: they must be there too.  `allow_unused`: tensors that no stage has are left out.
    `template`: a file that is used instead of the model's own.

    Raises ModelError: one sentence with the file and the remedy.
    """
    needs_weights = bool(roles) and weights
    directory = bundled_model()
    if model_dir:
        from epd.cli.configure.hub import find_model

        directory = find_model(model_dir, weights=needs_weights)
    checkpoint = read_checkpoint(directory, weights=False)
    family = family_of(directory, checkpoint.config)
    if "encode" in roles and len(roles) == 1 and not family.vision:
        raise ModelError(
            f"{directory} is a text-only {checkpoint.model_type!r} model; it has nothing to "
            "encode: start it with prefill and decode"
        )
    check_config(checkpoint)
    check_processors(checkpoint)
    if needs_weights:  # only now: they may be long in coming, for a model that is refused
        checkpoint = read_checkpoint(directory)
        stages = {"vision" if role == "encode" else "language" for role in roles}
        check_tensors(checkpoint, stages, allow_unused=allow_unused)
    if with_gateway:
        _check_texts(directory, template, fault_of_texts)
    return checkpoint


def _check_texts(
    directory: Path, template: str, fault_of_texts: Callable[[Path, str], str]
) -> None:
    if not is_there(directory / "tokenizer.json"):
        remedy = "copy it from the published checkpoint"
        if is_there(directory / "tiktoken.model"):
            remedy = (
                "make it of tiktoken.model, with save_pretrained of what transformers' "
                "AutoTokenizer.from_pretrained gives for this directory"
            )
        raise ModelError(
            f"{directory} has no tokenizer.json; the gateway reads only the fast tokenizer's file: "
            f"{remedy}"
        )
    if wrong := fault_of_texts(directory, template):
        raise ModelError(wrong)
