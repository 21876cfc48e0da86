"""An OpenAI-compatible server. Its modules need the `serve` extra and are imported by `selfspec serve` alone."""
