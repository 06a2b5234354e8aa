"""Things tests share: synthetic checkpoints."""
