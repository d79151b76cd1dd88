"""Tiny models, made once per session."""

from tests.engine.conftest import model_dir

__all__ = ["model_dir"]
