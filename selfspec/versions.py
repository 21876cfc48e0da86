"""Which transformers this package works with."""

from __future__ import annotations

import transformers
from packaging.version import Version

from selfspec.errors import UnsupportedModel

MIN_VERSION, END_VERSION = Version("5.24"), Version("5.40")
"""`forward` takes `cache=`, and `Cache` is a list of layers."""


def other_version() -> UnsupportedModel:
    """What to say of the transformers at hand when it is not one of these."""
    return UnsupportedModel(
        f"transformers {transformers.__version__} is installed, this version of selfspec works with >= {MIN_VERSION}, "
        f"< {END_VERSION}; run: pip install 'transformers>={MIN_VERSION},<{END_VERSION}'"
    )


def check_version() -> None:
    """Raise UnsupportedModel when the installed transformers is outside the supported range."""
    if not MIN_VERSION <= Version(Version(transformers.__version__).base_version) < END_VERSION:
        raise other_version()
