"""Strict stand-ins for packages that cannot be installed here, importable under their own names while asked for.

``with installed():`` puts this folder in front of the path; ``environment()`` does it for a sub-process. A stand-in
refuses whatever the real package is known to refuse, and what is not known of the real one can be switched, so that
adapters have to look. See ``tensorrt_llm/_standin/variant.py``.
"""

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import REGISTRY

FOLDER = Path(__file__).parent
VARIANT = "TENSORRT_LLM_STANDIN"
_HAS = {"tensorrt_llm": "llmapi"}


def real(package: str) -> bool:
    """Whether the package itself is installed (not a stand-in, not the empty stub of PyPI)."""
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec(package, path)
    if spec is None or not spec.submodule_search_locations:
        return False
    inside = _HAS.get(package, "")  # PyPI's tensorrt_llm is a package with nothing in it
    return any((Path(folder) / inside).is_dir() for folder in spec.submodule_search_locations)


def environment(variant: str = "1.2.1", base: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a sub-process that is to import the stand-ins; its working directory is the repository."""
    found = dict(os.environ if base is None else base)
    rest = [part for part in found.get("PYTHONPATH", "").split(os.pathsep) if part]
    return found | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *rest]), VARIANT: variant}


def forget(packages: Sequence[str]) -> dict[str, object]:
    """Take modules out of ``sys.modules``; returns them by name."""
    names = [name for name in sys.modules if name.startswith(tuple(f"{p}." for p in packages)) or name in packages]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def installed(variant: str = "1.2.1", reload: Sequence[str] = ()) -> Iterator[None]:
    """Make the stand-ins importable here and in sub-processes; all is as before afterwards.

    Args:
        reload: packages of ours that must see another variant than they saw when they were first imported.
    """
    packages = (*(path.parent.name for path in FOLDER.glob("*/__init__.py")), *reload)
    before = forget(packages)
    collectors = set(REGISTRY._collector_to_names)
    path, old = os.environ.get("PYTHONPATH"), os.environ.get(VARIANT)
    os.environ.update({key: value for key, value in environment(variant).items() if key in ("PYTHONPATH", VARIANT)})
    sys.path.insert(0, str(FOLDER))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        forget(packages)
        sys.modules.update(before)  # type: ignore[arg-type]
        for collector in set(REGISTRY._collector_to_names) - collectors:  # as the packages, they come once a process
            REGISTRY.unregister(collector)
        for name, value in (("PYTHONPATH", path), (VARIANT, old)):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
