"""`--lora-modules`: are these adapters, before any process starts?"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from epd.config import ConfigError, Settings
from epd.model_files.lora import modules_of, read_adapter


def checked(settings: Settings) -> Settings:
    """With directories that are absolute.  Raises ConfigError and ModelError."""
    lora = settings.engine.lora
    if not lora.enabled:
        raise ConfigError("settings of adapters need --enable-lora")
    found = modules_of(lora.modules)
    if len(found) > lora.max_loras:
        raise ConfigError(
            f"--lora-modules names {len(found)} adapters, and --max-loras is {lora.max_loras}"
        )
    for name, directory in found.items():
        if name in (settings.model_name, *settings.model_aliases):
            raise ConfigError(f"--lora-modules {name}: the model itself has this name")
        read_adapter(directory, lora.max_lora_rank)
    modules = tuple(f"{name}={Path(place).absolute()}" for name, place in found.items())
    below = str(Path(lora.runtime_dir).resolve()) if lora.runtime_dir else ""
    lora = structs.replace(lora, modules=modules, runtime_dir=below)
    engine = structs.replace(settings.engine, lora=lora)
    return structs.replace(settings, engine=engine)
