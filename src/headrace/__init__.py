"""Headrace: serve language models in production, from one CPU box to a fleet of GPU nodes."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("headrace")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0+source"
