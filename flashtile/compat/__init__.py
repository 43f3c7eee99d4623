"""Names and signatures of other libraries, translated; `install` puts them in those libraries' place."""

from flashtile.compat.trees import install, uninstall

__all__ = ["install", "uninstall"]
