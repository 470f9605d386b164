"""Training: loss, optimizer, sharded state, the jitted step, exact checkpoints and the loop around them."""
