"""Megatron-Core plugin for NAM56R-style hybrid models."""

from pathlib import Path

__version__ = "0.1.0"

# specs/, recipes/ and patches/ are next to this folder in a checkout; the build maps them into the
# package. Running from a bare checkout on PYTHONPATH, without any install, finds them here instead.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "specs" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))
