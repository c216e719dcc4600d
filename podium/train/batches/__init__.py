"""From graded groups to the batches of an update."""
