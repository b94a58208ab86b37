"""Headrace: serve language models in production, from one CPU box to a fleet of GPU nodes."""


def __getattr__(name: str) -> str:
    """Gives ``__version__``, looked up when first asked for: the look-up's imports cost every process 60 ms."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "0.0.0+source"
