"""Errors that users meet. Each message says what came, what was wanted and what to do next."""


class SelfspecError(Exception):
    """Base of all errors raised on purpose by this package."""


class UnsupportedModel(SelfspecError, ValueError):
    """The target model has a part that tree verification cannot serve exactly."""


class UnsupportedGeneration(SelfspecError, ValueError):
    """A `generate` argument that speculative decoding cannot honour."""


class CheckpointError(SelfspecError, ValueError):
    """A checkpoint of draft heads is damaged, incomplete, or belongs to another model."""


class DraftTreeError(SelfspecError, ValueError):
    """A draft proposed a tree that is not well formed."""


class ConfigError(SelfspecError, ValueError):
    """A configuration names an unknown key or holds an impossible value."""


class DataError(SelfspecError, ValueError):
    """Prompts or training text that cannot be used."""


class TrainingError(SelfspecError, RuntimeError):
    """Training cannot go on: a loss that is not a number, processes that do not see each other."""


class HubError(SelfspecError, RuntimeError):
    """The Hub refused, or could not be reached."""
