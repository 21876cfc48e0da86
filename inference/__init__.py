"""The decode loop, the patch on `generate`, and the tools that measure it."""
