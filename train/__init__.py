"""Training of draft heads on a frozen target."""
