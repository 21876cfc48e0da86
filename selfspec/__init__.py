"""Self-speculative decoding for Hugging Face models: cheap drafts, tree verification, unchanged output."""
