"""The checkpoint out of two: `python -m training.graft.checkpoint` makes it and prints where.

SmolLM2-135M-Instruct comes from its package as `tests.real.checkpoint` makes it; tower, connector
and two token rows are `graft.safetensors` beside this file, matrices in 8 bits with a scale by row.
Both are under Apache-2.0.  The result lies below $XDG_CACHE_HOME.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.real import checkpoint as smollm2

GRAFT = Path(__file__).with_name("graft.safetensors")
SIDE, PATCH = 384, 16  # px, of the one tile that a picture becomes, and of a patch
GRID = SIDE // PATCH
ROWS = GRID * GRID  # as many patches; nothing is shuffled together
VOCABULARY = 49280  # rows of the embedding, as SmolVLM has; those without a name are zeros
NAMES = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
ADDED = 2  # of these have rows of their own
EMBEDDING = "model.text_model.embed_tokens.weight"
ADDED_ROWS = "added_rows"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Tensors = dict[str, torch.Tensor]


def image_text() -> str:
    """What stands in a prompt for a picture."""
    around, whole, image, _ = NAMES
    return around + whole + image * ROWS + around


def make(graft: Path = GRAFT) -> Path:
    """The checkpoint's directory, made if it is not there.  Raises smollm2.Unavailable."""
    language = smollm2.make()
    target = language.with_name(f"graft-{smollm2.file_sum(graft)[:8]}")
    if not target.exists():
        smollm2.replace(target, lambda part: assemble(part, language, load_file(graft)))
    return target


def assemble(directory: Path, language: Path, graft: Mapping[str, torch.Tensor]) -> None:
    """Writes an Idefics3 in float32; `graft` as `quantised` gives it, or not quantised."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(language / name, directory / name)
    tokenizer = Tokenizer.from_file(str(language / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in NAMES])
    tokenizer.save(str(directory / "tokenizer.json"))
    written = {
        "config.json": config(json.loads((language / "config.json").read_text())),
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor", "do_convert_rgb": True,
            "do_resize": True, "do_image_splitting": False, "do_rescale": True,
            "do_normalize": True, "do_pad": True, "resample": 2, "rescale_factor": 1 / 255,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": SIDE},
            "max_image_size": {"longest_edge": SIDE},
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": ROWS},
    }  # fmt: skip
    for name, content in written.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    text = load_file(language / "model.safetensors")
    tensors = {f"model.text_{name}": tensor for name, tensor in text.items()}
    seen = restored(graft)
    tensors[EMBEDDING] = with_rows(tensors[EMBEDDING], seen.pop(ADDED_ROWS))
    save_file(tensors | seen, directory / "model.safetensors", metadata={"format": "pt"})


def with_rows(embedding: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """[VOCABULARY, hidden]: the published rows, those of the first names, zeros."""
    rest = embedding.new_zeros(VOCABULARY - len(embedding) - len(added), embedding.shape[1])
    return torch.cat([embedding, added.to(embedding), rest])


def config(text: dict[str, Any]) -> dict[str, Any]:
    """Of an Idefics3 with this language model."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3",
        "dtype": "float32", "image_token_id": text["vocab_size"] + NAMES.index("<image>"),
        "scale_factor": 1, "tie_word_embeddings": True, "vocab_size": VOCABULARY,
        "pad_token_id": text["pad_token_id"], "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "text_config": text | {"vocab_size": VOCABULARY},
        "vision_config": {
            "model_type": "idefics3_vision", "hidden_size": 320, "intermediate_size": 1280,
            "num_hidden_layers": 8, "num_attention_heads": 5, "image_size": SIDE,
            "patch_size": PATCH,
        },
    }  # fmt: skip


def quantised(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Matrices as int8 with a float32 scale by row; vectors and added rows as float16."""
    small: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or name == ADDED_ROWS:
            small[name] = tensor.half().contiguous()
            continue
        by_row = tensor.float().flatten(1)
        scale = by_row.abs().amax(1).clamp_min(1e-12) / 127
        whole = (by_row / scale[:, None]).round().to(torch.int8)
        small |= {name: whole.view(tensor.shape), f"{name}.scale": scale}
    return small


def restored(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Float32, from what `quantised` gave."""
    large: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            scale = tensors.get(f"{name}.scale", torch.ones(1)).view(-1, *[1] * (tensor.ndim - 1))
            large[name] = tensor.float() * scale
    return large


if __name__ == "__main__":
    try:
        print(make())
    except smollm2.Unavailable as error:
        sys.exit(str(error))
