"""Recipes as modules, for tests of what is in them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).parents[1] / "recipes"


def load(file: str) -> ModuleType:
    """The recipe in this file."""
    name = f"recipe_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, RECIPES / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
