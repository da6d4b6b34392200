"""Packages that only some workers need, and the command that installs a missing one."""

EXTRAS = {
    "numpy": "native",
    "torch": "native",
    "transformers": "native",
    "safetensors": "native",
    "PIL": "native",
    "triton": "native",
    "zmq": "zmq",
    "diffusers": "diffusion",
    "accelerate": "diffusion",
}


def install_hint(error: ModuleNotFoundError, engine: str, role: str) -> str:
    """A message: which package a worker needs, and how to install it.

    Raises:
        ModuleNotFoundError: ``error`` itself, if no extra has the module: that is a bug, not a missing extra.
    """
    if not is_of_an_extra(error):
        raise error
    missing = _package(error)
    return f"--engine {engine} --role {role} needs {missing}: pip install 'penstock[{EXTRAS[missing]}]'"


def is_of_an_extra(error: ModuleNotFoundError) -> bool:
    """Whether the missing module belongs to a package of an extra."""
    return _package(error) in EXTRAS


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]
