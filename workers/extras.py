"""Packages that only some workers need, and the command that installs what is missing."""

EXTRAS = {
    "torch": "native",
    "transformers": "native",
    "safetensors": "native",
    "numpy": "native",
    "PIL": "native",
    "triton": "native",
    "diffusers": "diffusion",
    "accelerate": "diffusion",
}


def install_hint(error: ModuleNotFoundError, engine: str, role: str) -> str:
    """What a worker needs and how to install it.

    Raises:
        ModuleNotFoundError: ``error`` itself, if no extra brings the module: that is a defect, not a missing extra.
    """
    missing = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(missing)
    if extra is None:
        raise error
    return f"--engine {engine} --role {role} needs {missing}: pip install 'penstock[{extra}]'"
