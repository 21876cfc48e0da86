"""The guard: how large each round should be, from what rounds cost on this machine and how often guesses are right."""
