"""Upkeep of a store: verifying it, quarantining what is damaged, going on from what is not."""
