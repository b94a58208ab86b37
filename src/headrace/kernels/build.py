"""Whether the native module was built from the C++ sources beside it.

In a source tree Python code is what the files say, the native module is what was built last. Figures and tests of an
older one are another program's, so those who measure ask here first.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_ROOT = Path(__file__).parents[3]
REMEDY = "build it with scripts/build-native"


def source_digest(root: Path = _ROOT) -> str | None:
    """Returns the SHA-256 of what the native module is built from, as CMakeLists.txt has it; None without sources.

    Args:
        root: of the source tree; default: the one that this package lies in.
    """
    if not (root / "csrc" / "bind.cpp").is_file():
        return None
    files = [path for pattern in ("*.cpp", "*.h") for path in (root / "csrc").rglob(pattern)]
    names = sorted(path.relative_to(root).as_posix() for path in files if "tests" not in path.parts)
    lines = [
        f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n" for name in [*names, "CMakeLists.txt"]
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def why_stale(root: Path = _ROOT) -> str | None:
    """Returns in words that the native module is not of the sources beside it; None where it is, or there are none.

    Raises:
        ImportError: the native module does not load.
    """
    from headrace.kernels import _native

    # A module from before it knew its sources has no digest at all.
    built_from, wanted = getattr(_native, "source_digest", ""), source_digest(root)
    return None if wanted in (None, built_from) else "the native module was not built from the C++ sources beside it"
