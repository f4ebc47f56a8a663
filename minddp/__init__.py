"""minddp."""
