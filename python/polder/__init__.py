"""Memory that several hosts share: named objects and collectives over one pool."""

from polder.errors import PolderError

__all__ = ["PolderError"]
