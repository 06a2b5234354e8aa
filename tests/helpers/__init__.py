"""Things tests share: synthetic checkpoints, small modules and weights, references of ops."""
