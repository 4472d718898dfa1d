"""What load is to come, learned from what came. Pure: arrivals, ends and the time are handed in."""
