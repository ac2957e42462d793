"""Group -> gradients -> weights: advantages, prefix, response, loss, update, checkpoint."""
