"""Attention, writes and copies over pages. `reference` is the truth that the others are tested against."""
